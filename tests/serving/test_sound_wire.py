"""Sound on the wire: only for who asks, and nothing that is no sound is taken for one."""

import numpy as np
import pytest

from helpers.serving import DROID, JOINT_POS, Echo, request
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.errors import InputError, ServiceUnreadableError, WireFormatError
from strands_cosmos3.films import Sound
from strands_cosmos3.serving import wire
from strands_cosmos3.serving.codec import UnsupportedArray, decode, encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from strands_cosmos3.types import ActionChunk

SOUND = Sound(np.random.RandomState(0).uniform(-1, 1, (2, 4800)).astype(np.float32), 8000)


class Hears(Echo):
    """Answers rows, and a sound where it is asked for."""

    info = BackendInfo(name="hears", requires_images=False, sound=True)

    def infer(self, request):
        chunk = super().infer(request)
        sound = SOUND if request.sound else None
        return ActionChunk(chunk.action, chunk.action_space, chunk.embodiment, sound=sound)


def asked(**more):
    message = wire.encode_request(request(JOINT_POS), wire.get_dialect("robolab"), "s", 3)
    return message | more


def answer(message, backend=None):
    policy = ServedPolicy(backend or Hears(), "droid", "joint_pos")
    (found,) = policy.answer([Message(encode(message), Session(), 0.0)])
    return found


def test_a_sound_arrives_as_it_was_sent():
    sending = request(JOINT_POS, sound=True)
    message = wire.encode_request(sending, wire.get_dialect("robolab"), "s", 3)
    assert message[wire.SOUND] is True
    reply = decode(answer(message).frame)
    assert reply[wire.SOUND]["samples"].shape == (4800, 2), "time is the first axis"
    got = wire.decode_reply(reply, sending, 3).sound
    np.testing.assert_array_equal(got.samples, SOUND.samples)
    assert (got.rate_hz, got.samples.dtype) == (8000, np.float32)


def test_who_does_not_ask_hears_nothing():
    plain = asked()
    assert wire.SOUND not in plain
    for message in (plain, asked(**{wire.SOUND: False})):
        reply = decode(answer(message).frame)
        assert wire.SOUND not in reply
        assert wire.decode_reply(reply, request(JOINT_POS), 3).sound is None


@pytest.mark.parametrize("dialect", ["vllm-omni", "roboarena"])
def test_other_dialects_do_not_ask(dialect):
    sending = request(JOINT_POS, sound=True)
    assert wire.SOUND not in wire.encode_request(sending, wire.get_dialect(dialect), "s", 3)


def test_a_server_without_ears_refuses_by_name():
    found = answer(asked(**{wire.SOUND: True}), Echo())
    assert found.failed
    assert found.frame.startswith("InputError: 'cosmos3/sound' is true, and this server predicts")
    assert answer(asked(**{wire.SOUND: False}), Echo()).outcome == "ok"


@pytest.mark.parametrize("value", [1, "true", 1.0, None, [True], np.ones(3)], ids=str)
def test_the_flag_is_a_truth_value(value):
    with pytest.raises(InputError, match="'cosmos3/sound' must be true or false"):
        wire.decode_request(asked(**{wire.SOUND: value}), DROID, JOINT_POS, images=True)


def test_an_array_that_is_not_read_is_no_flag():
    message = asked(**{wire.SOUND: UnsupportedArray("complex64")})
    with pytest.raises(WireFormatError, match="cosmos3/sound"):
        wire.decode_request(message, DROID, JOINT_POS, images=True)


GOOD = {"rate_hz": 8000, "samples": SOUND.samples.T}


@pytest.mark.parametrize(
    "value",
    [
        True,
        [1.0, 2.0],
        {},
        {"rate_hz": 8000},
        GOOD | {"samples": [0.1, 0.2]},
        GOOD | {"samples": np.zeros((0, 2), np.float32)},
        GOOD | {"samples": np.zeros(5, np.float32)},
        GOOD | {"samples": np.zeros((2, 4800), np.float32)},
        GOOD | {"samples": 2 * np.ones((5, 2), np.float32)},
        GOOD | {"samples": np.full((5, 2), np.nan, np.float32)},
        GOOD | {"rate_hz": 0},
        GOOD | {"rate_hz": "8000"},
        GOOD | {"rate_hz": True},
        {"samples": SOUND.samples.T},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_reply_s_sound_that_is_none(value):
    reply = decode(answer(asked()).frame)
    with pytest.raises(ServiceUnreadableError, match="'cosmos3/sound' is no sound"):
        wire.decode_reply(reply | {wire.SOUND: value}, request(JOINT_POS), 3)
