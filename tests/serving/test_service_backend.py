"""The service backend against our own server, and the policy in front of it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import websockets.sync.server
from test_server import recording
from test_wire import T, request

from helpers.holding import Stays, sunk_mm
from helpers.options import backend_options
from helpers.serving import DROID, Echo, picture, until
from strands_cosmos3 import create_policy
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.replay import ReplayBackend
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    ObservationError,
    ServiceChunkError,
    ServiceRefusedError,
    ServiceUnavailableError,
    ServiceUnreadableError,
)
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import Limits, encode
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.serving.wire import SERVED_SPACE, stated_space
from strands_cosmos3.types import ActionChunk, Observation, Request


@pytest.fixture
def connect():
    """connect(port, dialect, **config): a service backend, closed at the end."""
    made: list[ServiceBackend] = []

    def make(port: int, dialect: str = "robolab", sleep=lambda s: None, **config) -> ServiceBackend:
        made.append(
            ServiceBackend(
                PolicyClient(ClientConfig("127.0.0.1", port, **config), sleep=sleep), dialect
            )
        )
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.mark.parametrize("dialect", ["robolab", "openpi", "vllm-omni", "roboarena"])
def test_every_dialect_reaches_our_server_and_resets_it(serve, connect, dialect):
    backend = Echo()
    service = connect(serve(backend).port, dialect)
    service.reset()  # nothing was asked yet, so nobody is told
    chunk = service.infer(request())
    np.testing.assert_allclose(chunk.action[0, :7], request().q_rad, atol=1e-6)
    np.testing.assert_allclose(chunk.action[:, 7], 0.2, atol=1e-6)
    resets = backend.resets
    service.reset()
    assert backend.resets == resets + (dialect in ("vllm-omni", "roboarena"))
    assert backend.requests[-1].seed == (9 if dialect in ("robolab", "openpi") else 0)
    service.infer(request())
    assert service.counters["dials"] == 1  # one connection for all


def test_midtrain_is_asked_with_the_pose_and_answered_with_poses(serve, connect):
    motion = recording()
    service = connect(serve(ReplayBackend(motion), action_space="midtrain").port)
    at_start = request(
        DROID.spaces["midtrain"], limb_poses={"arm": motion.T_base_cosmos[0]}, t_motion_s=0.0
    )
    chunk = service.infer(at_start)
    assert chunk.action_space.name == "pose_abs"
    np.testing.assert_allclose(chunk.action[:, :3], motion.T_base_cosmos[1:17, :3, 3], atol=1e-6)
    np.testing.assert_allclose(chunk.action[:, 7], motion.gripper[1:17], atol=1e-6)
    with pytest.raises(ServiceRefusedError, match="rows are not sent"):
        # too far from the recording
        service.infer(request(DROID.spaces["midtrain"], limb_poses={"arm": T}))
    assert service.infer(at_start).action.shape == (16, 8)  # dialled again


def test_it_connects_when_it_is_first_asked_and_waits_between_dials(connect):
    pauses: list[float] = []
    service = connect(9, sleep=pauses.append, attempts=4, first_pause_s=0.1, longest_pause_s=0.25)
    with pytest.raises(ServiceUnavailableError, match="4 attempts"):
        service.infer(request())
    assert pauses == [0.1, 0.2, 0.25]


def test_a_server_that_comes_back_is_dialled_again(serve, connect):
    first = serve()
    service = connect(first.port)
    service.infer(request())
    first.__exit__(None, None, None)
    with pytest.raises(ServiceUnavailableError):
        service.infer(request())
    serve(port=first.port)
    assert service.infer(request()).action.shape == (4, 8)
    assert service._client.counters["reconnects"] == 2  # the one that failed, the one that did not


def test_the_digest_of_the_model_that_answers_is_the_latest_server_s(serve, connect):
    port, told = None, []
    service = None
    for digest in ("a" * 64, "b" * 64, None):
        backend = Echo()
        backend.info = replace(backend.info, model_sha256=digest)
        server = serve(backend, **({} if port is None else {"port": port}))
        port, service = server.port, service or connect(server.port)
        service.infer(request())
        told.append(service.info.model_sha256)
        server.__exit__(None, None, None)
        with pytest.raises(ServiceUnavailableError):
            service.infer(request())
    assert told == ["a" * 64, "b" * 64, None]


def test_a_token_is_shown_in_either_scheme_and_its_lack_is_named(serve, connect):
    port = serve(token="s3cret-s3cret-s3cret").port
    for scheme in ("Api-Key", "Bearer"):
        assert connect(port, token="s3cret-s3cret-s3cret", scheme=scheme).infer(request())
    for token in (None, "wrong"):
        with pytest.raises(ServiceRefusedError, match="api_key"):
            connect(port, token=token).infer(request())


def test_sixty_four_clients_get_their_own_chunks(serve, connect):
    server = serve()
    wrong = []

    def one(number: int) -> None:
        q = np.full(7, number / 64)
        service = connect(server.port)
        for _ in range(3):
            if not np.allclose(service.infer(request(q_rad=q)).action[0, :7], q, atol=1e-6):
                wrong.append(number)
        service.close()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert server.metrics.requests["ok"] == 192


def test_closing_leaves_neither_a_thread_nor_a_connection(serve, connect):
    server = serve()
    before = threading.active_count()
    service = connect(server.port)
    service.infer(request())
    assert threading.active_count() > before
    service.close()
    service.close()
    assert threading.active_count() == before
    until(lambda: server.metrics.clients == 0)


def observation(images: bool = True) -> dict:
    flat = {f"joint{i + 1}": 0.1 * i for i in range(7)} | {"joint4": -0.3, "finger_joint1": 0.008}
    return flat | {view: picture() for view in DROID.rig.views} if images else flat


def panda(server: PolicyServer, **more) -> Cosmos3Policy:
    return Cosmos3Policy("droid", robot="panda", host="127.0.0.1", port=server.port, **more)


def test_the_policy_turns_a_served_chunk_into_the_robot_s_joints(serve):
    backend = Echo()
    with panda(serve(backend)) as policy:
        assert policy.requires_images
        steps = policy.get_actions_sync(observation(), "pick up the red cube")
    assert len(steps) == 4
    assert steps[0]["joint3"] == pytest.approx(0.2, abs=1e-6)
    # a fifth open, there and back
    assert steps[0]["finger_joint1"] == pytest.approx(0.008, abs=1e-6)
    assert backend.requests[-1].gripper == pytest.approx(0.2)
    assert backend.requests[-1].instruction == "pick up the red cube"
    assert set(backend.requests[-1].images) == set(DROID.rig.views)
    assert policy.last_rollout["action_space"] == "joint_pos"
    assert "server_infer_ms" in policy.last_rollout["timing"]


def test_a_missing_camera_is_named(serve):
    with panda(serve()) as policy, pytest.raises(ObservationError, match="wrist"):
        policy.get_actions_sync(observation(images=False), "x")


def test_the_policy_follows_a_served_recording_through_inverse_kinematics(serve):
    from motions import SLOW_DEG, SLOW_M, recording_of_motion
    from strands_cosmos3.control.ik import MinkIKBridge
    from strands_cosmos3.sim import load_panda

    motion = recording_of_motion(np.random.default_rng(0), SLOW_M, SLOW_DEG)
    server = serve_recording(serve, motion)
    with panda(server, action_space="midtrain") as policy:
        seen = Observation(
            motion.q_start_rad, 1.0, {view: picture() for view in DROID.rig.views}, t_motion_s=0.0
        )
        plan = policy.plan(seen, "")
    bridge = MinkIKBridge(load_panda())
    q = np.zeros(bridge.model.nq)
    q[bridge.q_address] = plan.q_rad[-1]
    T_end = bridge.ee_pose(q) @ DROID.tool_frame.T_parent_cosmos
    row_s = plan.t_s[-1]
    want, _ = motion.at(np.array([row_s]))
    np.testing.assert_allclose(T_end[:3, 3], want[0, :3, 3], atol=2e-4)


def serve_recording(serve, motion) -> PolicyServer:
    from strands_cosmos3.commands.serve import _warm_up_message

    backend = ReplayBackend(motion)
    return serve(backend, action_space="midtrain", warm_up_message=_warm_up_message(backend))


@pytest.mark.parametrize("space", ["midtrain", "pose_abs"])
def test_a_server_that_is_told_the_sagging_pose_does_not_make_the_arm_sink(serve, space):
    """It integrates from the measured pose that it was sent; the motion departs from the
    reference all the same.
    """
    from strands_cosmos3.sim.plant import PlantErrors
    from strands_cosmos3.worlds.arms import Robot

    server = serve(Stays(), action_space="midtrain")
    service = ServiceBackend(
        PolicyClient(ClientConfig("127.0.0.1", server.port)), requires_images=False
    )
    with Cosmos3Policy(
        robot="panda", backend=service, action_space=space, actions_per_step=4
    ) as policy:
        rollout = Robot(plant=PlantErrors(payload_kg=0.5)).run_policy(policy=policy, duration=2.5)
    assert sunk_mm(rollout.arrays["q_achieved_rad"], HOME_Q).max() < 0.6
    assert rollout.loop_drift.max_mm < 0.6


def test_create_policy_takes_the_server_s_address(serve):
    server = serve()
    with create_policy(f"cosmos3://127.0.0.1:{server.port}", robot="panda") as policy:
        assert len(policy.get_actions_sync(observation(), "x")) == 4
    with create_policy(f"strands_cosmos3://127.0.0.1:{server.port}", robot="panda") as policy:
        assert policy.info.name == "service"
    # strands-robots' default: localhost:8000, dialled on demand
    with create_policy("cosmos3", robot="panda") as policy:
        assert policy.info.name == "service"
        assert policy.action_space.name == "joint_pos"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"transport": "zmq"}, "raw"),
        ({"backend": "replay", "port": 8000}, "port belongs to backend service"),
        ({"backend": "service", "client": PolicyClient(), "port": 3}, "leave host, port"),
        ({"host": "http://x"}, "not an address"),
        ({"host": "x:y:z/"}, "not an address"),
        ({"port": 8000, "options": {"dialect": "klingon"}}, "roboarena"),
    ],
)
def test_options_that_contradict_each_other_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        Cosmos3Policy("droid", **config)


@pytest.mark.parametrize(
    ("provider", "more"),
    [("cosmos3://", {}), ("cosmos3://a:1", {"port": 2}), ("openvla://a:1", {})],
)
def test_providers_that_make_no_sense_are_refused(provider, more):
    with pytest.raises(ConfigError):
        create_policy(provider, **more)


@pytest.mark.parametrize(
    ("host", "port", "uri"),
    [
        ("localhost", None, "ws://localhost:8000"),
        ("10.0.0.2", 9, "ws://10.0.0.2:9"),
        ("a:77", None, "ws://a:77"),
        ("::1", 5, "ws://[::1]:5"),
        ("ws://a:5/policy", None, "ws://a:5/policy"),
        ("wss://gpu.example", None, "wss://gpu.example:443"),
    ],
)
def test_addresses_in_every_spelling(host, port, uri):
    assert ClientConfig(host, port).address[0] == uri


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("ws://a:5/policy?model=edge", "a query"),
        ("a/policy?x", "a query"),
        ("wss://me:secret@gpu.example", "api_key"),
        ("ws://a#b", "fragment"),
        ("ws://a:0", "not an address"),
        ("ws://a:99999", "not an address"),
    ],
)
def test_what_an_address_cannot_say_is_refused(host, says):
    with pytest.raises(ConfigError, match=says) as raised:
        ClientConfig(host)
    assert "secret" not in str(raised.value)


def test_a_token_is_in_no_repr():
    assert "s3cret-s3cret-s3cret" not in repr(ClientConfig(token="s3cret-s3cret-s3cret"))


def test_a_received_picture_is_not_copied_and_a_local_one_is():
    from strands_cosmos3.serving.codec import decode, encode

    received = decode(encode(picture()))
    assert np.shares_memory(request(images={"wrist": received}).images["wrist"], received)
    mine = picture()
    held = request(images={"wrist": mine}).images["wrist"]
    mine[:] = 0
    assert held[0, 0, 0] == 100
    with pytest.raises(ValueError, match="read-only"):
        held[0, 0, 0] = 1


@pytest.mark.parametrize("when", ["before the exchange", "in it"])
def test_closing_a_policy_ends_a_call_under_way_elsewhere(serve, monkeypatch, when):
    """It leaves no thread that dialled anew, and does not wait for the answer."""
    begun, gate = threading.Event(), threading.Event()
    warm = threading.Event()

    def hang(asked: Request) -> None:
        if warm.is_set():
            begun.set()
            gate.wait(20)

    server = serve(Echo(hang))
    warm.set()  # the server asks once by itself
    running = threading.active_count()
    service = ServiceBackend(
        PolicyClient(ClientConfig("127.0.0.1", server.port, read_s=60.0)), requires_images=False
    )
    policy, raised = Cosmos3Policy(robot="panda", backend=service), []
    if when == "before the exchange":
        gate.set()
        ask = policy._request
        monkeypatch.setattr(
            policy,
            "_request",
            lambda *arguments: (begun.set(), time.sleep(0.3), ask(*arguments))[2],
        )

    def plan() -> None:
        try:
            policy.plan(Observation(HOME_Q, 1.0), "sway")
        except BackendError as error:
            raised.append(error)

    thread = threading.Thread(target=plan)
    thread.start()
    assert begun.wait(10)
    policy.close()
    thread.join(10)
    assert not thread.is_alive()
    assert not any(other.name == "policy-client" for other in threading.enumerate())
    assert raised or when == "before the exchange"
    gate.set()
    until(lambda: threading.active_count() <= running)


def test_a_video_of_forty_megabytes_arrives(serve, connect):
    video = np.zeros((33, 544, 736, 3), np.uint8)
    video[-1, -1, -1] = 7

    roomy = Limits(max_bytes=2**27)
    rows = np.tile(np.append(HOME_Q, 0.0).astype(np.float32), (4, 1))
    reply = encode({"action": rows, "video": video}, roomy)

    def answer(client) -> None:
        client.send(encode({}))
        for _ in client:
            client.send(reply)

    with websockets.sync.server.serve(
        answer, "127.0.0.1", 0, max_size=None, compression=None
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        with Cosmos3Policy("droid", robot="panda", host="127.0.0.1", port=port) as policy:
            policy.get_actions_sync(observation(), "go")
            np.testing.assert_array_equal(policy.last_rollout["video"], video)
        with pytest.raises(ServiceUnreadableError, match="max_reply_bytes"):
            connect(port, max_reply_bytes=2**20).infer(request())
        server.shutdown()


class Rows(Echo):
    """Answers the same rows to everyone."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def infer(self, request):
        return ActionChunk(self.rows, request.action_space, request.embodiment)


def through_the_loop(policy):
    """As our Robot asks: the policy's plan, which the executor accepts."""
    plan = policy.plan(observation(), "go")
    Executor(FER, 0.002, HOME_Q).accept(plan)


ASKED = {
    "steps": lambda policy: policy.get_actions_sync(observation(), "go"),
    "batch": lambda policy: policy.get_actions_batch([observation()], "go"),
    "loop": through_the_loop,
}


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize(
    ("row", "joint", "q_rad", "says"),
    [
        (0, 1, 1.9, r"joint 2 of 7 is at 1\.9000 rad, outside its range \[-1\.7628, 1\.7628\]"),
        (15, 5, -0.3, r"row 15: joint 6 of 7 is at -0\.3000 rad"),
        (7, 6, -2.8974, r"row 7: joint 7 of 7 is at -2\.8974 rad"),
        (3, 4, 90.0, r"\[3, 4\] \(joint_4\) is 90; .* not in degrees"),
    ],
)
def test_rows_outside_the_joints_ranges_never_become_steps(serve, how, row, joint, q_rad, says):
    rows = np.tile(np.append(HOME_Q, 0.4), (16, 1))
    rows[row, joint] = q_rad
    port = serve(Rows(rows)).port
    with Cosmos3Policy("droid", robot="panda", host="127.0.0.1", port=port) as policy:
        policy.set_control_frequency(60.0)
        with pytest.raises(ServiceChunkError, match=says) as caught:
            ASKED[how](policy)
    assert "not executed" in str(caught.value)


def test_rows_at_the_ends_of_the_ranges_are_executed(serve):
    """Also where float32 has rounded them up."""
    rows = np.tile(np.append(HOME_Q, 0.4), (16, 1))
    rows[8:, 0] = FER.q_max[0]
    assert np.float32(FER.q_max[0]) > FER.q_max[0]
    rows[8:, 3] = FER.q_min[3]
    port = serve(Rows(rows)).port
    with Cosmos3Policy("droid", robot="panda", host="127.0.0.1", port=port) as policy:
        steps = policy.get_actions_sync(observation(), "go")
        through_the_loop(policy)
    assert steps[-1]["joint1"] == FER.q_max[0]
    assert steps[-1]["joint4"] == pytest.approx(FER.q_min[3], abs=1e-7)


@pytest.mark.parametrize("stated", ["joint_velocity", "Midtrain", 3])
def test_a_stated_action_space_that_nobody_knows_is_refused(stated):
    with pytest.raises(ServiceUnreadableError, match=r"reads .*joint_pos.*pass action_space="):
        stated_space({SERVED_SPACE: stated})


def test_the_servers_action_space_is_used_unless_another_is_asked_for(serve, connect):
    motion = recording()
    port = serve(ReplayBackend(motion), action_space="midtrain").port
    joints = request(limb_poses={"arm": motion.T_base_cosmos[0]}, t_motion_s=0.0)
    assert connect(port).infer(joints).action_space.name == "pose_abs"
    told = make_backend(
        "service",
        options=backend_options(host="127.0.0.1", port=port),
        action_space="joint_pos",
    )
    with pytest.raises(ServiceRefusedError, match="speaks midtrain: add 'observation/eef_quat'"):
        told.infer(joints)
    told.close()


@pytest.mark.parametrize("name", ["umi", "av", "bridge", "libero"])
def test_every_domain_is_created_by_name_and_answers_its_own_columns(name):
    embodiment = get_embodiment(name)
    space = embodiment.action_space()

    class Own(Echo):
        def infer(self, request: Request):
            self.requests.append(request)
            rows = np.tile(np.linspace(-0.5, 0.5, space.width), (request.n_rows, 1))
            return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)

    own = Own()
    with PolicyServer(ServedPolicy(own, name), ServerConfig(port=0)) as server:
        policy = create_policy(embodiment=name, host="127.0.0.1", port=server.port)
        steps = policy.get_actions_sync({"camera": picture(48, 64)}, "go")
        policy.close()
    assert own.requests[-1].composite.shape == (48, 64, 3)
    assert list(steps[0]) == list(space.columns)
    np.testing.assert_allclose(
        list(steps[0].values()), np.linspace(-0.5, 0.5, space.width), atol=1e-6
    )


def test_an_arm_without_a_robot_is_an_error():
    for options in ({"arm_model": "panda"}, {"limits": FER}):
        with pytest.raises(
            ConfigError, match=r"(arm_model|limits) describes an arm.*robot='panda'"
        ):
            Cosmos3Policy("droid", backend="service", options=options)
