"""One thread for each process, and which tests share a worker of ``pytest -n``."""

import os
from pathlib import PurePosixPath

import pytest

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
os.environ.update(dict.fromkeys(THREADS, "1"))  # before numpy or torch is imported; processes that tests start inherit it

TESTS = PurePosixPath("tests")
GROUPS = {
    "processes": (
        "parallel",
        "evaluation",
        "training/test_training_sharding.py",
        "training/test_training_dynamics.py",
    ),
    "oracle": ("engine/test_parity.py", "engine/test_mutations.py", "engine/test_engine_step.py", "engine/test_graphs.py"),
    "service": ("serving/test_faults.py", "serving/test_midchunk.py"),
    "training": ("training",),
}
"""Group -> files and folders of tests that share an expensive session fixture, or that each occupy several cores.

The first that names a file wins, and groups start in this order. Any other file is a group of its own.
"""


def group_of(path: PurePosixPath) -> str:
    for group, members in GROUPS.items():
        if any(path.is_relative_to(TESTS / member) for member in members):
            return group
    return str(path)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(group_of(PurePosixPath(item.nodeid.split("::")[0]))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first: the workers then end at about the same time."""
    order = [*GROUPS]

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        assert mark is not None
        return order.index(mark.args[0]) if mark.args[0] in order else len(order)

    items.sort(key=place)
