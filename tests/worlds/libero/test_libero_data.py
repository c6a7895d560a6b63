"""What needs no LIBERO: suites, protocols, captions, pictures and actions."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.actions.controller_rows import normalize_actions
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    InputError,
    InstructionError,
    UnknownNameError,
)
from strands_cosmos3.observe.prompts import libero_caption, libero_client_prompt
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.types import ActionChunk
from strands_cosmos3.worlds.libero.expert import named_object
from strands_cosmos3.worlds.libero.protocol import PROTOCOLS, LiberoConfig
from strands_cosmos3.worlds.libero.simulation import as_seen, as_trained, side_by_side
from strands_cosmos3.worlds.libero.suites import SUITES, LiberoTask, get_suite
from strands_cosmos3.worlds.libero.world import ACTION_KEYS, next_actions


def test_suites_and_their_horizons():
    assert len(SUITES) == 4 + 16
    base = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520}
    assert {name: SUITES[name].horizon for name in base} == base
    assert SUITES["libero_10_swap"].horizon == 520
    asked = {name for name, suite in SUITES.items() if suite.instruction == "problem"}
    assert asked == {name for name in SUITES if name.endswith(("_task", "_lan"))}
    with pytest.raises(UnknownNameError, match="libero_object_swap"):
        get_suite("libero_90x")


def test_waiting_steps_count_for_nvidia_and_not_for_openpi():
    assert {name: config.steps(280) for name, config in PROTOCOLS.items()} == {
        "openpi": 280,
        "nvidia": 270,
    }
    with pytest.raises(UnknownNameError, match="nvidia_training"):
        LiberoConfig(caption="loud")


def test_pictures_are_turned_and_not_flipped():
    rendered = np.zeros((2, 4, 3), np.uint8)
    rendered[0, 0] = 9  # the bottom left
    assert np.argwhere(as_seen(rendered)[..., 0]).tolist() == [[1, 0]]
    assert np.argwhere(as_trained(rendered)[..., 0]).tolist() == [[1, 3]], "upright and mirrored"
    both = side_by_side({"wrist": rendered, "agentview": rendered + 1})
    assert both.shape == (2, 8, 3)
    assert both[1, 0, 0] == 1, "third person left"
    assert both[1, 7, 0] == 0, "wrist right"


def test_captions_differ_in_where_the_layout_stands():
    """Golden: NVIDIA's two sentences, and its JSON of a chunk of 16 rows at 20 Hz."""
    views = "This video contains concatenated views from multiple camera perspectives."
    layout = (
        "The left half shows the third-person view; the right half shows the wrist-mounted camera."
    )
    assert libero_client_prompt("lift it") == f"lift it. {views} {layout}"
    assert libero_client_prompt("lift it.") == f"lift it. {views} {layout}"
    server, training = (
        json.loads(libero_caption("lift it", style))
        for style in ("nvidia_server", "nvidia_training")
    )
    assert server["cinematography"] == {"framing": views}
    assert server["actions"] == [
        {
            "time": "0:00-0:01",
            "description": f"lift it. {views} {layout}",
            "idle_frame": "0 out of 16.",
        }
    ]
    assert training["cinematography"] == {"framing": f"{views} {layout}"}
    assert training["actions"][0]["description"] == "lift it."
    rest = {
        "duration": "0s",
        "fps": 20.0,
        "resolution": {"H": 192, "W": 320},
        "aspect_ratio": "16,9",
    }
    assert rest == {key: server[key] for key in rest} == {key: training[key] for key in rest}
    assert list(server) == [
        "cinematography",
        "actions",
        "duration",
        "fps",
        "resolution",
        "aspect_ratio",
    ]
    assert libero_caption("lift it", "checkpoint") is None


SCENE = dict.fromkeys(
    ("tomato_sauce_1", "bbq_sauce_1", "red_cream_cheese_1", "milk_1", "basket_1"), np.zeros((2, 3))
)


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("pick up the tomato sauce and place it in the basket", "tomato_sauce_1"),
        ("grab bbq sauce and put it into basket", "bbq_sauce_1"),
        ("Pick the cream cheese and place it in the basket", "red_cream_cheese_1"),
    ],
)
def test_the_expert_finds_the_named_object(instruction, name):
    assert named_object(instruction, SCENE) == name


def test_the_expert_says_what_it_could_fetch():
    with pytest.raises(InstructionError, match="tomato sauce"):
        named_object("qwe rty", SCENE)


def test_a_goal_can_be_judged_where_its_things_are(tmp_path):
    task = LiberoTask(
        get_suite("libero_goal"), 0, "", tmp_path, (), frozenset({"milk_1", "basket_1"})
    )
    assert task.can_judge((("in", "milk_1", "basket_1_contain_region"),))
    assert not task.can_judge((("in", "butter_1", "basket_1_contain_region"),))


class Answers(Backend):
    """Keeps the request and answers the same actions."""

    ACTIONS = np.array(
        [[0.1, -0.2, 0.3, 0.05, 0, 0, 1], [0, 0, 0, 0, 0, -0.1, -1], [0.5, 0, 0, 0, 0, 0, 1]]
    )

    def infer(self, request):
        self.request = request
        return ActionChunk(
            normalize_actions(self.ACTIONS), request.action_space, request.embodiment
        )


def pretend_world(config=PROTOCOLS["openpi"]):
    """What a policy is shown of a world, with views of one colour at the bottom left as
    robosuite renders them.
    """
    views = {name: np.zeros((4, 4, 3), np.uint8) for name in ("agentview", "wrist")}
    views["agentview"][0, 0], views["wrist"][0, 0] = 50, 90
    pose = {
        "robot0_joint_pos": np.zeros(7),
        "robot0_joint_vel": np.zeros(7),
        "robot0_gripper_qpos": np.array([0.02, -0.02]),
    }
    return SimpleNamespace(
        views=lambda: views, observed=pose, state=np.arange(8.0), steps=40, config=config
    )


def test_a_checkpoint_is_shown_one_picture_and_its_rows_become_actions():
    backend = Answers()
    policy = Cosmos3Policy(embodiment="libero", backend=backend)
    assert next_actions(policy, pretend_world(), "lift it") == pytest.approx(
        Answers.ACTIONS, abs=1e-9
    )
    shown = backend.request
    assert (shown.instruction, shown.n_rows, shown.privileged, shown.prompt) == (
        "lift it",
        16,
        None,
        "",
    )
    assert shown.t_motion_s == 2.0
    assert shown.composite.shape == (4, 8, 3)
    assert np.argwhere(shown.composite[..., 0]).tolist() == [[3, 3], [3, 7]]
    assert (shown.composite[3, 3, 0], shown.composite[3, 7, 0]) == (50, 90)
    short = Cosmos3Policy(embodiment="libero", backend=backend, actions_per_step=2)
    assert len(next_actions(short, pretend_world(), "lift it")) == 2


def test_a_protocols_caption_replaces_the_models_own():
    backend = Answers()
    policy = Cosmos3Policy(embodiment="libero", backend=backend)
    next_actions(policy, pretend_world(PROTOCOLS["nvidia"]), "lift it")
    assert backend.request.instruction == "lift it"
    assert backend.request.prompt == libero_caption("lift it", "nvidia_server")


def test_a_policy_of_another_embodiment_or_with_other_steps_is_refused():
    class Odd:
        requires_images, actions_per_step = True, None

        def get_actions_sync(self, observation, instruction):
            return [{"dx": 1.0}]

    with pytest.raises(BackendError, match="gripper"):
        next_actions(Odd(), pretend_world(), "lift it")
    droid = Cosmos3Policy(embodiment="droid", backend=Droid())
    with pytest.raises((ConfigError, InputError)):
        next_actions(droid, pretend_world(), "lift it")


class Droid(Backend):
    info = BackendInfo(requires_images=False)

    def infer(self, request):
        return ActionChunk(np.zeros((16, 10)), request.action_space, request.embodiment)


def test_another_projects_policy_is_shown_the_views_and_the_state():
    class Looks:
        requires_images, actions_per_step = True, 2

        def get_actions_sync(self, observation, instruction):
            self.observation, self.instruction = observation, instruction
            return [dict.fromkeys(ACTION_KEYS, 0.5)] * 3

    policy = Looks()
    assert next_actions(policy, pretend_world(), "lift it").tolist() == [[0.5] * 7] * 2
    assert set(policy.observation) == {"agentview", "wrist", "image", "state"}
    assert policy.observation["image"].shape == (4, 8, 3)
    assert (policy.instruction, policy.observation["state"].tolist()) == (
        "lift it",
        list(range(8)),
    )
