"""dtype='auto': a measured rule for wide models, and nothing that changes without being asked
for.
"""

import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from helpers.options import backend_options
from strands_cosmos3.backends.native import NativeBackend
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.preflight import LEAST_GAIN, LEAST_WIDTH, bfloat16_gain, choose_dtype
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.parallel.config import ParallelConfig

CPU = torch.device("cpu")


@pytest.fixture
def narrow(checkpoints):
    return Checkpoint.open(checkpoints["silu"]).config


def test_auto_follows_the_measured_gain_of_wide_models(narrow):
    bfloat16_gain.cache_clear()
    assert choose_dtype("auto", CPU, replace(narrow, hidden_size=LEAST_WIDTH - 1)) is torch.float32
    assert bfloat16_gain.cache_info().misses == 0, "a narrow model is not measured"
    wide = replace(narrow, hidden_size=LEAST_WIDTH, intermediate_size=256)
    chosen = {choose_dtype("auto", CPU, wide) for _ in range(3)}
    assert bfloat16_gain.cache_info().misses == 1, "once per process"
    gain = bfloat16_gain(LEAST_WIDTH, 256, torch.get_num_threads())
    assert chosen == {torch.bfloat16 if gain >= LEAST_GAIN else torch.float32}


@pytest.mark.parametrize(
    ("single_s", "half_s", "chosen"),
    [(0.009, 0.001, torch.bfloat16), (0.006, 0.004, torch.float32)],
)
def test_a_small_gain_is_none(narrow, monkeypatch, single_s, half_s, chosen):
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda x, _: time.sleep(single_s if x.dtype is torch.float32 else half_s),
    )
    bfloat16_gain.cache_clear()
    assert choose_dtype("auto", CPU, replace(narrow, hidden_size=LEAST_WIDTH)) is chosen
    bfloat16_gain.cache_clear()


def test_defaults_follow_the_device_and_names_win(narrow):
    wide = replace(narrow, hidden_size=LEAST_WIDTH)
    assert choose_dtype(None, CPU, wide) is torch.float32
    assert (
        choose_dtype("auto", torch.device("cuda"), narrow)
        is choose_dtype(None, torch.device("cuda"), narrow)
        is torch.bfloat16
    )
    assert (
        choose_dtype("bfloat16", CPU, narrow)
        is choose_dtype(torch.bfloat16, CPU, narrow)
        is torch.bfloat16
    )
    assert choose_dtype("float32", torch.device("cuda"), wide) is torch.float32
    with pytest.raises(UnknownNameError, match=r"'int8'.*auto, bfloat16, float32"):
        choose_dtype("int8", CPU, narrow)


def test_ranks_do_not_measure_each_for_itself(checkpoints):
    with pytest.raises(ConfigError, match="could differ between ranks"):
        Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype="auto", parallel=ParallelConfig(2))


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_the_bundled_policy_stays_in_float32_on_a_cpu(dtype):
    with closing(
        NativeBackend(embedded_checkpoint(), backend_options(device="cpu", dtype=dtype))
    ) as backend:
        assert backend.engine.dtype is torch.float32
