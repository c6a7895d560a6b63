"""How GPUs become replicas: by the degrees of the policy, without a remainder."""

import pytest

from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.fleet.topology import Topology
from strands_cosmos3.parallel.config import ParallelConfig


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
    degrees = ParallelConfig(tp_size, cfg_size)
    topology = Topology(degrees, num_gpus)
    assert (topology.replicas, topology.ranks) == (replicas, ranks)
    if replicas:
        assert Topology(degrees, num_gpus, total_shard=replicas).replicas == replicas


def test_a_remainder_is_refused_and_what_would_work_is_named():
    with pytest.raises(
        ConfigError,
        match=r"7 does not divide into replicas of tp=2 x cfg=1 = 2; 1 would stay idle\. "
        r"Use num_gpus=6 or num_gpus=8, or degrees that multiply to 1 or 7\.",
    ):
        Topology(ParallelConfig(2), 7)
    with pytest.raises(
        ConfigError, match=r"2 would stay idle\. Use num_gpus=4, or .* multiply to 1 or 2\."
    ):
        Topology(ParallelConfig(2, 2), 2)


def test_a_contradiction_is_refused_and_what_would_work_is_named():
    with pytest.raises(
        ConfigError,
        match=r"total_shard=3 contradicts num_gpus=8 / \(tp=2 x cfg=1\) = 4\. Leave total_shard "
        r"out, or use num_gpus=6",
    ):
        Topology(ParallelConfig(2), 8, total_shard=3)


@pytest.mark.parametrize(
    "wrong", [{"num_gpus": -1}, {"total_shard": 0}, {"num_gpus": 2.0}, {"num_gpus": True}]
)
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Topology(ParallelConfig(), **wrong)


def test_replicas_on_the_cpu_are_as_many_as_asked_for():
    assert Topology(ParallelConfig(2), 0, total_shard=3).ranks == 6


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(ParallelConfig(2, 2), 8), "2 replicas of 4 (tp=2 x cfg=2) on 8 GPUs"),
        (Topology(ParallelConfig(2)), "1 replica of 2 (tp=2 x cfg=1) on the CPU"),
        (Topology(ParallelConfig()), "a policy in every worker, no GPU"),
    ],
)
def test_a_topology_as_text(topology, text):
    assert str(topology) == text
