"""The three modes behind the policy: what to do, what would happen, what was done. Random
weights: only the plumbing counts.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

av = pytest.importorskip("av")
torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from helpers.options import backend_options  # noqa: E402
from recipes.random_checkpoint import write_checkpoint  # noqa: E402
from strands_cosmos3.backends.model_input import ModelInput  # noqa: E402
from strands_cosmos3.backends.native import NativeBackend  # noqa: E402
from strands_cosmos3.commands.infer import InferCommand  # noqa: E402
from strands_cosmos3.embedded import embedded_checkpoint  # noqa: E402
from strands_cosmos3.embodiments import get_embodiment  # noqa: E402
from strands_cosmos3.engine.checkpoint import Checkpoint  # noqa: E402
from strands_cosmos3.errors import ConfigError, InputError, NonFiniteError, ShapeError  # noqa: E402
from strands_cosmos3.films import VideoWriter  # noqa: E402
from strands_cosmos3.policy import Cosmos3Policy  # noqa: E402
from strands_cosmos3.types import Mode, Observation, Request  # noqa: E402

VIEWS = {
    name: np.random.RandomState(i).randint(0, 256, (90, 160, 3), dtype=np.uint8)
    for i, name in enumerate(("wrist", "exterior_1", "exterior_2"))
}
FLAT = {**{f"joint_{i}": 0.1 * i for i in range(7)}, "gripper": 0.8, **VIEWS}
ROWS = 16
CLIP = np.zeros((ROWS + 1, 90, 160, 3), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("modes") / "random")


def policy(folder, mode, **options):
    world = mode == "forward_dynamics"
    quick = backend_options(
        device="cpu", num_steps=1, guidance_scale=1.0, image_size=128, decode_video=world
    )
    return Cosmos3Policy(backend=NativeBackend(folder, quick), mode=mode, **options)


def test_forward_dynamics_decodes_without_being_told(folder):
    with Cosmos3Policy(
        backend="native", model=folder, mode="forward_dynamics", device="cpu"
    ) as forward:
        assert forward.backend.engine.decodes_video
    with Cosmos3Policy(backend="native", model=folder, device="cpu") as plain:
        assert not plain.backend.engine.decodes_video


@pytest.mark.parametrize(
    ("mode", "steps"), [("policy", 3), ("forward_dynamics", 2), ("inverse_dynamics", 2)]
)
def test_each_mode_takes_the_steps_that_the_checkpoint_records_for_it(mode, steps):
    checkpoint = replace(Checkpoint.open(embedded_checkpoint()), dynamics_steps=2)
    droid = get_embodiment("droid")
    given = {
        "forward_dynamics": {"conditioning_actions": np.zeros((ROWS, 10))},
        "inverse_dynamics": {"clip": CLIP},
    }.get(mode, {})
    request = Request(
        droid,
        droid.action_space("midtrain"),
        "reach the red cube",
        ROWS,
        np.zeros(7),
        1.0,
        mode=Mode(mode),
        **given,
    )
    assert ModelInput(checkpoint, backend_options()).sampling(request).num_steps == steps
    processed = SimpleNamespace(
        embodiment=droid, space=droid.action_space("midtrain"), mode=Mode(mode)
    )
    processed.request = lambda sampling, **_: sampling
    asked = InferCommand(out=Path("out"))._request(
        SimpleNamespace(checkpoint=checkpoint), processed
    )
    assert asked.num_steps == steps


def test_forward_dynamics_answers_a_world_and_no_actions(folder):
    actions = np.random.RandomState(0).uniform(-0.5, 0.5, (ROWS, 10))
    with policy(folder, "forward_dynamics") as forward:
        assert forward.get_actions_sync(FLAT, "pick up the red cube", raw_actions=actions) == []
        first = forward.last_rollout
        assert first["video"].shape[0] == ROWS + 1
        assert first["video"].dtype == np.uint8
        np.testing.assert_allclose(first["action"], actions, atol=1e-6)  # what was given, echoed
        forward.reset()
        forward.get_actions_sync(FLAT, "pick up the red cube", raw_actions=-actions)
        # the actions matter
        assert not np.array_equal(forward.last_rollout["video"], first["video"])


def test_inverse_dynamics_reads_a_clip_or_a_film(folder, tmp_path):
    clip = np.random.RandomState(1).randint(0, 256, (ROWS + 1, 128, 160, 3), dtype=np.uint8)
    with policy(folder, "inverse_dynamics") as inverse:
        steps = inverse.get_actions_sync(FLAT, "pick up the red cube", video=clip)
        assert len(steps) == ROWS
        assert list(steps[0]) == list(get_embodiment("droid").raw_action_layout)
        inverse.reset()
        other = inverse.get_actions_sync(FLAT, "pick up the red cube", video=clip[::-1])
        assert other != steps  # the clip matters
        with VideoWriter(tmp_path / "seen.mp4", 15) as film:
            for frame in clip:
                film.write(frame)
        inverse.reset()
        seen = inverse.get_actions_sync(FLAT, "pick up the red cube", video=tmp_path / "seen.mp4")
        assert len(seen) == ROWS
        inverse.reset()
        with av.open(str(tmp_path / "seen.mp4")) as film:
            frames = np.stack([frame.to_image() for frame in film.decode(video=0)])
        assert inverse.get_actions_sync(FLAT, "pick up the red cube", video=frames) == seen


def test_a_film_of_another_rate_shows_the_same_motion(folder, tmp_path):
    """Each picture twice or three times as often, at as many frames a second."""
    clip = np.repeat(np.linspace(20, 230, ROWS + 1).astype(np.uint8), 96 * 128 * 3)
    clip = clip.reshape(ROWS + 1, 96, 128, 3)
    answers = []
    for times in (1, 2, 3):
        with VideoWriter(tmp_path / f"{times}.mp4", 15 * times) as film:
            for frame in np.repeat(clip, times, axis=0):
                film.write(frame)
        with policy(folder, "inverse_dynamics") as inverse:
            path = tmp_path / f"{times}.mp4"
            steps = inverse.get_actions_sync(FLAT, "pick up the red cube", video=path)
        answers.append([list(step.values()) for step in steps])
    # the encoder's levels differ by less than one of 255
    np.testing.assert_allclose(answers[1:], [answers[0]] * 2, atol=0.02)
    with VideoWriter(tmp_path / "slow.mp4", 6) as film:
        for frame in clip:
            film.write(frame)
    with policy(folder, "inverse_dynamics") as inverse, pytest.raises(InputError, match="none is"):
        inverse.get_actions_sync(FLAT, "pick up the red cube", video=tmp_path / "slow.mp4")


def test_with_a_robot_inverse_dynamics_becomes_joint_angles(folder):
    clip = np.zeros((ROWS + 1, 128, 160, 3), np.uint8)
    clip[:, 40:80, 40:80] = 200
    home = [0, -np.pi / 5, 0, -4 * np.pi / 5, 0, 3 * np.pi / 5, 0]
    with policy(folder, "inverse_dynamics", robot="panda") as inverse:
        plan = inverse.plan(Observation(home, 1.0, VIEWS), "pick up the red cube", video=clip)
        assert plan.q_rad.shape == (ROWS, 7)


def test_what_a_mode_needs_and_only_that(folder):
    with policy(folder, "forward_dynamics") as forward:
        with pytest.raises(
            InputError, match=r"mode 'forward_dynamics' needs conditioning_actions, .* raw_actions="
        ):
            forward.get_actions_sync(FLAT, "pick up the red cube")
        with pytest.raises(ShapeError, match="10"):
            forward.get_actions_sync(FLAT, "pick up the red cube", raw_actions=np.zeros((ROWS, 8)))
        with pytest.raises(NonFiniteError, match="conditioning_actions"):
            forward.get_actions_sync(
                FLAT, "pick up the red cube", raw_actions=np.full((ROWS, 10), np.nan)
            )
    with (
        policy(folder, "policy") as plain,
        pytest.raises(InputError, match="this is mode 'policy'"),
    ):
        plain.get_actions_sync(
            FLAT, "pick up the red cube", video=np.zeros((17, 8, 8, 3), np.uint8)
        )


@pytest.mark.parametrize("backend", ["scripted", "diffusers"])
def test_other_backends_know_one_mode(folder, backend):
    with pytest.raises(ConfigError, match="only policy; use backend='native'"):
        Cosmos3Policy(
            backend=backend,
            model=None if backend == "scripted" else folder,
            mode="inverse_dynamics",
        )
