"""From a number of GPUs to replicas, and what is refused."""

import pytest

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.evaluation.topology import Topology


@pytest.mark.parametrize(
    ("num_gpus", "tp_size", "cfg_size", "replicas", "ranks"),
    [
        (8, 2, 1, 4, 8),
        (8, 2, 2, 2, 8),
        (8, 1, 1, 8, 8),
        (1, 1, 1, 1, 1),
        (6, 3, 2, 1, 6),
        (0, 1, 1, 0, 0),
        (0, 2, 1, 1, 2),
    ],
)
def test_replicas_follow_from_the_number_of_gpus(num_gpus, tp_size, cfg_size, replicas, ranks):
    topology = Topology(num_gpus, tp_size, cfg_size)
    assert (topology.replicas, topology.ranks) == (replicas, ranks)
    if replicas:
        assert Topology(num_gpus, tp_size, cfg_size, total_shard=replicas).replicas == replicas


def test_a_remainder_is_refused_and_what_would_work_is_named():
    with pytest.raises(
        ConfigError,
        match=r"7 does not divide.*= 2; 1 would stay idle.*num_gpus=6 or num_gpus=8.*tp_size of 1 "
        r"or 7",
    ):
        Topology(7, 2)
    with pytest.raises(
        ConfigError, match=r"2 would stay idle\. Use num_gpus=4, or.*tp_size of 1\."
    ):
        Topology(2, 2, 2)


def test_a_contradiction_is_refused_and_what_would_work_is_named():
    with pytest.raises(
        ConfigError,
        match=r"total_shard=3 contradicts num_gpus=8 .* = 4\. Leave total_shard out, or use "
        r"num_gpus=6",
    ):
        Topology(8, 2, total_shard=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_gpus": -1},
        {"tp_size": 0},
        {"cfg_size": 3},
        {"total_shard": 0},
        {"num_gpus": 2.0},
        {"num_gpus": True},
    ],
)
def test_degrees_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Topology(**wrong)


def test_replicas_on_the_cpu_are_as_many_as_asked_for():
    assert Topology(0, 2, 1, total_shard=3).ranks == 6
    assert Topology(0, 2, 1, total_shard=3).gpus_per_rank == 0
    assert Topology(2, 2).gpus_per_rank == 1
