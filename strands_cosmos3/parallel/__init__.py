"""One engine on several ranks: tensor times sequence times guidance parallelism, over
torch.distributed.

::

    config.py        ParallelConfig: the degrees, checked before loading; RankOptions
    collectives.py   process groups, their exchanges and traffic counters
    mesh.py          Mesh: one rank's position in the groups, and its slices of the weights
    shared_sequence.py   the sequence divided by tokens, and within attention by heads
    sharded_vae.py   the VAE over width shards (exact) or overlapping tiles
    payload.py       requests and results as bytes: safetensors and JSON, never pickle
    group.py         RankGroup: supervises ranks, and ends all of them together
    rank.py          Rank: one rank; ranks in processes on this machine
    launched.py      processes that torchrun started, and the watch over several machines
    leader.py        LaunchedRanks: these processes as ranks, led by rank 0
    rank_engine.py   RankGroupEngine: a group of ranks with the interface of Cosmos3Engine

To host ranks elsewhere than in processes on this machine, run a ``Rank`` in each process and
write a ``RankHandle`` for it::

    group = RankGroup(start, RankTimeouts(silent_s=8))   # start(end: ExitStack) -> handles
    engine = RankGroupEngine(checkpoint, False, group)   # step(request), close()
    backend = EngineBackend(engine, options)             # Cosmos3Policy(backend=...)
"""
