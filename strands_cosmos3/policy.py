"""The policy: observation and instruction in, motion out. The same object serves our Robot and strands-robots."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strands_cosmos3.backends import ServiceOptions, make_backend
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.backends.options import InferenceOptions
from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.errors import ConfigError, ControlError, InputError, ObservationError
from strands_cosmos3.observe.mapping import RobotMapping, resolve_mapping
from strands_cosmos3.observe.views import compose
from strands_cosmos3.types import ActionChunk, JointTrajectory, Mode, Observation, Request

if TYPE_CHECKING:
    from strands_cosmos3.arm.panda import JointLimits

Step = dict[str, float | list[float]]


class Policy(ABC):
    """The contract of strands-robots' ``Policy``: what its runner may call, and nothing of its implementation."""

    requires_images: bool = False
    actions_per_step: int | None = None

    @property
    @abstractmethod
    def provider_name(self) -> str:
        """Name under which the policy is registered."""

    @abstractmethod
    async def get_actions(self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any) -> list[Step]:
        """The next actions, one dictionary of Python floats a step. Unknown keyword arguments are ignored."""

    @abstractmethod
    def set_robot_state_keys(self, robot_state_keys: list[str]) -> None:
        """Name the robot's state entries, in order.

        Raises:
            InputError: Not a list of distinct, non-empty strings.
        """

    def get_actions_sync(self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any) -> list[Step]:
        """:meth:`get_actions` without ``await``, also where an event loop is already running (in a notebook, say)."""

        def call() -> list[Step]:
            return asyncio.run(self.get_actions(observation_dict, instruction, **kwargs))

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call()
        with ThreadPoolExecutor(max_workers=1) as worker:
            return worker.submit(call).result()

    def reset(self, seed: int | None = None) -> None:  # noqa: B027 - optional for implementers
        """Start a new episode."""

    def set_control_frequency(self, hz: float) -> None:  # noqa: B027 - optional for implementers
        """Say how often the caller applies a step."""

    def close(self) -> None:  # noqa: B027 - optional for implementers
        """Free whatever the policy holds."""

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Cosmos3Policy(Policy):
    """Cosmos 3 as a robot policy.

    Args:
        embodiment: Whose domain speaks, e.g. ``"droid"``.
        robot: ``"panda"`` (or ``"franka"``) turns chunks into joint targets for that arm; None passes raw columns through.
        backend: ``"scripted"``, ``"replay"``, ``"native"`` (this package's engine), ``"diffusers"`` (the stock pipeline),
            ``"service"`` (a policy server), or a :class:`~strands_cosmos3.backends.base.Backend` of your own. None is
            ``"native"`` where ``model`` is a path, and ``"service"`` where its host, port, api_key or client is given.
        model: For ``native`` and ``diffusers``, a checkpoint's folder or hub repository; for ``replay``, the recording: a
            path or a :class:`~strands_cosmos3.backends.replay.Recording`.
        mode: ``"policy"``; with ``native`` also ``"forward_dynamics"`` (what would happen: give ``raw_actions=`` to a call,
            which answers no actions and leaves the world in ``last_rollout["video"]``) and ``"inverse_dynamics"`` (what was
            done: give ``video=``).
        action_space: Which of the embodiment's action spaces the backend speaks; None is its checkpoint's, ``joint_pos`` for
            a service, else the default.
        observation_mapping: Canonical or view name -> key of the observation, beside the robot's own mapping.
        action_mapping: Canonical name -> key of the action, likewise.
        prompt: Used where a call gives an empty instruction.
        seed: Noise seed; each call of an episode uses the next one.
        actions_per_step: Steps a call returns at most; None returns the whole chunk. Our Robot, which asks for plans,
            executes that many rows before it asks again.
        arm_model: The arm's MuJoCo model, path or name; None is the embedded one.
        limits: What its joints may do (:class:`~strands_cosmos3.arm.panda.JointLimits`); None is the Panda's table.
        num_steps: Denoising steps of a model; this and the next four are None for the preset of embodiment and checkpoint.
        guidance_scale: ``v = u + g (c - u)``.
        guidance_interval: Guidance only where lo < timestep < hi.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32`` or ``bfloat16``.
        decode_video: Whether ``last_rollout["video"]`` holds the world that the model predicted, [F, H, W, 3] uint8.
        host, port: For ``service``: where its server is; None is localhost and 8000. It is connected to on the first call.
        api_key: For ``service``: the server's token.
        client: For ``service``: a :class:`~strands_cosmos3.serving.client.PolicyClient` of your own instead of these.
        dialect: For ``service``: ``robolab`` (default), ``openpi``, ``vllm-omni`` or ``roboarena``.
        transport: ``"raw"``, the only one there is.

    Attributes:
        last_rollout: After a call: ``action`` [T, D] raw rows, ``video``, ``sound``, ``seed``, ``timing``, ``action_space``.

    Raises:
        ConfigError: Options that contradict each other or are not available.
        UnknownNameError: An unknown embodiment, mode or backend; the message lists the valid ones.
    """

    def __init__(
        self,
        embodiment: str | Embodiment = "droid",
        robot: str | None = None,
        backend: str | Backend | None = None,
        model: Any = None,
        mode: str = "policy",
        action_space: str | None = None,
        observation_mapping: Mapping[str, str] | None = None,
        action_mapping: Mapping[str, str] | None = None,
        prompt: str = "",
        seed: int | None = None,
        actions_per_step: int | None = None,
        arm_model: Any = None,
        limits: Any = None,
        num_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        decode_video: bool = False,
        host: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        client: Any = None,
        dialect: str | None = None,
        transport: str = "raw",
    ):
        if transport != "raw":
            raise ConfigError(f"transport {transport!r} does not exist; valid: 'raw' (WebSocket and msgpack).")
        self.embodiment = get_embodiment(embodiment)
        self.robot = robot
        self.mode = Mode.parse(mode)
        self.action_space = self.embodiment.action_space(action_space)
        self.actions_per_step = None if actions_per_step is None else whole_number(actions_per_step, "actions_per_step", 1)
        self.prompt = prompt
        self.last_rollout: dict[str, Any] = {}
        self._mappings = (observation_mapping, action_mapping)
        self._mapping = resolve_mapping(robot, None, observation_mapping, action_mapping)
        self._hz: float | None = None
        self._first_seed = 0 if seed is None else int(seed)
        self._calls = 0
        self._planning = threading.Lock()  # get_actions runs in worker threads; solver and counters are shared
        self._bridge = None if robot is None else _make_bridge(arm_model, limits)
        options = InferenceOptions(
            device=device,
            dtype=dtype,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            guidance_interval=guidance_interval,
            decode_video=decode_video or self.mode is Mode.FORWARD_DYNAMICS,  # the world is all that it answers
        )
        service = ServiceOptions(host, port, api_key, client, dialect)
        self.backend = make_backend(backend, model, options, action_space, service)
        modes = getattr(self.backend, "modes", (Mode.POLICY,))
        if self.mode not in modes:
            self.backend.close()
            raise ConfigError(
                f"backend {self.backend.name!r} does not know mode {mode!r}, only {', '.join(modes)}; use backend='native'."
            )
        spoken = getattr(self.backend, "action_space", None)  # a checkpoint may say what its actions mean
        if action_space is None and spoken is not None:
            self.action_space = self.embodiment.action_space(spoken)
        self.requires_images = self.backend.requires_images
        self._takes_views: bool = getattr(self.backend, "takes_views", False)  # the composite is made elsewhere

    @property
    def provider_name(self) -> str:
        """``"cosmos3"``."""
        return "cosmos3"

    @property
    def mapping(self) -> RobotMapping:
        """Which keys of the robot stand behind the canonical names."""
        return self._mapping

    def set_robot_state_keys(self, robot_state_keys: list[str]) -> None:
        """Name the robot's state entries: seven joints and the gripper, in order. A built-in robot mapping keeps its own."""
        self._mapping = resolve_mapping(self.robot, robot_state_keys, *self._mappings)

    def set_control_frequency(self, hz: float) -> None:
        """Return steps at this rate from now on: chunks are resampled by time, not replayed faster or slower."""
        self._hz = positive(hz, "control frequency")

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode: the next call draws with ``seed`` (or the constructor's)."""
        if seed is not None:
            self._first_seed = int(seed)
        self._calls = 0
        self.last_rollout = {}
        self.backend.reset(seed)

    def close(self) -> None:
        """Free the backend."""
        self.backend.close()

    async def get_actions(self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any) -> list[Step]:
        """As :meth:`get_actions_sync`, in a worker thread, so that the caller's event loop goes on."""
        return await asyncio.to_thread(self.get_actions_sync, observation_dict, instruction, **kwargs)

    def get_actions_sync(
        self,
        observation_dict: Mapping[str, Any],
        instruction: str,
        *,
        raw_actions: Any = None,
        video: Any = None,
        **kwargs: Any,
    ) -> list[Step]:
        """The next steps for a flat observation.

        With a robot: joint angles [rad] and the gripper in the robot's unit, at the control frequency once one was set,
        else at the chunk's rate. Without: the model's raw columns, one dictionary a row. In forward dynamics: nothing, the
        predicted world being in ``last_rollout["video"]``.

        Args:
            observation_dict: Joint angles, gripper and views by the robot's own names.
            instruction: What is to be done.
            raw_actions: [rows, D] known actions in the model's scale, for forward dynamics.
            video: [F, H, W, 3] uint8 composed frames, or the path of a film, for inverse dynamics.
            kwargs: Ignored, as strands-robots' contract wants it.

        Raises:
            ObservationError: A state key or camera is missing; the message lists what there is.
            BackendError: Inference failed.
        """
        observation = self._observation(observation_dict)
        plan = self.plan(observation, instruction, raw_actions=raw_actions, video=video)
        if self.mode is Mode.FORWARD_DYNAMICS:
            return []
        if isinstance(plan, ActionChunk) or self._bridge is None:
            assert isinstance(plan, ActionChunk)  # without an arm there is nothing else
            steps: list[Step] = [
                {column: float(value) for column, value in zip(plan.action_space.columns, row, strict=True)}
                for row in plan.action
            ]
        else:
            plan = plan if self._hz is None else _resample(plan, observation, self._hz, self._bridge.limits)
            gripper = [None] * len(plan.q_rad) if plan.gripper is None else plan.gripper.tolist()
            steps = [dict(self._mapping.write(q, g)) for q, g in zip(plan.q_rad, gripper, strict=True)]
        return steps[: self.actions_per_step]

    def plan(
        self, observation: Observation | Mapping[str, Any], instruction: str, *, raw_actions: Any = None, video: Any = None
    ) -> JointTrajectory | ActionChunk:
        """The next chunk as a joint trajectory for the robot, or raw where the policy has none.

        The trajectory is anchored on the observation's measured pose and keeps the chunk's own row times. Arguments as
        :meth:`get_actions_sync`'s; in forward dynamics the chunk is what was given.
        """
        with self._planning:
            observation = self._observation(observation)
            request = self._request(observation, instruction or self.prompt)
            return self._plan(observation, replace(request, mode=self.mode, known_actions=raw_actions, clip=video))

    def _plan(self, observation: Observation, request: Request) -> JointTrajectory | ActionChunk:
        started = time.perf_counter()
        chunk = self.backend.infer(request)
        inferred = time.perf_counter()
        self._calls += 1
        plan: JointTrajectory | ActionChunk = chunk
        if self._bridge is not None and self.mode is not Mode.FORWARD_DYNAMICS:
            from strands_cosmos3.control.targets import solve_chunk

            plan = solve_chunk(chunk, self._bridge, self._full_q(observation), t_capture_s=observation.t_capture_s)
        timing = {"infer_ms": (inferred - started) * 1e3, "solve_ms": (time.perf_counter() - inferred) * 1e3}
        self.last_rollout = {
            "action": chunk.action,
            "video": chunk.video,
            "sound": None,
            "seed": chunk.seed,
            "timing": {**timing, **chunk.timing},
            "action_space": chunk.action_space.name,
        }
        return plan

    def _observation(self, given: Observation | Mapping[str, Any]) -> Observation:
        if isinstance(given, Observation):
            return given
        views = self.embodiment.rig.views if self.requires_images and self.embodiment.rig else ()
        return self._mapping.read(given, time.monotonic(), views)

    def _request(self, observation: Observation, instruction: str) -> Request:
        if not isinstance(instruction, str):
            raise InputError(f"an instruction is a string, got {type(instruction).__name__}.")
        T_base_cosmos = None
        if self._bridge is not None:
            from strands_cosmos3.control.targets import tool_frame_in_ee

            q = self._full_q(observation)
            T_base_cosmos = self._bridge.ee_pose(q) @ tool_frame_in_ee(self.embodiment, self._bridge, q)
        return Request(
            embodiment=self.embodiment,
            action_space=self.action_space,
            instruction=instruction,
            n_rows=self.embodiment.chunk_rows(self.action_space.name),
            q_rad=observation.q_rad,
            gripper=observation.gripper,
            T_base_cosmos=T_base_cosmos,
            composite=self._composite(observation),
            seed=self._first_seed + self._calls,
            t_motion_s=observation.t_capture_s if observation.t_motion_s is None else observation.t_motion_s,
            privileged=observation.privileged if self.backend.needs_privileged else None,
            images=observation.images if self._takes_views else {},
        )

    def _composite(self, observation: Observation) -> Any:
        if not self.requires_images or self._takes_views:
            return None
        if self.embodiment.rig is not None:
            return compose(observation.images, self.embodiment.rig)
        if len(observation.images) != 1:
            raise ObservationError(
                f"embodiment {self.embodiment.name!r} composes no views and takes one picture; the observation has "
                f"{', '.join(observation.images) or 'none'}."
            )
        return next(iter(observation.images.values()))

    def _full_q(self, observation: Observation) -> Any:
        assert self._bridge is not None
        q = np.zeros(self._bridge.model.nq)
        if len(observation.q_rad) != len(self._bridge.q_address):
            raise InputError(f"{len(observation.q_rad)} joint angles for an arm of {len(self._bridge.q_address)}.")
        q[self._bridge.q_address] = observation.q_rad
        return q


def _make_bridge(arm_model: Any, limits: Any) -> Any:
    from strands_cosmos3.arm.model import load_model
    from strands_cosmos3.control.ik import MinkIKBridge

    return MinkIKBridge(load_model(arm_model), limits=limits)


def _resample(plan: JointTrajectory, observation: Observation, hz: float, limits: JointLimits) -> JointTrajectory:
    """The same motion at another rate, from the measured state, within the joints' limits."""
    from strands_cosmos3.control.trajectory import JointState, plan_motion

    assert observation.qd_rad_s is not None  # Observation fills it
    speed = np.clip(observation.qd_rad_s, -limits.velocity, limits.velocity)  # measured, so it may lie a little beyond
    start = JointState(observation.q_rad, speed, np.zeros_like(observation.q_rad))
    try:
        motion = plan_motion(start, plan.q_rad, plan.t_s, limits, 1.0 / hz)
    except ControlError:  # the rows cannot be met from that speed; from rest they always can
        motion = plan_motion(JointState.at_rest(observation.q_rad), plan.q_rad, plan.t_s, limits, 1.0 / hz)
    n = int(np.ceil(motion.spline.end_s * hz - 1e-9))
    at_s = np.arange(1, n + 1) / hz
    q, _, _ = motion.spline.sample(at_s)
    row = np.clip(np.searchsorted(motion.spline.t_s[1:], at_s - 1e-9), 0, len(motion.nominal_s) - 2)
    gripper = None if plan.gripper is None else plan.gripper[-(len(motion.nominal_s) - 1) :][row]
    return JointTrajectory(q, at_s, gripper, t_capture_s=plan.t_capture_s)


def create_policy(provider: str = "cosmos3", **config: Any) -> Policy:
    """A policy by name, as strands-robots makes them: ``create_policy("cosmos3", embodiment="droid", backend="scripted")``.

    Without a backend it is ``service`` on localhost:8000, as strands-robots' own ``cosmos3``; ``"cosmos3://host:port"`` says
    where that server is.

    Raises:
        ConfigError: Another provider (this package makes Cosmos 3 policies only), or an option that there is not.
    """
    name, _, address = provider.partition("://")
    if name != "cosmos3" or ("://" in provider and not address):
        raise ConfigError(f"unknown policy provider {provider!r}; this package provides 'cosmos3' and 'cosmos3://host:port'.")
    if address:
        if twice := [key for key in ("host", "port", "client") if config.get(key) is not None]:
            raise ConfigError(f"{provider!r} says where the server is; leave {', '.join(twice)} out.")
        config["host"] = f"ws://{address}"
    options = list(inspect.signature(Cosmos3Policy).parameters)
    if unknown := [name for name in config if name not in options]:
        raise ConfigError(f"unknown policy option {', '.join(map(repr, unknown))}; valid: {', '.join(options)}.")
    if config.get("backend") is None:
        config["backend"] = "service"
    return Cosmos3Policy(**config)
