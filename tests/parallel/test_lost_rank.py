"""A rank that is gone in the middle of an exchange: the others name it instead of showing gloo's
error.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from strands_cosmos3.errors import RankLostError
from strands_cosmos3.parallel.collectives import Group, Traffic, connect
rank = sum(os.fork() == 0 for _ in range(1))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
connect(torch.device("cpu"), 20, "file://" + sys.argv[1], rank, 2)
group = Group(dist.group.WORLD, Traffic())
group.sum(torch.ones(3), "first")
if rank:
    os._exit(9)
try:
    group.sum(torch.ones(3), "layer")
except RankLostError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_lost_rank_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "store"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "rank 0 could not exchange 'layer': rank 1 ended" in done.stdout, done.stderr
