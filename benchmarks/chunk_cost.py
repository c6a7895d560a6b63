"""Time a chunk of one checkpoint costs against another's, in one run and on the same pictures; each
with its own preset:

    python benchmarks/chunk_cost.py assets/table_policy OTHER [--chunks 60] [--threads 1]

Actions only, as in the control loop; the two take turns. Printed: median milliseconds of an answer,
and the ratio of medians.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import torch

from strands_cosmos3.actions.rotations import se3
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.embodiments import DROID_RIG, get_embodiment
from strands_cosmos3.engine.vae import NovelPictureWarning
from strands_cosmos3.types import Request


def main() -> None:
    """Print one line per checkpoint, and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs=2,
        help="folders of two policies for the table; the second is the reference",
    )
    parser.add_argument(
        "--chunks", type=int, default=60, help="of each, after five that do not count"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", NovelPictureWarning)  # the pictures are noise
    embodiment, rng = get_embodiment("droid_lerobot"), np.random.default_rng(0)
    space, T = (
        embodiment.action_space("midtrain"),
        se3(np.diag([1.0, -1.0, -1.0]), np.array([0.45, 0.0, 0.3])),
    )
    backends = [NativeBackend(folder) for folder in given.checkpoints]
    took: list[list[float]] = [[], []]
    for i in range(given.chunks + 5):
        views = {
            name: rng.integers(0, 256, (*DROID_RIG.view_hw, 3), np.uint8)
            for name in DROID_RIG.views
        }
        for backend, times in zip(backends, took, strict=True):
            composite = backend.compose(views, DROID_RIG)
            what = {"limb_poses": {"arm": T}, "composite": composite, "seed": i, "decode_frames": 0}
            request = Request(embodiment, space, "pick up the red cube", 16, None, 1.0, **what)
            start = time.perf_counter()
            backend.infer(request)
            times.append((time.perf_counter() - start) * 1e3)
    medians = [median(times[5:]) for times in took]
    for folder, backend, ms in zip(given.checkpoints, backends, medians, strict=True):
        print(
            f"{folder}: {ms:.1f} ms a chunk ({backend.engine.checkpoint.sampling.num_steps} steps)"
        )
    print(
        f"ratio {medians[0] / medians[1]:.2f} ({given.chunks} chunks of each, {given.threads} "
        "threads)"
    )


if __name__ == "__main__":
    main()
