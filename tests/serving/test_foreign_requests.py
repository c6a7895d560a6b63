"""Requests of foreign clients, without sockets: each is answered right or refused in one line."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from helpers.serving import DROID, Echo, Several, observation, picture
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.errors import InputError
from strands_cosmos3.parallel.rank import Rank
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from strands_cosmos3.types import Request

SEED, VLLM_SEED, GRIPPER = "cosmos3/seed", "seed", "observation/gripper_position"
JOINTS, IMAGE = "observation/joint_position", "observation/image"


class Seeing(Echo):
    info = BackendInfo(name="echo", requires_images=True)


def answers(policy: ServedPolicy, *messages, sessions=None):
    sessions = sessions or [Session() for _ in messages]
    frames = [encode(message) for message in messages]
    return policy.answer(
        [
            Message(frame, session, time.monotonic())
            for frame, session in zip(frames, sessions, strict=True)
        ]
    )


@pytest.mark.parametrize("protocol", ["openpi", "vllm-omni"])
@pytest.mark.parametrize(
    "seed", [2**32, 2**53, -7, 1.25, 1e20, True, np.array([True]), [[1], [2, 3]]]
)
def test_a_seed_that_no_generator_takes_is_refused_by_name(protocol, seed):
    backend = Echo()
    key = SEED if protocol == "openpi" else VLLM_SEED
    (answer,) = answers(
        ServedPolicy(backend, "droid", "joint_pos"),
        observation(**{key: seed}),
        sessions=[Session(is_vllm=protocol == "vllm-omni")],
    )
    assert answer.failed
    assert answer.frame.startswith(("InputError: ", "ShapeError: "))
    assert repr(key) in answer.frame
    assert len(answer.frame) < 260
    assert not backend.requests


@pytest.mark.parametrize("seed", [2**32 - 1, 7.0, np.uint8(7), np.int64(2**31), None])
def test_a_whole_seed_of_any_type_is_taken(seed):
    backend = Echo()
    seed = {SEED: seed if not isinstance(seed, np.uint8) else np.array(seed)}
    (answer,) = answers(ServedPolicy(backend, "droid", "joint_pos", seed=3), observation(**seed))
    assert answer.outcome == "ok"
    assert backend.requests[-1].seed == (3 if seed[SEED] is None else int(seed[SEED]))


def test_counted_seeds_stay_within_what_generators_take():
    backend, session = Echo(), Session()
    policy = ServedPolicy(backend, "droid", "joint_pos", seed=2**32 - 2)
    for _ in range(4):
        answers(policy, observation(), sessions=[session])
    assert [asked.seed for asked in backend.requests] == [2**32 - 2, 2**32 - 1, 0, 1]


@pytest.mark.parametrize("rows", [None, 8, 24, 32])
def test_a_backend_is_asked_for_as_many_rows_as_it_answers(rows):
    class Chunks(Several):
        info = BackendInfo(name="echo", chunk_rows=rows)

    backend = Chunks()
    policy = ServedPolicy(backend, "libero")
    png = BytesIO()
    Image.fromarray(np.full((64, 128, 3), 90, np.uint8)).save(png, "PNG")
    sent = {"image": base64.b64encode(png.getvalue()).decode(), "image_size": 64}
    sent |= {"prompt": "put the soup in the basket", "domain_name": "libero"}
    policy.answer([Message(sent, Session(), 0.0)])
    assert [asked.n_rows for asked in backend.requests] == [rows or 16]
    assert policy.page("/info")["action_chunk_size"] == (rows or 16)
    backend = Echo()
    backend.info = replace(Echo.info, chunk_rows=rows)
    answers(ServedPolicy(backend, "droid", "joint_pos"), observation())
    assert [asked.n_rows for asked in backend.requests] == [rows or DROID.chunk_rows("joint_pos")]


def test_a_request_of_this_package_has_a_seed_that_generators_take():
    with pytest.raises(InputError, match="seed"):
        Request(**{**vars(recorded()), "seed": -1})


def recorded() -> Request:
    backend = Echo()
    answers(ServedPolicy(backend, "droid", "joint_pos"), observation())
    return backend.requests[-1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("x"), OverflowError(34, "too large")])
def test_what_one_request_raises_does_not_reach_the_others_of_its_batch(error):
    class Picky(Echo):
        def infer_batch(self, requests):
            return [self.infer(request) for request in requests]

        def infer(self, request):
            if request.instruction == "poison":
                raise error
            return super().infer(request)

    policy = ServedPolicy(Picky(), "droid", "joint_pos")
    first, bad, last = answers(
        policy, observation(), {**observation(), "prompt": "poison"}, observation()
    )
    assert (first.outcome, bad.outcome, last.outcome) == ("ok", "error", "ok")
    assert type(error).__name__ in bad.frame


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IndexError("index 9"), "BackendError"),
        (ZeroDivisionError("by zero"), "BackendError"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "BackendError"),
        # the process may be broken, or a neighbour gone: its group ends it
        (RuntimeError("Connection closed by peer"), "RuntimeError"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_rank_outlives_what_a_request_s_values_raise(error, kind, monkeypatch):
    class Engine:
        def step_batch(self, requests, on_step):
            raise error

    rank = Rank()
    rank._engine, rank._rank = Engine(), 0
    monkeypatch.setattr("strands_cosmos3.parallel.payload.decode_requests", lambda payload: [])
    status = rank.infer(b"")
    assert (status.kind, status.error[0]) == ("error", kind)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({JOINTS: [[0.0] * 7, [0.0] * 6]}, JOINTS),
        ({JOINTS: np.full((2, 7), -1e12)}, JOINTS),
        ({JOINTS: [False] * 7}, JOINTS),
        ({JOINTS: {"a": 1}}, JOINTS),
        ({GRIPPER: -1e200}, GRIPPER),
        ({GRIPPER: False}, GRIPPER),
        ({GRIPPER: np.array([[True]])}, GRIPPER),
        ({GRIPPER: [[1.0], [0.5, 0.5]]}, GRIPPER),
        ({GRIPPER: 255}, GRIPPER),
        ({GRIPPER: [0.1, -2.0]}, GRIPPER),
        ({GRIPPER: np.full((3, 1), 100.0)}, GRIPPER),
        ({JOINTS: [0.0, -36.0, 0.0, -144.0, 0.0, 108.0, 45.0]}, JOINTS),
        ({"cosmos3/t_motion_s": 1e40}, "cosmos3/t_motion_s"),
        ({"cosmos3/t_motion_s": True}, "cosmos3/t_motion_s"),
        ({IMAGE: np.zeros((2, 640, 3), np.uint8)}, IMAGE),
        ({IMAGE: np.zeros((15, 15, 3), np.uint8)}, IMAGE),
        ({IMAGE: [[1], [2, 3]]}, IMAGE),
        ({"endpoint": "act"}, "endpoint"),
        ({"endpoint": ["infer"]}, "endpoint"),
        ({"endpoint": 0}, "endpoint"),
        ({"session_id": ["a"]}, "session_id"),
        ({"session_id": "a" * 257}, "session_id"),
        ({"session_id": 1.5}, "session_id"),
        ({"prompt": " \n\t"}, "prompt"),
        ({"prompt": "\u3000"}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_foreign_value_is_refused_under_its_name(message, key):
    backend = Seeing()
    message = observation(**{IMAGE: picture(540, 640)}) | message
    (answer,) = answers(ServedPolicy(backend, "droid", "joint_pos"), message)
    assert answer.failed
    assert not answer.frame.startswith("InternalError")
    assert repr(key) in answer.frame
    assert "\n" not in answer.frame
    assert not backend.requests


@pytest.mark.parametrize("position", [[400.0, 0.0, 400.0], [40, 0, 40], [[0.4, 0.0, 11.0]]])
def test_a_position_in_another_unit_is_refused(position):
    message = {
        "prompt": "lift",
        "observation/eef_pos": np.array(position),
        "observation/eef_quat": np.array([1.0, 0.0, 0.0, 0.0]),
        GRIPPER: 0.0,
    }
    (answer,) = answers(ServedPolicy(Echo(), "droid", "midtrain"), message)
    assert answer.frame.startswith("InputError: 'observation/eef_pos' in m reaches ")


@pytest.mark.parametrize("closed", [-0.1, 1.1, [[0.2], [1.05]]])
def test_a_measured_gripper_may_overshoot_a_little(closed):
    backend = Echo()
    (answer,) = answers(
        ServedPolicy(backend, "droid", "joint_pos"), observation(**{GRIPPER: closed})
    )
    assert answer.outcome == "ok"
    assert backend.requests[-1].gripper == (1.0 if closed == -0.1 else 0.0)


@pytest.mark.parametrize(
    ("domain", "other"),
    [
        ("libero", "observation/wrist_image"),
        ("bridge", "observation/secondary"),
        ("droid", "observation/exterior_image_left"),
    ],
)
def test_another_picture_beside_the_composed_one_is_refused(domain, other):
    """openpi's clients of LIBERO send one camera under the key of our composite."""
    backend = Several()
    message = observation(**{IMAGE: picture(224, 224), other: picture(224, 224)})
    (answer,) = answers(ServedPolicy(backend, domain), message)
    assert answer.failed
    assert f"{other!r} beside it would be ignored" in answer.frame
    assert not backend.requests


def test_what_is_no_picture_of_its_own_may_stand_beside_the_composed_one():
    views = {name: picture() for name in DROID.rig.wire_names}
    depth = {"observation/depth": np.zeros((36, 64), np.float32), "note": [1, 2, 3]}
    message = observation(**{IMAGE: picture(540, 640)}, **views, **depth)
    (answer,) = answers(ServedPolicy(Seeing(), "droid", "joint_pos"), message)
    assert answer.outcome == "ok"


@pytest.mark.parametrize("number", [7, -(2**63), 1.5, "a", np.int64(4), np.float32(2.5)])
def test_a_request_s_number_or_text_comes_back(number):
    message = observation(**{"cosmos3/request_id": number})
    (answer,) = answers(ServedPolicy(Echo(), "droid", "joint_pos"), message)
    assert decode(answer.frame)["cosmos3/request_id"] == number


@pytest.mark.parametrize(
    ("pixels", "line"),
    [
        (np.full((64, 48, 3), 0.5, np.float32), "(picture * 255).round().astype(np.uint8)"),
        (np.zeros((3, 64, 48), np.uint8), "np.moveaxis(picture, -3, -1)"),
        (
            np.full((3, 64, 48), 0.25),
            "(np.moveaxis(picture, -3, -1) * 255).round().astype(np.uint8)",
        ),
    ],
)
def test_a_float_or_channel_first_picture_is_refused_with_the_line_that_converts_it(pixels, line):
    policy = ServedPolicy(Seeing(), "droid", "joint_pos")
    (answer,) = answers(policy, observation(**{IMAGE: pixels}))
    assert answer.frame.endswith(f"convert it: {line}.")
    converted = eval(line, {"picture": pixels, "np": np})
    (answer,) = answers(policy, observation(**{IMAGE: converted}))
    assert answer.outcome == "ok"


@pytest.mark.parametrize("protocol", ["openpi", "vllm-omni"])
@pytest.mark.parametrize("names", [("l", "r"), (0, 1), ("", "second")])
def test_interleaved_sessions_have_a_count_a_clock_and_a_reset_each(protocol, names):
    backend, session = Echo(), Session(is_vllm=protocol == "vllm-omni")
    policy = ServedPolicy(backend, "droid", "joint_pos")

    def ask(name, **more):
        named = {} if name == "" else {"session_id": name}
        (answer,) = answers(policy, {**observation(), **named, **more}, sessions=[session])
        assert answer.outcome in ("ok", "reset")
        return backend.requests[-1]

    if "" in names:  # a request without a name goes on with the session asked last
        assert [ask(name).seed for name in ("a", "", "b", "", "a")] == [0, 1, 0, 1, 2]
        return
    assert [ask(name).seed for name in names * 3] == [0, 0, 1, 1, 2, 2]
    time.sleep(0.05)
    ask(names[1], endpoint="reset")
    assert ask(names[0]).t_motion_s >= 0.05
    restarted = ask(names[1])
    assert (backend.requests[-2].seed, restarted.seed) == (3, 0)
    assert restarted.t_motion_s == 0


def test_sessions_are_bounded_and_the_one_idle_for_longest_goes(monkeypatch):
    monkeypatch.setattr("strands_cosmos3.serving.served._MAX_SESSIONS", 3)
    backend, session = Echo(), Session()
    policy = ServedPolicy(backend, "droid", "joint_pos")
    for name in "abcadab":  # d drives out b
        answers(policy, observation(session_id=name), sessions=[session])
    assert [asked.seed for asked in backend.requests] == [0, 0, 0, 1, 0, 2, 0]
    assert len(session.episodes) == 3
    assert decode(answers(policy, {"endpoint": "reset"}, sessions=[session])[0].frame)
