"""Evaluation: many episodes on any number of processes, with the same result as on one.

::

    settings.py           Settings: an evaluation, from options or TOML; Topology: its GPUs
    policy_settings.py    the options of its policy
    plan.py               Condition: a row of the report; Assignment: one episode
    policies.py           the policy of an episode under a condition
    runner.py             an assignment in, a record out
    folder.py             the folder: episodes written atomically, identified by settings, locked
    cluster.py            Ray: started, used and ended
    replica.py            a group of ranks on Ray that simulators share
    places.py             workers that are replaced when they die or hang
    driver.py             the queue, and what happens when a process dies
    statistics.py         success rates with intervals, latencies, differences
    tables.py             the tables of the report, for terminal and page
    page.py, report.py    the report as an HTML page and as JSON
    evaluate.py           all of it

Ray is imported in ``cluster``, ``places``, ``replica``, ``driver`` and ``crew`` only. A world is
known by its interface (:class:`~strands_cosmos3.worlds.World`) only.
"""
