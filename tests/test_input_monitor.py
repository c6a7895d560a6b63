"""Cameras that are dead, frozen, copied, swapped, upside down or with exchanged channels, and states
that are stuck or jump: noticed in the policy and on a server, and only these.
"""

from __future__ import annotations

import io
import pickle
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from helpers.serving import DROID, JOINT_POS, MIDTRAIN, Echo, T, observation, request
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.actions.rotations import se3
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import SensorError, ServiceBusyError, ServiceRefusedError
from strands_cosmos3.input_monitor import InputMonitor, block_means
from strands_cosmos3.monitors import InputWarning, Watch
from strands_cosmos3.observe.views import compose
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from strands_cosmos3.serving.server import PolicyServer
from strands_cosmos3.serving.server_config import ServerConfig
from strands_cosmos3.serving.wire import COMPOSITE
from strands_cosmos3.types import Outcome
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.expert import ScriptedBackend

WRIST, LEFT, RIGHT = DROID.rig.views
QUIET: list[str] = []


def scene(seed: int, hw=(180, 320)) -> np.ndarray:
    """A picture with large and small things in colours."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(40, 200, (5, 8, 3))
    picture = np.asarray(
        Image.fromarray(coarse.astype(np.uint8)).resize(hw[::-1], Image.Resampling.BICUBIC)
    ).astype(float)
    picture[..., 0] += 25  # wood is no grey
    return (picture + rng.normal(0, 3, picture.shape)).clip(0, 255).astype(np.uint8)


def views_at(step: int, noise: int = 0) -> dict[str, np.ndarray]:
    """Three views of an arm that has moved by 3 cm a step: the wrist's scene passes by, and before
    the others' a white arm does.
    """
    wrist = np.roll(scene(1, (180, 640))[:, :320], 15 * step, axis=1)
    outer = [scene(2), scene(3)]
    for i, picture in enumerate(outer):
        left = 60 + 100 * i + 8 * step
        picture[60:120, left : left + 30] = 235
    rng = np.random.default_rng([step, noise])
    pictures = zip((WRIST, LEFT, RIGHT), (wrist, *outer), strict=True)
    return {
        name: (view + rng.normal(0, 2, view.shape)).clip(0, 255).astype(np.uint8)
        for name, view in pictures
    }


def at(step: float) -> np.ndarray:
    return se3(T[:3, :3], T[:3, 3] + [0.03 * step, 0, 0])


def asked(step: float, views=None, **more):
    fields = {
        "limb_poses": {"arm": at(step)},
        "q_rad": None,
        "images": views_at(int(step)) if views is None else views,
        "t_motion_s": step / 2,
    }
    return request(MIDTRAIN, **{**fields, **more})


def jpeg(picture: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def noticed(monitor: InputMonitor, *args, **kwargs) -> list[str]:
    return [name for name, _ in monitor.look(*args, **kwargs)]


def after(steps: int) -> InputMonitor:
    """A monitor that has seen nothing wrong in some inferences."""
    monitor = InputMonitor()
    for step in range(steps):
        assert noticed(monitor, asked(step)) == QUIET
    return monitor


def test_nothing_is_noticed_while_the_arm_moves_and_while_it_rests():
    monitor = after(4)
    for _ in range(3):
        assert noticed(monitor, asked(3)) == QUIET  # the same pictures of an arm at rest


@pytest.mark.parametrize("colour", [(0, 0, 0), (128, 128, 128), (255, 255, 255), (200, 30, 30)])
@pytest.mark.parametrize("view", [WRIST, RIGHT])
def test_a_view_of_one_colour_is_noticed_at_once(view, colour):
    dead = (np.random.default_rng(0).normal(0, 3, (180, 320, 3)) + colour).clip(0, 255)
    views = views_at(0) | {view: dead.astype(np.uint8)}
    assert noticed(InputMonitor(), asked(0, views)) == ["camera_constant"]


@pytest.mark.parametrize("view", [WRIST, LEFT, RIGHT])
@pytest.mark.parametrize("first", [0, 2])
def test_a_frozen_view_is_noticed_after_two_centimetres(view, first):
    monitor = after(first)
    old = views_at(first)[view]
    for step in (first, first + 0.6):  # by 1.8 cm
        frozen = views_at(int(step)) | {view: old}
        assert noticed(monitor, asked(step, frozen)) == QUIET
    named = [noticed(monitor, asked(first + n, views_at(first + n) | {view: old})) for n in (1, 2)]
    assert named[-1] == ["camera_frozen"]
    assert named[0] == (["camera_frozen"] if first == 0 else named[0])
    assert noticed(monitor, asked(first + 2.1, views_at(first + 2))) == QUIET  # it is back


@pytest.mark.parametrize("view", [WRIST, LEFT, RIGHT])
def test_a_frozen_view_that_is_encoded_anew_is_noticed(view):
    monitor, old = InputMonitor(), views_at(0)[view]
    named = [
        noticed(monitor, asked(step, views_at(step) | {view: jpeg(old, (95, 50, 80, 30)[step])}))
        for step in range(4)
    ]
    assert named == [QUIET, *[["camera_frozen"]] * 3]


def test_a_view_is_not_frozen_while_only_the_other_limb_moves():
    monitor = InputMonitor()
    for step in range(3):
        poses = {"left": T, "right": at(step)}
        assert noticed(monitor, asked(0, limb_poses=poses)) == QUIET
    both = {"left": at(3), "right": at(3)}
    assert noticed(monitor, asked(0, limb_poses=both)) == ["camera_frozen"] * 3


def test_without_poses_the_joints_tell_that_the_arm_moves():
    monitor = InputMonitor()
    q = np.linspace(-0.5, 0.5, 7)
    for turned, named in ((0.0, QUIET), (0.03, QUIET), (0.05, ["camera_frozen"] * 3)):
        shown = asked(0, q_rad=q + np.eye(7)[1] * turned, limb_poses={})
        assert noticed(monitor, shown) == named


def test_a_copy_of_another_view_is_noticed_at_once():
    views = views_at(0)
    for copy in (views[LEFT], jpeg(views[LEFT], 70), views[LEFT].repeat(2, 0).repeat(2, 1)):
        assert noticed(InputMonitor(), asked(0, views | {RIGHT: copy})) == ["camera_copied"]


def exchanged(views, *names):
    return views | dict(zip(names, (views[name] for name in (*names[1:], names[0])), strict=True))


@pytest.mark.parametrize("names", [(LEFT, RIGHT), (WRIST, LEFT), (WRIST, LEFT, RIGHT)])
def test_views_that_change_places_are_noticed_until_they_are_back(names):
    monitor = after(2)
    for step in (2, 3):
        assert noticed(monitor, asked(step, exchanged(views_at(step), *names))) == [
            "camera_swapped"
        ]
    assert noticed(monitor, asked(4)) == QUIET


@pytest.mark.parametrize("view", [WRIST, LEFT, RIGHT])
def test_a_view_that_turns_upside_down_is_noticed_until_it_is_back(view):
    for flip in (np.s_[::-1], np.s_[::-1, ::-1]):
        monitor = after(2)
        for step in (2, 3):
            views = views_at(step)
            turned = asked(step, views | {view: views[view][flip]})
            assert noticed(monitor, turned) == ["camera_upside_down"]
        assert noticed(monitor, asked(4)) == QUIET


def test_a_scene_unlike_all_before_does_not_tell_which_way_is_up():
    monitor, others = InputMonitor(), views_at(0)
    for shown in (*[scene(1)] * 30, scene(7), scene(7)[::-1]):
        assert noticed(monitor, asked(0, others | {WRIST: shown})) == QUIET


@pytest.mark.parametrize("view", [WRIST, LEFT, RIGHT])
def test_channels_that_are_exchanged_are_noticed_until_they_are_back(view):
    monitor = after(2)
    for step in (2, 3):
        views = views_at(step)
        assert noticed(monitor, asked(step, views | {view: views[view][..., ::-1]})) == [
            "camera_channels"
        ]
    assert noticed(monitor, asked(4)) == QUIET


def test_a_composite_is_taken_apart_at_any_size():
    views = views_at(0)
    whole = compose(views | {RIGHT: views[LEFT]}, DROID.rig)
    for composite in (whole, np.ascontiguousarray(whole[::2, ::2])):
        assert noticed(InputMonitor(), asked(0, {}, composite=composite)) == ["camera_copied"]
    assert noticed(InputMonitor(), asked(0, {}, composite=compose(views, DROID.rig))) == QUIET


@pytest.mark.parametrize("hw", [(16, 16), (90, 160), (181, 333), (720, 1280)])
def test_blocks_are_means_of_equal_parts(hw):
    ramp = np.linspace(0, 250, hw[1]) + np.zeros((hw[0], 1))
    means = block_means(np.stack([ramp, ramp, 250 - ramp], -1).astype(np.uint8))
    assert means.shape == (18, 32, 3)
    np.testing.assert_allclose(means[..., 0], np.linspace(4, 246, 32) + 0 * means[..., 0], atol=13)
    np.testing.assert_allclose(means[0, :, 2], means[0, ::-1, 0], atol=2)


Q, ROWS = np.linspace(-0.5, 0.5, 7), np.arange(1, 17)[:, None] * 0.02
TIMES = np.arange(1, 17) / 15


def state(q_rad, t_s: float):
    return request(JOINT_POS, q_rad=q_rad, images={}, t_motion_s=t_s)


@pytest.mark.parametrize(
    ("moved", "named"),
    [(0.16, QUIET), (0.02, QUIET), (0.0, ["state_stuck"]), (0.0005, ["state_stuck"])],
)
def test_a_state_that_does_not_move_when_commanded_is_noticed(moved, named):
    monitor = InputMonitor()
    assert noticed(monitor, state(Q, 0.0)) == QUIET
    monitor.follow(Q + ROWS, TIMES)
    assert noticed(monitor, state(Q + moved, 8 / 15)) == named


def test_small_commands_that_nothing_follows_add_up():
    monitor, named = InputMonitor(), []
    for i in range(4):
        named.append(noticed(monitor, state(Q, 2 * i / 15)))
        monitor.follow(Q + ROWS, TIMES)
    assert named == [QUIET, QUIET, QUIET, ["state_stuck"]]
    assert noticed(monitor, state(Q + 0.04, 8 / 15)) == QUIET


def test_an_arm_that_is_not_told_to_move_may_rest():
    monitor = InputMonitor()
    for i in range(9):
        assert noticed(monitor, state(Q, i / 2)) == QUIET
        monitor.follow(np.tile(Q, (16, 1)), TIMES)


def test_the_time_of_an_arm_that_holds_does_not_pass():
    monitor = InputMonitor()
    for _ in range(9):
        assert noticed(monitor, state(Q, 0.0)) == QUIET
        monitor.follow(Q + ROWS, TIMES)


@pytest.mark.parametrize(("off", "named"), [(0.3, QUIET), (0.7, ["state_jumped"])])
def test_a_state_far_from_its_path_is_noticed(off, named):
    monitor = InputMonitor()
    noticed(monitor, state(Q, 0.0))
    monitor.follow(Q + ROWS, TIMES)
    assert noticed(monitor, state(Q + np.eye(7)[3] * off + 0.16, 0.5)) == named


def test_positions_are_followed_where_no_joints_are_known():
    line = T[:3, 3] + np.arange(1, 17)[:, None] * [0.01, 0, 0]
    for moved, named in ((2.0, QUIET), (0.0, ["state_stuck"]), (-9.0, ["state_jumped"])):
        monitor = InputMonitor()
        noticed(monitor, asked(0, {}))
        monitor.follow(np.hstack((line, np.zeros((16, 5)))), TIMES)
        assert noticed(monitor, asked(moved, {}, t_motion_s=0.5)) == named


class Still(Echo):
    """Answers with the joint angles that it is shown."""

    info = BackendInfo(name="still", action_space="joint_pos")

    def infer(self, request):
        chunk = super().infer(request)
        action = chunk.action.copy()
        action[:, :7] = request.q_rad
        return replace(chunk, action=action)


def flat(step: int, **views):
    """A flat observation as the host of a policy gives it."""
    angles = HOME_Q + np.array([0.05 * step, *[0.0] * 6])
    names = [f"joint{i + 1}" for i in range(7)]
    state = dict(zip(names, angles.tolist(), strict=True)) | {"finger_joint1": 0.04}
    return state | views_at(step) | views


def policy_of(on_event: str, robot: str | None = "panda", backend=None) -> Cosmos3Policy:
    policy = Cosmos3Policy(backend=backend or Still(), robot=robot, options={"on_event": on_event})
    policy.set_robot_state_keys([f"joint{i + 1}" for i in range(7)] + ["finger_joint1"])
    return policy


DEAD = {WRIST: np.zeros((180, 320, 3), np.uint8)}


def test_a_policy_warns_once_in_an_episode_and_counts():
    with policy_of("warn") as policy:
        for _ in range(2):
            policy.reset()
            with pytest.warns(InputWarning, match="'wrist' is of one colour"):
                policy.get_actions_sync(flat(0, **DEAD), "reach")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in (1, 2):
                    policy.get_actions_sync(flat(step, **DEAD), "reach")
        assert policy.counters["camera_constant"] == 6
        assert policy.counters["camera_frozen"] == 0


def test_a_policy_that_holds_answers_with_the_pose_that_it_is_shown():
    backend = Still()
    with policy_of("hold", backend=backend) as policy, warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.set_control_frequency(50)
        steps = policy.get_actions_sync(flat(1, **DEAD), "reach")
        asked_then = len(backend.requests)
        policy.get_actions_sync(flat(1), "reach")
    assert (asked_then, len(backend.requests)) == (0, 1)
    assert len(steps) > 50
    for step in steps:
        np.testing.assert_allclose(list(step.values())[:7], HOME_Q + [0.05, *[0.0] * 6])
    assert policy.counters["camera_constant"] == 1


@pytest.mark.parametrize(("on_event", "robot"), [("error", "panda"), ("hold", None)])
def test_a_policy_refuses_what_it_is_to_refuse(on_event, robot):
    with policy_of(on_event, robot) as policy:
        with pytest.raises(SensorError, match="'wrist' is of one colour") as refused:
            policy.get_actions_sync(flat(0, **DEAD), "reach")
        assert refused.value.final is (on_event == "error")
        assert not policy.backend.requests


def test_candidates_for_one_observation_are_one_event():
    with policy_of("warn") as policy, pytest.warns(InputWarning) as caught:
        policy.get_actions_batch([flat(0, **DEAD)] * 3, "reach")
    assert len(caught) == 1


def test_a_snapshot_remembers_what_was_seen():
    swapped = exchanged(flat(2), LEFT, RIGHT)
    with policy_of("warn") as policy:
        policy.get_actions_sync(flat(1), "reach")
        state = policy.snapshot()
        for _ in range(2):
            policy.restore(state)
            with pytest.warns(InputWarning, match="changed places"):
                policy.get_actions_sync(swapped, "reach")


def served(on_event: str) -> ServedPolicy:
    return ServedPolicy(Still(), "droid", "joint_pos", on_event=on_event)


def message(step: int, **views):
    q = np.linspace(0.1, 0.7, 7) + [0.05 * step, *[0.0] * 6]
    pictures = zip(DROID.rig.wire_names, (views_at(step) | views).values(), strict=True)
    return observation(q, **dict(pictures), session_id="a")


def answers(policy: ServedPolicy, session: Session, *messages):
    return [policy.answer([Message(encode(one), session, time.monotonic())])[0] for one in messages]


def test_a_server_follows_each_session():
    policy, session, other = served("hold"), Session(), Session()
    swapped = [exchanged(views_at(step), LEFT, RIGHT) for step in range(3)]
    first, second = answers(policy, session, message(0), message(1, **swapped[1]))
    assert (first.outcome, second.outcome) == ("ok", "held")
    assert not second.failed  # the connection stays open
    said = decode(second.sent(session))
    assert "have changed places" in said["message"]
    assert said["retry_after_ms"] > 0
    # who began with them so is not known to have swapped them
    assert [a.outcome for a in answers(policy, other, message(1, **swapped[1]))] == ["ok"]
    (again,) = answers(policy, session, message(2, **swapped[2]))
    assert again.outcome == "held"
    reset = {"endpoint": "reset", "session_id": "a"}
    after_reset = answers(policy, session, reset, message(2, **swapped[2]))
    assert [answer.outcome for answer in after_reset] == ["reset", "ok"]
    assert len(policy.backend.requests) == 3
    assert policy.backend.counters["camera_swapped"] == 2


def test_a_replica_that_never_saw_a_session_knows_what_it_saw():
    session = Session()
    assert answers(served("error"), session, message(0))[0].outcome == "ok"
    sent = pickle.loads(pickle.dumps(session.sent("a")))
    (answer,) = answers(served("error"), sent, message(1, **exchanged(views_at(1), LEFT, RIGHT)))
    assert answer.outcome == "error"
    assert answer.failed


def test_a_state_that_is_stuck_is_noticed_by_a_server():
    class Far(Echo):
        def infer(self, request):
            chunk = super().infer(request)
            return replace(chunk, action=np.vstack([chunk.action, chunk.action + 0.2]))

    policy, session = ServedPolicy(Far(), "droid", "joint_pos"), Session()
    messages = [{**observation(), "cosmos3/t_motion_s": t_s} for t_s in (0.0, 0.5)]
    with pytest.warns(InputWarning, match="has not moved"):
        answers(policy, session, *messages)
    assert policy.backend.counters["state_stuck"] == 1


def test_a_server_warns_in_each_session_and_reads_composites():
    policy = served("warn")
    dead = observation(**{COMPOSITE: np.zeros((540, 640, 3), np.uint8)})
    for _ in range(2):
        with pytest.warns(InputWarning) as caught:
            answers(policy, Session(), dead, dead)
        assert len(caught) == 1
    assert policy.backend.counters["camera_constant"] == 12  # three views each


@pytest.mark.parametrize(
    ("on_event", "error"), [("hold", ServiceBusyError), ("error", ServiceRefusedError)]
)
def test_a_client_is_told_what_is_wrong(on_event, error):
    with PolicyServer(served(on_event), ServerConfig(port=0)) as server:
        client = PolicyClient(ClientConfig("127.0.0.1", server.port))
        with Cosmos3Policy(backend=ServiceBackend(client), options={"on_event": "warn"}) as policy:
            policy.set_robot_state_keys([f"joint{i + 1}" for i in range(7)] + ["finger_joint1"])
            with pytest.warns(InputWarning), pytest.raises(error, match="is of one colour"):
                policy.get_actions_sync(flat(0, **DEAD), "reach")


class SeeingExpert(ScriptedBackend):
    """The expert, of whose pictures the monitors are shown."""

    info = replace(ScriptedBackend.info, requires_images=True)


class Faulty(Cosmos3Policy):
    """A policy with a wrist camera that shows one colour from the third inference on, for some."""

    broken = range(3, 100)
    asked = 0

    def plan(self, observation, instruction, **more):
        self.asked += 1
        if self.asked in self.broken:
            observation = replace(observation, images={**observation.images, **DEAD})
        return super().plan(observation, instruction, **more)


def run(policy: Cosmos3Policy, duration: float = 20.0):
    return Robot("panda").run_policy(
        instruction="pick up the red cube", task="pick", policy=policy, duration=duration, seed=3
    )


def test_the_episode_of_a_policy_that_holds_goes_on_once_the_camera_is_back():
    with Faulty(backend=SeeingExpert(), robot="panda", options={"on_event": "hold"}) as policy:
        policy.broken = range(3, 6)
        rollout = run(policy)
    assert rollout.outcome is Outcome.SUCCESS
    assert rollout.counters["camera_constant"] == rollout.counters["failed"] == 3
    assert rollout.counters["idle_ticks"] > 0


@pytest.mark.parametrize("on_event", ["hold", "error"])
def test_an_episode_without_a_camera_ends_as_a_fault_with_the_arm_at_rest(on_event):
    with Faulty(backend=SeeingExpert(), robot="panda", options={"on_event": on_event}) as policy:
        rollout = run(policy)
    assert rollout.outcome is Outcome.FAULT
    assert "is of one colour" in rollout.fault
    named = rollout.counters["camera_constant"]
    assert named == 1 if on_event == "error" else named > 3
    assert abs(rollout.arrays["qd_ref"][-1]).max() == 0 if "qd_ref" in rollout.arrays else True


def test_nothing_is_noticed_in_a_plain_episode_and_a_frozen_camera_is():
    with Cosmos3Policy(backend=SeeingExpert(), robot="panda") as policy, warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        rollout = run(policy)
    assert rollout.outcome is Outcome.SUCCESS
    assert not any(rollout.counters[name] for name in InputMonitor.counters)


def test_a_watch_counts_every_event_by_name():
    assert set(Watch().counters) == set(InputMonitor.counters)
