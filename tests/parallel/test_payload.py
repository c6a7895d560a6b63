"""Requests and results as bytes, and back to the bit."""

import pytest
import torch

from helpers import rank_cases as cases
from strands_cosmos3.errors import ShapeError, WireFormatError
from strands_cosmos3.parallel.payload import decode_request, decode_result, encode, encode_request, encode_result


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("interval", [None, (960.0, 1001.0)])
def test_a_request_comes_back(mode, interval):
    asked = cases.question(mode=mode, interval=interval)
    back = decode_request(encode_request(asked))
    for name, value in vars(asked).items():
        found = getattr(back, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else (found, type(found)) == (value, type(value))


def test_a_result_comes_back():
    result = {"action": torch.rand(1, 4, 10), "seed": 3, "action_space": "midtrain", "timing": {"total": 1.5}}
    back = decode_result(encode_result(result))
    assert torch.equal(back.pop("action"), result.pop("action"))
    assert back == result


def test_what_is_no_frame_is_refused_by_name():
    whole = encode_request(cases.question())
    for damaged in (b"", b"\0" * 7, b"\xff" * 64, whole[:-1], whole[:40], whole[8:], whole + b"\0", b"\x80\x04K\x01."):
        with pytest.raises(WireFormatError):
            decode_request(damaged)


def test_a_frame_without_a_request_is_refused():
    with pytest.raises(WireFormatError, match="text_ids"):
        decode_request(encode({"action": torch.zeros(1)}, {}))


def test_a_request_that_cannot_be_is_refused_on_arrival():
    asked = cases.question()
    object.__setattr__(asked, "cond_video_pixels", torch.zeros(3))
    with pytest.raises(ShapeError):
        decode_request(encode_request(asked))
