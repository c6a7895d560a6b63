"""CPU time of the bundled policy's chunk by its exported graphs, against PyTorch's engine of
another checkout (``git worktree add /tmp/before 605a3876``), each in a process of its own, in
alternating rounds.

    python benchmarks/exported.py --baseline /tmp/before [--film]

With ``--film`` the chunk has its predicted video, as many frames as a filmed rollout shows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 16
SHOWN = (
    9  # of the bundled policy's video: the given frame and one for each row until the next chunk
)
WARM_UP = 3


def measure(
    baseline: Path, film: bool = False, rounds: int = 21, threads: int = 1
) -> dict[str, Any]:
    """Compare both.

    Args:
        baseline: Checkout whose engine is compared with.
        film: Whether chunks have their predicted video.
        rounds: Of one chunk by each side.
        threads: Of PyTorch, and of BLAS.
    """
    here = Path(__file__).resolve().parents[1]
    sides = {"onnx": (here, "onnx"), "native": (here, "native"), "baseline": (baseline, "native")}
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, "worker", backend, str(int(film))],
            env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
            | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, (root, backend) in sides.items()
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(WARM_UP + rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            worker = workers[name]
            print(number, file=worker.stdin, flush=True)
            assert worker.stdout is not None
            answers[name].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    medians = {
        name: statistics.median(each["cpu_ms"] for each in chunks[WARM_UP:])
        for name, chunks in answers.items()
    }
    gaps = [
        np.abs(np.subtract(one["action"], other["action"])).max()
        for one, other in zip(answers["onnx"], answers["baseline"], strict=True)
    ]
    return {
        "film": film,
        "rounds": rounds,
        "cpu_ms": medians,
        "onnx_over_baseline": medians["onnx"] / medians["baseline"],
        "native_over_baseline": medians["native"] / medians["baseline"],
        "largest_difference_of_actions": float(max(gaps)),
    }


def work(name: str, film: bool) -> None:
    """Answer each line of standard input with a chunk, and its CPU time."""
    from strands_cosmos3.backends import make_backend
    from strands_cosmos3.backends.options import BackendOptions
    from strands_cosmos3.embedded import embedded_checkpoint
    from strands_cosmos3.embodiments import get_embodiment
    from strands_cosmos3.engine.options import EngineOptions
    from strands_cosmos3.types import Request

    options = BackendOptions(engine=EngineOptions(decode_video="preview" if film else False))
    backend = make_backend(name, embedded_checkpoint(), options)
    embodiment = get_embodiment("droid")
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[:3, 3] = 0.48, 0.0, 0.24
    for line in sys.stdin:
        number = int(line)
        request = Request(
            embodiment=embodiment,
            action_space=embodiment.action_space("midtrain"),
            instruction="pick up the red cube",
            n_rows=ROWS,
            q_rad=None,
            gripper=1.0,
            composite=np.random.RandomState(number).randint(0, 256, (128, 152, 3), np.uint8),
            limb_poses={"arm": pose},
            seed=number,
            decode_frames=SHOWN if film else 0,
        )
        started_s = time.process_time()
        chunk = backend.infer(request)
        cpu_ms = (time.process_time() - started_s) * 1e3
        print(json.dumps({"cpu_ms": cpu_ms, "action": chunk.action.tolist()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3] == "1")
    else:
        import report

        report.run(measure)
