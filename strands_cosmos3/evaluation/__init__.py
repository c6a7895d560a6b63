"""Evaluation: many episodes on any number of processes, with the same result as on one.

::

    settings.py           Settings: an evaluation, from options or TOML
    policy_settings.py    the options of its policy
    plan.py               Condition: a row of the report; Assignment: one episode
    policies.py           the policy of an episode under a condition
    judging.py            a judge that is asked about each episode's film
    runner.py             an assignment in, a record out
    folder.py             the folder: episodes written atomically, identified by settings, locked
    driver.py             the queue, and what happens when a process dies
    statistics.py         success rates with intervals, latencies, differences
    tables.py             the tables of the report, for terminal and page
    page.py, report.py    the report as an HTML page and as JSON
    evaluate.py           all of it

Its workers and replicas on Ray are those of ``fleet``. A world is known by its interface
(:class:`~strands_cosmos3.worlds.World`) only.
"""
