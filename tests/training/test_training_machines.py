"""Post-training on two machines, which are network namespaces with addresses of their own."""

import os
import subprocess
import sys

import pytest
import torch

from helpers import post_training
from helpers.environments import ROOT, TESTS, network_namespace
from helpers.machines import ADDRESSES, Machines
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.training.state import read_state

RANK = """
import sys
from pathlib import Path
from helpers import post_training
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.parallel.rank import exit_rank
try:
    post_training.main(*map(Path, sys.argv[1:]))
except Cosmos3Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    exit_rank(1)
exit_rank(0)
"""


@pytest.fixture(scope="module")
def machines():
    network_namespace()
    with Machines() as made:
        yield made


def train_on_both(machines, port, source, dataset, folders):
    """The statuses of both machines' processes, and what they said."""
    paths = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    processes = []
    for node, folder in enumerate(folders):
        told = {"TORCHELASTIC_RUN_ID": "tests", "RANK": node, "WORLD_SIZE": 2}
        told |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": node, "GROUP_WORLD_SIZE": 2}
        told |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        command = ["ip", "netns", "exec", machines.names[node], sys.executable, "-c", RANK]
        processes.append(
            subprocess.Popen(
                [*command, str(source), str(dataset), str(folder)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": paths, **{k: str(v) for k, v in told.items()}},
            )
        )
    said = [process.communicate(timeout=300)[0] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
def test_two_machines_post_train_as_one_process_does(machines, tmp_path):
    source = write_checkpoint(tmp_path / "source", sizes=post_training.SMALL)
    dataset = post_training.made_up_arm(tmp_path / "dataset", ("push", "pull"))
    post_training.main(source, dataset, tmp_path / "one")
    shared = tmp_path / "two"
    shared.mkdir()
    statuses, said = train_on_both(machines, 29600, source, dataset, [shared, shared])
    assert statuses == [0, 0], said
    alone, both = (read_state(tmp_path / run)[0] for run in ("one", "two"))
    assert both["step"] == alone["step"] == 6
    for name, weights in alone["ema"].items():
        torch.testing.assert_close(both["ema"][name], weights, rtol=1e-3, atol=1e-5)
    assert not list(shared.glob(".one-folder-*"))


@pytest.mark.slow
def test_machines_that_do_not_share_the_folder_are_told(machines, tmp_path):
    """Resumed, the other machine would begin anew."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    statuses, said = train_on_both(machines, 29601, tmp_path / "no", tmp_path / "no", folders)
    assert statuses[1] == 1
    assert f"ConfigError: --out {folders[1]} is another folder than on rank 0's machine" in said[1]
    assert statuses[0] != 0, "rank 0 ends too"
