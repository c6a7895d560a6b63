"""One engine on several ranks: tensor parallel times guidance parallel, over torch.distributed.

::

    config.py     ParallelConfig: the degrees, checked against the world before anything is loaded; RankOptions
    mesh.py       Mesh: the groups of ranks, and the only place that sends anything (and counts it)
    tensor.py     which slice of a stored weight a rank keeps, and where the unchanged model sums over ranks
    vae_split.py  the VAE over width shards, exact, or over tiles that do not speak to each other
    payload.py    requests and results as bytes: safetensors and JSON, never pickle
    rank.py       InferenceRank: one rank in whatever process hosts it
    gang.py       Gang: its leader: who answers, who is silent, who is lost; ends all of them together
    worker.py     a process that hosts a rank, and the Member that starts and feeds it
    engine.py     GangEngine: a gang where a Cosmos3Engine is expected
    plan.py       what it costs: bytes sent, messages, memory (docs/scaling.md)

A rank in any process (a subprocess of ours, a Ray actor)::

    rank = InferenceRank(
        checkpoint,                        # folder, the same for every rank
        ParallelConfig(tp_size=2, cfg_size=1),
        rank=0,                            # 0 .. parallel.world_size - 1 = cfg_rank * tp_size + tp_rank
        init_method="tcp://10.0.0.1:29500",  # or file:///...; where ranks meet; rank 0 listens
        options=RankOptions(device="cpu", dtype="float32", decode_video=False, action_space=None, threads=1),
    )                                      # returns when every rank is there and has loaded its weights
    answer = rank.infer(payload)           # all ranks with the same bytes; rank 0 returns bytes, the others None
    rank.progress                          # grows with every denoising step; read it from another thread
    rank.close()

Its leader, wherever ranks live: give :class:`~strands_cosmos3.parallel.gang.Gang` one ``Member`` for each rank::

    class Member(Protocol):
        def submit(self, payload: bytes) -> None: ...             # hand over a request; returns at once
        def reports(self, wait_s: float) -> Sequence[Report]: ... # what came since; RankLostError when it is gone
        def kill(self) -> None: ...                               # end it, whatever state it is in (stopped, hung)

    Report(kind, progress=0, payload=b"", error=("TypeName", "message"))   # kind: ready | beat | answer | error

    gang = Gang(members, GangLimits(start_s=300, silent_s=8, stalled_s=120)); gang.wait_ready()
    gang.infer(payload) -> bytes    # RankLostError, RankSilentError, RankFailedError: every member was killed first
    gang.close()

    engine = GangEngine(checkpoint_folder, start_gang)   # start_gang: () -> Gang; step(request), checkpoint, close()
    backend = EngineBackend(engine, options)             # backends.native; hand it to Cosmos3Policy(backend=...)
"""
