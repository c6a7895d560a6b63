"""Processes on Ray that stand in for each other, for whoever has work for them.

::

    cluster.py       Ray: started, used and ended; what its actors reply
    worker_slots.py  workers that are replaced when they die or hang
    actor_pool.py    such workers for any object, with weights that change while they run
    topology.py      GPUs divided into replicas of one model
    replicas.py      a group of ranks on Ray that many clients share

Nothing here knows an episode, a world or a server. Only ``topology`` does not import Ray.
"""
