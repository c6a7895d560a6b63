"""Evaluation: many episodes, on as many processes as there are, with the same answer on one.

::

    topology.py     Topology: how many replicas a number of GPUs gives
    conditions.py   Perturbation: what a policy is shown and told, and what it is judged by; the controls
    plan.py         which episodes there are: each with its own seed, instruction and file
    settings.py     Settings: everything that an evaluation is, from options or TOML
    folder.py       run/: episodes written whole, resumed by identity, locked
    seam.py         where a condition touches a request
    simulator.py    one worker's robot and policy: an episode in, its record out
    cluster.py      Ray: started, used and ended
    ranks.py        one rank in an actor, and how its gang's leader sees it
    replica.py      a gang of ranks on Ray that simulators share
    driver.py       the queue, and what happens when a process dies
    statistics.py   successes with their intervals, latencies, differences
    report.py       the report's figures; page.py: the same as one HTML page

Ray is imported in ``cluster``, ``ranks``, ``replica`` and ``driver`` only, and nothing here is imported before it is needed.
"""
