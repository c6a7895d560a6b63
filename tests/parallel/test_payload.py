"""Requests and results as bytes, and back to the bit."""

from dataclasses import replace

import pytest
import torch

from helpers import rank_cases as cases
from strands_cosmos3.engine import request as request_module
from strands_cosmos3.errors import ShapeError
from strands_cosmos3.parallel.payload import (
    decode_requests,
    decode_results,
    encode_requests,
    encode_results,
)


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("interval", [None, (960.0, 1001.0)])
def test_a_request_comes_back(mode, interval):
    asked = cases.question(mode=mode, interval=interval)
    (back,) = decode_requests(encode_requests([asked]))
    for name, value in vars(asked).items():
        found = getattr(back, name)
        assert (
            torch.equal(found, value)
            if isinstance(value, torch.Tensor)
            else (found, type(found)) == (value, type(value))
        )


def test_a_result_comes_back():
    result = {
        "action": torch.rand(1, 4, 10),
        "seed": 3,
        "action_space": "midtrain",
        "timing": {"total": 1.5},
    }
    (back,) = decode_results(encode_results([result]))
    assert torch.equal(back.pop("action"), result.pop("action"))
    assert back == result


def test_candidates_of_one_request_share_its_tensors(monkeypatch):
    asked = cases.question()
    alone, both = encode_requests([asked]), encode_requests([asked, replace(asked, seed=5)])
    assert len(both) < len(alone) + 2000
    read = []
    monkeypatch.setattr(request_module, "require_pixels", lambda given: read.append(given) or given)
    first, second = decode_requests(both)
    assert read == [], "a rank trusts what the leader has read"
    assert (first.seed, second.seed) == (asked.seed, 5)
    assert first.cond_video_pixels is second.cond_video_pixels


def test_a_request_that_cannot_be_is_refused_on_arrival():
    asked = cases.question()
    object.__setattr__(asked, "cond_video_pixels", torch.zeros(3))
    with pytest.raises(ShapeError):
        decode_requests(encode_requests([asked]))
