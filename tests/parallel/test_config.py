"""Degrees, and what they are compared with before anything is loaded."""

from dataclasses import replace

import pytest
import torch

from strands_cosmos3 import ParallelConfig
from strands_cosmos3.engine.config import TransformerConfig
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.weights import expected_shapes
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.parallel.mesh import key_heads, require_tp_size, shard_slices

NANO = TransformerConfig(4096, 36, 32, 8, 128, 12288, 151936, 64)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp_size": 0}, "tp_size must be a whole number of at least 1, got 0"),
        ({"tp_size": 2.0}, "tp_size must be a whole number, got float"),
        ({"tp_size": True}, "tp_size must be a whole number, got bool"),
        ({"cfg_size": 3}, "cfg_size must be a whole number from 1 to 2, got 3"),
        ({"sp_size": 0}, "sp_size must be a whole number of at least 1, got 0"),
        ({"vae_split": "height"}, "vae_split 'height'.*exact, off, tiles"),
        ({"timeout_s": float("inf")}, "timeout_s must be a finite number above zero"),
        ({"world_size": "4", "tp_size": 4}, "world_size must be"),
    ],
)
def test_impossible_values(given, said):
    with pytest.raises(InputError, match=said):
        ParallelConfig(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"world_size": 8, "tp_size": 2}, "world_size is 8; tp=2 x cfg=1 makes 2"),
        ({"world_size": 2, "tp_size": 2, "cfg_size": 2}, "makes 4"),
        ({"world_size": 2, "sp_size": 4}, "tp=1 x cfg=1 x sp=4 makes 4"),
    ],
)
def test_impossible_degrees(given, said):
    with pytest.raises(ConfigError, match=said):
        ParallelConfig(**given)


def test_the_number_of_processes_may_be_stated():
    assert ParallelConfig(world_size=8, cfg_size=2, tp_size=4).ranks == 8
    assert ParallelConfig(world_size=1).ranks == 1
    assert replace(ParallelConfig(), tp_size=4).ranks == 4
    with pytest.raises(ConfigError, match="world_size is 1"):
        replace(ParallelConfig(world_size=1), tp_size=4)


def test_a_rank_s_place():
    """(cfg_rank, sp_rank, tp_rank)"""
    degrees = ParallelConfig(tp_size=4, cfg_size=2, sp_size=3)
    assert [degrees.coordinates(rank) for rank in (0, 3, 4, 11, 12, 23)] == [
        (0, 0, 0),
        (0, 0, 3),
        (0, 1, 0),
        (0, 2, 3),
        (1, 0, 0),
        (1, 2, 3),
    ]


def test_one_rank_a_sequence_is_not_mentioned():
    """So that what records of an evaluation identify stays the same."""
    assert ParallelConfig(4, 2).degrees == {"tp_size": 4, "cfg_size": 2}
    assert ParallelConfig(4, 2, 3).degrees == {"tp_size": 4, "cfg_size": 2, "sp_size": 3}
    assert (str(ParallelConfig(4, 2)), ParallelConfig(4, 2).ranks) == ("tp=4 x cfg=2", 8)
    assert ParallelConfig(4, 2, 3).torchrun_line() == (
        "torchrun --nproc-per-node=24 -m strands_cosmos3 infer --tp=4 --cfg=2 --sp=3 ..."
    )


def test_the_world_is_checked_before_loading_and_the_error_holds_the_line_that_works(tmp_path):
    with pytest.raises(ConfigError) as caught:  # the folder does not even exist
        Cosmos3Engine.from_pretrained(
            tmp_path / "nowhere", parallel=ParallelConfig(tp_size=4, cfg_size=2)
        )
    assert "tp=4 x cfg=2 needs 8 processes, but there is 1 process" in str(caught.value)
    assert "torchrun --nproc-per-node=8 -m strands_cosmos3 infer --tp=4 --cfg=2" in str(
        caught.value
    )


@pytest.mark.parametrize("parallel", [None, ParallelConfig()])
def test_one_by_one_is_one_process(checkpoints, parallel):
    engine = Cosmos3Engine.from_pretrained(
        checkpoints["nano"], dtype=torch.float32, parallel=parallel
    )
    assert (engine.parallel_context.rank, engine.parallel_context.branches) == (0, (0, 1))


@pytest.mark.parametrize("size", [3, 5, 64])
def test_a_degree_that_does_not_divide_lists_those_that_do(size):
    with pytest.raises(ConfigError, match=r"valid: 1, 2, 4, 8, 16, 32\."):
        require_tp_size(NANO, size)


@pytest.mark.parametrize(
    ("tp_size", "sp_size", "valid"),
    [(1, 3, "1, 2, 4, 8, 16, 32"), (1, 64, "1, 2, 4, 8, 16, 32"), (8, 8, "1, 2, 4")],
)
def test_query_heads_that_cannot_be_divided_list_the_degrees_that_can(tp_size, sp_size, valid):
    with pytest.raises(ConfigError, match=f"sp_size={sp_size} does not .*; valid: {valid}\\."):
        ParallelConfig(tp_size, 1, sp_size).check_transformer(NANO)


def test_key_heads_fewer_than_ranks():
    assert [list(key_heads(NANO, rank, 2)) for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [list(key_heads(NANO, rank, 16)) for rank in range(16)] == [
        [rank // 2] for rank in range(16)
    ]


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_every_query_head_sits_with_its_key_head(size):
    for rank in range(size):
        queries = range(rank * 32 // size, (rank + 1) * 32 // size)
        assert {q // 4 for q in queries} == set(key_heads(NANO, rank, size))


@pytest.mark.parametrize("size", [2, 8, 16])
def test_cuts_cover_every_weight_without_gaps(size):
    for key, shape in expected_shapes(NANO).items():
        cuts = [shard_slices(key, shape, NANO, rank, size) for rank in range(size)]
        if not cuts[0]:
            assert not any(cuts)
            continue
        axis = len(cuts[0]) - 1
        covered = 0  # up to here
        for cut in sorted((cut[axis] for cut in cuts), key=lambda cut: cut.start):
            assert cut.start <= covered, key
            covered = max(covered, cut.stop)
        assert covered == shape[axis], key
