"""Evaluation: many episodes on any number of processes, with the same result as on one.

::

    topology.py           Topology: replicas from a number of GPUs
    perturbations.py      Perturbation: a change of the policy's images or instruction, a row of the report
    plan.py               Assignment: one episode, with its seed and instructions
    libero_plan.py        the same for LIBERO's suites
    settings.py           Settings: an evaluation, from options or TOML
    folder.py             the folder: episodes written atomically, identified by settings, locked
    perturbed_backend.py  applies a perturbation to requests
    perturbed_policy.py   the same for a policy of another make
    policy_source.py      makes the policy of an episode
    episode_runner.py     an assignment in, a record out
    simulator.py          our table
    libero_simulator.py   LIBERO
    reply.py              what an actor returns
    simulator_actor.py    a simulator in a Ray actor
    cluster.py            Ray: started, used and ended
    ranks.py              a rank in a Ray actor, and its handle
    replica.py            a group of ranks on Ray that simulators share
    driver.py             the queue, and what happens when a process dies
    statistics.py         success rates with intervals, latencies, differences
    report.py, page.py    the report as JSON and as an HTML page
    evaluate.py           all of it

Ray is imported in ``cluster``, ``ranks``, ``replica``, ``simulator_actor`` and ``driver`` only.
"""
