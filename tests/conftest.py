"""One thread for each process, and which tests share a worker of ``pytest -n``."""

import gc
import os
from pathlib import PurePosixPath

import hypothesis
import pytest

from helpers.environments import ROOT
from helpers.instructions import instructions
from helpers.rank_groups import Harness

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
# before numpy or torch is imported; processes that tests start inherit it
os.environ.update(dict.fromkeys(THREADS, "1"))
hypothesis.settings.register_profile("untimed", deadline=None)  # machines are busy
hypothesis.settings.load_profile("untimed")
gc.disable()  # while modules are imported: a collection would walk all of torch, and free nothing

TESTS = PurePosixPath("tests")
GROUPS = {
    "processes": ("parallel", "evaluation", "fleet", "training/test_training_sharding.py"),
    "service": ("serving/test_faults.py", "serving/test_midchunk.py"),
    "oracle": (
        "engine/test_parity.py",
        "engine/test_mutations.py",
        "engine/test_engine_step.py",
        "engine/test_graphs.py",
        "engine/test_odd_checkpoints.py",
    ),
    "training": ("training", "recipes", "worlds/table/test_demonstrations.py"),
    "strands-robots": ("policy/test_strands_robots.py", "test_examples.py"),
    "embedded": ("test_embedded.py",),
    "executor": ("control/test_executor.py",),
}
"""Group -> files and folders whose tests share an expensive fixture or environment, or that each
occupy several cores.

The first that names a file wins, and groups start in this order. Any other file is a group of its
own.
"""


def group_of(nodeid: str) -> str:
    path = PurePosixPath(nodeid.split("::")[0])
    for group, members in GROUPS.items():
        if any(path.is_relative_to(TESTS / member) for member in members):
            return group
    return str(path)


def pytest_report_header() -> str:
    """What arithmetic runs on: kernels of another instruction set sum in another order."""
    return f"instructions: {instructions()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first: the workers then end at about the same time."""
    order = {group: place for place, group in enumerate(GROUPS)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


def pytest_collection_finish() -> None:
    """Whatever is imported stays: from here on, a garbage collection walks only what tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def harness():
    """Groups of ranks; see helpers/rank_groups.py."""
    made = Harness()
    yield made
    made.close()


WITNESS = """
import atexit, os, sys
def witness():
    with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
        file.write(os.environ.get("RANK", "no rank") + " " + " ".join(sys.orig_argv))
atexit.register(witness)
"""


@pytest.fixture
def who_came_to_the_end_of_python(tmp_path, monkeypatch):
    """Of the processes that a test starts, those that Python itself took down: id -> rank and
    command line.
    """
    folder = tmp_path / "ends"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITNESS.format(folder=str(folder)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    return lambda: {
        int(path.name): path.read_text() for path in folder.iterdir() if path.name.isdigit()
    }


@pytest.fixture(scope="module")
def few_collected():
    """A module's collections of garbage walk what the module makes, and nothing of the tests before
    it: those that look for what is left behind are many.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give whole groups to workers, in the order of collection.

    ``--dist loadgroup`` would do the same, but xdist 3.8 loses the names of groups under pytest
    9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
