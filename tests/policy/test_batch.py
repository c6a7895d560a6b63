"""Several observations in one inference: each answer is that of a policy at the beginning of an
episode.
"""

from dataclasses import replace

import numpy as np
import pytest

from helpers.spy import KEYS, Spy, flat
from strands_cosmos3.errors import ConfigError, InputError, ObservationError
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import HOME_Q

torch = pytest.importorskip("torch")
from helpers.parity import asked_of  # noqa: E402
from strands_cosmos3.engine import request as request_module  # noqa: E402


def observation(shift_rad, seed):
    rng = np.random.RandomState(seed)
    views = {
        name: rng.randint(0, 256, (90, 160, 3), dtype=np.uint8)
        for name in ("wrist", "exterior_1", "exterior_2")
    }
    return flat(HOME_Q + shift_rad) | views


def rows(steps):
    return np.array([list(step.values()) for step in steps])


@pytest.fixture(scope="module")
def bundled():
    with Cosmos3Policy(
        "droid", "panda", device="cpu", seed=5, options={"policy_frames": 1}
    ) as policy:
        policy.set_control_frequency(20)
        yield policy


def test_each_answer_is_that_of_a_single_call(bundled):
    seen = [observation(shift, i) for i, shift in enumerate((0.0, 0.05, -0.05))]
    texts = ["pick up the red cube", "reach the green cube", "pick up the blue cube"]
    bundled.reset(5)
    found = bundled.get_actions_batch(seen, texts)
    assert bundled.last_rollout["seed"] == 7
    for i, (given, text) in enumerate(zip(seen, texts, strict=True)):
        bundled.reset(5 + i)
        np.testing.assert_allclose(
            rows(found[i]), rows(bundled.get_actions_sync(given, text)), atol=2e-5
        )
        assert list(found[i][0]) == KEYS
    assert np.abs(rows(found[0]) - rows(found[1])).max() > 0.01


def test_candidates_of_one_observation_differ_by_their_seeds(bundled):
    bundled.reset(5)
    seen = observation(0.0, 0)
    candidates = [
        rows(steps) for steps in bundled.get_actions_batch([seen] * 3, "pick up the red cube")
    ]
    assert all(np.abs(a - b).max() > 1e-5 for i, a in enumerate(candidates) for b in candidates[:i])
    bundled.reset(6)
    np.testing.assert_allclose(
        candidates[1], rows(bundled.get_actions_sync(seen, "pick up the red cube")), atol=2e-5
    )


def test_requests_of_one_observation_share_its_pixels_and_no_others(bundled, monkeypatch):
    """By reference, whatever their order: the engine encodes each picture once."""
    asked = asked_of(bundled.backend.engine, monkeypatch)
    first, second = observation(0.0, 0), observation(0.0, 1)
    bundled.get_actions_batch([first, second, first], ["reach the red cube"] * 3)
    pixels = [request.cond_video_pixels for request in asked]
    assert pixels[0] is pixels[2]
    assert not torch.equal(pixels[0], pixels[1])
    read = []
    monkeypatch.setattr(request_module, "require_pixels", lambda given: read.append(given) or given)
    again = replace(asked[0], seed=9)
    assert again.cond_video_pixels is pixels[0]
    assert read == []
    replace(asked[0], cond_video_pixels=pixels[1])
    assert len(read) == 1, "another picture is read"


def test_any_backend_answers_a_batch():
    spy = Spy(32)
    policy = Cosmos3Policy(robot="panda", backend=spy)
    first, second = policy.get_actions_batch([flat(spy.q_start)] * 2, ["go", "go on"])
    assert [request.instruction for request in spy.requests] == ["go", "go on"]
    assert [request.seed for request in spy.requests] == [0, 1]
    np.testing.assert_allclose(rows(first), rows(second))
    assert policy.get_actions_batch([], "go") == []


def test_what_no_batch_can_be(bundled):
    with pytest.raises(InputError, match="2 instructions for 1 observations"):
        bundled.get_actions_batch([observation(0.0, 0)], ["one", "two"])
    with pytest.raises(ObservationError):
        bundled.get_actions_batch([{}], "go")
    with pytest.raises(ConfigError, match="mode 'policy'"):
        Cosmos3Policy("droid", "panda", device="cpu", mode="inverse_dynamics").get_actions_batch(
            [], "go"
        )


def test_decoded_frames_of_a_call():
    seen = observation(0.0, 0)
    with Cosmos3Policy("droid", "panda", device="cpu", options={"decode_frames": 5}) as policy:
        policy.plan(policy.mapping.read(seen, 0.0, True, 0.0), "pick up the red cube")
        some = policy.last_rollout["video"]
        assert some.shape == (5, 128, 144, 3)
        policy.reset()
        policy.decode_frames = 0
        policy.plan(policy.mapping.read(seen, 0.0, True, 0.0), "pick up the red cube")
        assert policy.last_rollout["video"] is None
