"""Cosmos 3 behind the policy contract: from an observation to a plan, and to steps."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.checks import F64, instance_of, of_grippers, seed_number, typed
from strands_cosmos3.collision import Obstacle
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import Embodiment, get_embodiment
from strands_cosmos3.engine.options import DecodeVideo, Dtype
from strands_cosmos3.errors import ConfigError, Cosmos3Error, InputError, SensorError
from strands_cosmos3.input_monitor import InputMonitor
from strands_cosmos3.observe.mapping import (
    RobotMapping,
    only_picture,
    rename_columns,
    require_state_keys,
    resolve_mapping,
)
from strands_cosmos3.options import MODEL_BACKENDS, SAMPLER_BACKENDS, TORCH_BACKENDS
from strands_cosmos3.policy import preflight
from strands_cosmos3.policy.arm import PolicyArm, resample_rows, steps_of_rows
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.policy.policy import Policy, Step
from strands_cosmos3.policy.rollout_files import RolloutFiles
from strands_cosmos3.snapshots import Restorable
from strands_cosmos3.types import ActionChunk, JointTrajectory, Mode, Observation, Request

# how long a call under way is waited for, and how often it is told to end
_CLOSE_S, _NUDGE_S = 10.0, 0.05
_SAME_PLACE_RAD = 1e-3


class Cosmos3Policy(Restorable, Policy):
    """Cosmos 3 as a robot policy.

    Args:
        embodiment: Name of the embodiment, e.g. ``"droid"``.
        robot: ``"panda"`` or another robot turns chunks into joint targets for it; None passes raw
            columns through.
        backend: A name, or a :class:`~strands_cosmos3.backends.base.Backend` of your own. See
            :class:`~strands_cosmos3.policy.options.PolicyOptions`.
        model: A checkpoint's folder or hub repository; for ``replay``, a path or ``Recording``.
        mode: ``"policy"``; with ``native`` and ``distributed`` also ``"forward_dynamics"`` (predict
            the video: give ``raw_actions=``; the video is in ``last_rollout["video"]``) and
            ``"inverse_dynamics"`` (give ``video=``).
        observation_mapping: Canonical or view name -> key of the observation, added to the robot's
            own. Map no camera or all of the rig. strands-robots' direction, camera ->
            ``observation/<view>``, is understood too.
        action_mapping: Canonical name -> key of the action, likewise; without a robot, column ->
            key.
        prompt: Used where a call gives an empty instruction.
        seed: Noise seed; it grows by one with each call of an episode.
        actions_per_step: Most steps that a call returns; None returns the checkpoint's
            ``replan_rows``, or the whole chunk. Our Robot executes that many rows before it
            requests the next chunk.
        decode_video: Whether ``last_rollout["video"]`` holds the predicted video, [F, H, W, 3]
            uint8; ``"preview"`` is cheaper.
        action_space, host, port, api_key, client, num_steps, guidance_scale, guidance_interval,
            device, dtype: The options of these names; None is the preset of embodiment and
            checkpoint.
        options: All options (:class:`~strands_cosmos3.policy.options.PolicyOptions`), or some of
            them by name, as ``{"policy_frames": 1}``.
        transport: ``"raw"`` (WebSocket and msgpack), the only one.

    Attributes:
        options: All options, those that were given as arguments included.
        last_rollout: After a call: raw ``action`` [T, D], ``video`` (H, W multiples of 16),
            ``sound`` (a :class:`~strands_cosmos3.films.Sound`, with the option ``sound``; both are
            paths with ``rollout_folder``), ``seed``, ``timing``, ``action_space``; if known
            ``quantiles``, the chunk's scores by name (``novelty``), ``borrowed_domain``,
            ``collision`` and ``off_pose_mm``.
        last_chunk: The last call's chunk, or None.

    Raises:
        ConfigError: Options that contradict each other, are given twice or are not available, or a
            mapping that names nothing.
        ObservationError: ``cameras`` lacks one that is needed.
        UnknownNameError: An unknown embodiment, mode or backend; the message lists the valid ones.
    """

    STATE = (
        "_calls",
        "_first_seed",
        "_first_call_s",
        "_timeline_s",
        "_path_rad",
        "rtc_observed_delay_steps",
        "last_rollout",
        "last_chunk",
    )
    default_backend: ClassVar[str] = "native"
    """Backend when no option names one: ``native``, in whose place ``onnx`` runs the bundled
    checkpoint where it can, or ``service`` for policies that a host makes by name.
    """

    @typed("backend", "decode_video", "dtype")
    def __init__(
        self,
        embodiment: str | Embodiment = "droid",
        robot: str | None = None,
        backend: str | Backend | None = None,
        model: Any = None,
        mode: str = "policy",
        action_space: str | None = None,
        host: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        client: Any = None,
        observation_mapping: Mapping[str, str] | None = None,
        action_mapping: Mapping[str, str] | None = None,
        prompt: str = "",
        num_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        seed: int | None = None,
        device: str | None = None,
        dtype: Dtype | None = None,
        decode_video: DecodeVideo = False,
        actions_per_step: int | None = None,
        options: PolicyOptions | Mapping[str, Any] = PolicyOptions(),
        transport: str = "raw",
    ):
        if transport != "raw":
            raise ConfigError(
                f"transport {transport!r} does not exist; valid: 'raw' (WebSocket and msgpack)."
            )
        self.options = options = PolicyOptions.of(options).with_arguments(
            {
                "action_space": action_space,
                "host": host,
                "port": port,
                "api_key": api_key,
                "client": client,
                "num_steps": num_steps,
                "guidance_scale": guidance_scale,
                "guidance_interval": guidance_interval,
                "device": device,
                "dtype": dtype,
                "decode_video": decode_video,
                "actions_per_step": actions_per_step,
            }
        )
        backend = options.once("backend", backend)
        model = options.once("model", model)
        arm = options.arm
        self.embodiment = get_embodiment(embodiment)
        self.robot = robot
        self.mode = Mode.parse(mode)
        self.action_space = self.embodiment.action_space(options.action_space)
        self.actions_per_step = options.replan_rows
        self.prompt = prompt
        self.decode_frames = options.decode_frames
        self.last_rollout: dict[str, Any] = {}
        self.last_chunk: ActionChunk | None = None
        folder = options.rollout_folder
        self._files = None if folder is None else RolloutFiles(folder)
        self.robot_state_keys: list[str] = []
        self._action_mapping = action_mapping
        self._mapped = (
            observation_mapping,
            action_mapping,
            self.embodiment.rig,
            arm.observed_gripper,
            arm.commanded_gripper,
        )
        self._mapping = resolve_mapping(robot, None, *self._mapped)
        self._first_seed = 0 if seed is None else seed_number(seed)
        # get_actions runs in worker threads; solver, clock and counters are shared
        self._planning = threading.RLock()
        self._closed = False
        preflight.require_arm(robot, arm)
        self.borrowed_domain = preflight.borrowed(
            robot, self.embodiment.name, backend, options.borrow_domain
        )
        self._arm = None if robot is None else PolicyArm(robot, arm)
        if backend is None:
            default = self.default_backend
            if default == "native":
                default = options.bundled_backend
            backend = options.backend_with(model, default)
        if backend in SAMPLER_BACKENDS and model is None:
            model = embedded_checkpoint(self.embodiment.name, robot)
        of_model = backend in TORCH_BACKENDS
        for_backend = replace(options, sound=options.sound and of_model).for_backend
        if backend in MODEL_BACKENDS and (
            self.decode_frames or self.mode is Mode.FORWARD_DYNAMICS
        ):  # forward dynamics answers with its video only
            engine = for_backend.engine
            engine = replace(engine, decode_video=engine.decode_video or True)
            for_backend = replace(for_backend, engine=engine)
        self.backend = make_backend(backend, model, for_backend, options.action_space)
        with ExitStack() as unmade:
            unmade.callback(self.backend.close)
            self._configure_from_backend()
            unmade.pop_all()
        self._start_over()

    def _configure_from_backend(self) -> None:
        """Take over what the backend declares."""
        info = self.info
        if self.mode not in info.modes:
            raise ConfigError(
                f"backend {info.name!r} does not know mode {str(self.mode)!r}, only "
                f"{', '.join(info.modes)}; use backend='native'."
            )
        if self.options.sound and not info.sound:
            raise ConfigError(
                f"backend {info.name!r} predicts no sound; leave sound out, or use a checkpoint "
                "that has ears, in this process or behind a server of this package."
            )
        if (
            self.options.action_space is None
            and (declared := info.action_space_for(self.embodiment)) is not None
        ):
            self.action_space = self.embodiment.action_space(declared)
        self.requires_images = info.requires_images
        self.instruction_free_actions = info.instruction_free_actions
        self.reads_instruction = self.instruction_free_actions is None
        rename_columns(
            tuple(self._mapping.observed) if self.robot else self.action_space.columns,
            self._action_mapping,
        )
        if self.requires_images:
            preflight.require_every_camera(self._mapping, self.options.arm.cameras)
        preflight.require_recorded(self.backend, self.robot)

    def _start_over(self, calls: int = 0) -> None:
        self._calls = calls
        self._first_call_s: float | None = None
        # motion time before the first of the last call's steps, and at the end of each
        self._timeline_s: F64 = np.zeros(1)
        # the joint angles then; None where its rows are none
        self._path_rad: F64 | None = None
        self.rtc_observed_delay_steps = None
        self.last_rollout = {}
        self.last_chunk = None
        self._inputs = InputMonitor()
        if self._arm is not None:
            self._arm.reset()

    @property
    def provider_name(self) -> str:
        """``"cosmos3"``."""
        return "cosmos3"

    @property
    def model_sha256(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Digest of the checkpoint behind the policy, or None; read when it is first asked for."""
        return self.backend.model_sha256

    @property
    def info(self) -> BackendInfo:
        """The backend's properties."""
        return self.backend.info

    @property
    def mapping(self) -> RobotMapping:
        """The robot's keys for the canonical names."""
        return self._mapping

    @property
    def execution_horizon(self) -> int:
        """Steps to execute before the next call: ``actions_per_step``, the checkpoint's own, or the
        whole chunk.

        Until the first call that is what a chunk takes at the control frequency; after it, what the
        last call answered.
        """
        if self.actions_per_step is not None:
            return self.actions_per_step
        if len(self._timeline_s) > 1:
            return len(self._timeline_s) - 1
        whole = self._steps_of(self._rows_asked, self.action_space.row_lead)
        return whole if self.replan_rows is None else min(whole, self._steps_of(self.replan_rows))

    @property
    def replan_rows(self) -> int | None:
        """Rows to execute before the next inference: ``actions_per_step``, else the checkpoint's
        own; None is all of them.
        """
        return self.info.replan_rows if self.actions_per_step is None else self.actions_per_step

    @property
    def _reads_state(self) -> bool:
        """Whether joint angles are needed: by an arm, and by a domain whose checkpoints may
        answer them.
        """
        return self._arm is not None or "joint_pos" in self.embodiment.spaces

    @property
    def _rows_asked(self) -> int:
        return (
            self.options.chunk_rows
            or self.info.chunk_rows
            or self.embodiment.chunk_rows(self.action_space.name)
        )

    def _steps_of(self, rows: int, lead: int = 1) -> int:
        # raw deltas are a step each
        by_time = self._arm is not None or self.action_space.meaning == "joint_position"
        return steps_of_rows(
            rows, self.embodiment.fps if by_time else None, self.control_frequency, lead
        )

    @classmethod
    def preflight(cls, observation_keys: Set[str], **policy_config: Any) -> None:
        """Refuse what cannot be run on such observations, before a checkpoint is loaded or a server
        dialled.

        Raises:
            ObservationError: A joint, the gripper or a camera is missing; the message says which
                and what there is.
            ConfigError, UnknownNameError: An option cannot be had, or no action would reach the
                robot.
        """
        preflight.require_arguments(policy_config, inspect.signature(cls).parameters)
        preflight.check_inputs(observation_keys, **policy_config)

    def set_robot_state_keys(self, robot_state_keys: Sequence[str]) -> None:
        """Name the robot's state entries: seven joints and the gripper, in order. A built-in
        robot mapping keeps its own.
        """
        require_state_keys(robot_state_keys)
        if self._reads_state:
            self._mapping = resolve_mapping(
                self.robot, robot_state_keys, *self._mapped
            ).with_units_of(self._mapping)
        self.robot_state_keys = list(robot_state_keys)

    @typed()
    def set_obstacles(self, obstacles: Sequence[Obstacle]) -> None:
        """Name what planned rows must not meet, where the policy was given no obstacles and its
        arm's model is not compiled.
        """
        if self._arm is not None:
            self._arm.surround(obstacles)

    def set_sim_context(self, model: Any, namespace: str) -> None:
        """Bind the simulator's arms: take their grippers' units and their servos' lag. They must be
        the policy's robot.

        strands-robots' MuJoCo engine calls this and drops errors, so the next call raises them
        again.

        Args:
            model: The compiled ``mujoco.MjModel``.
            namespace: Prefix of the robot's names in it.

        Raises:
            ConfigError: With ``robot=``: the model's arms or grippers are not the robot's, or not
                those that are commanded.
        """
        if self._arm is None:
            return
        units = self._arm.bind_model(model, namespace, self._mapping)
        if self.options.arm.commanded_gripper is None:
            self._mapping = self._mapping.commanding(units)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode: the next call draws with ``seed`` (or the constructor's), and the
        observed delay is unknown until it is set again.
        """
        with self._planning:
            if seed is not None:
                self._first_seed = seed_number(seed, "reset: seed")
            self._start_over()
            self.backend.reset(seed)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what policy, arm and backend remember of the episode."""
        with self._planning:
            parts = {"arm": self._arm and self._arm.snapshot(), "backend": self.backend.snapshot()}
            parts["inputs"] = self._inputs.snapshot()
            return super().snapshot() | parts

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot."""
        with self._planning:
            super().restore(state)
            if self._arm is not None:
                self._arm.restore(state["arm"])
            self.backend.restore(state["backend"])
            self._inputs.restore(state["inputs"])

    def close(self) -> None:
        """Free the backend: its sockets, threads and memory. A closed policy raises an error when
        asked.

        A call under way in another thread is cancelled first, if the backend can do so; it would
        connect again otherwise.
        """
        self._closed = True
        until_s = time.monotonic() + _CLOSE_S
        while time.monotonic() < until_s:
            if self._planning.acquire(timeout=_NUDGE_S):
                self._planning.release()
                break
            if not self.backend.cancel():
                break
        self.backend.close()

    async def get_actions(
        self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any
    ) -> list[Step]:
        """As :meth:`get_actions_sync`, in a worker thread, so that the caller's event loop goes
        on.
        """
        return await asyncio.to_thread(
            self.get_actions_sync, observation_dict, instruction, **kwargs
        )

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

        With a robot: joint angles [rad] and the gripper in the robot's unit, at the control
        frequency once one was set, else at the chunk's rate. Without: the model's raw columns, one
        dictionary a row; joint angles come at the control frequency, deltas at the chunk's rate. In
        forward dynamics: nothing; the video is in ``last_rollout["video"]``.

        Steps that will have passed by then (:meth:`set_rtc_observed_delay`) are left out: at most
        those that the last answer still had to play where the observation saw the arm, so that the
        answer of an arm at rest begins where it stands. The motion continues from the end of the
        previous steps, so execute :attr:`execution_horizon` of them before the next call, or reset.

        Args:
            observation_dict: Joint angles, gripper and views by the robot's own names.
            raw_actions: [rows, D] known actions in the model's scale, for forward dynamics; too few
                are filled up by the last.
            video: For inverse dynamics, [F, H, W, 3] uint8 frames of ``observe.views.compose``, one
                for each row, or the path of a film with as many frames a second as rows, or a whole
                multiple.

        Raises:
            ObservationError: A state key or camera is missing; the message lists what there is.
            BackendError: Inference failed.
            SensorError: A view or the state is implausible, with ``on_event="error"``; with
                ``"hold"`` only without a robot, since the steps then hold the arm.
        """
        with self._planning:
            observation = self._observation(
                observation_dict, lambda q_rad: float(self._timeline_s[-1 - self._pending(q_rad)])
            )
            pending = self._pending(observation.q_rad)
            try:
                plan = self.plan(observation, instruction, raw_actions=raw_actions, video=video)
            except SensorError as error:
                if error.final or self._arm is None:
                    raise
                plan, pending = self._rest(observation), 0
            if self.mode is Mode.FORWARD_DYNAMICS:
                return []
            return self._next_steps(plan, observation, pending)

    @typed("observations")
    def get_actions_batch(
        self, observations: Sequence[Mapping[str, Any]], instructions: str | Sequence[str]
    ) -> list[list[Step]]:
        """The next steps for each of several flat observations, by one inference: of several
        robots, or candidates for one.

        Item i is what ``get_actions_sync`` answers at the beginning of an episode, with the seed of
        the i-th call from now on: the same observation given K times yields K candidates, which
        share its encoding. The policy's own episode ends; ``last_rollout`` is that of the last
        item.

        Args:
            observations: As of ``get_actions_sync``.
            instructions: One for each observation, or one for all.

        Raises:
            ConfigError: The mode is not ``policy``.
            InputError: Not as many instructions as observations, or an argument is malformed.
            ObservationError, BackendError: As of ``get_actions_sync``.
        """
        instance_of(observations, Sequence, "observations")
        if self.mode is not Mode.POLICY:
            raise ConfigError(f"a batch is answered in mode 'policy', not in {str(self.mode)!r}.")
        texts = (
            [instructions] * len(observations) if isinstance(instructions, str) else instructions
        )
        if len(texts) != len(observations):
            raise InputError(
                f"{len(texts)} instructions for {len(observations)} observations; give one for "
                "each, or one text."
            )
        with self._planning:
            self._require_open()
            first = self._calls
            seen: dict[int, tuple[Observation, Request]] = {}
            asked: list[tuple[Observation, Request]] = []
            for i, (given, text) in enumerate(zip(observations, texts, strict=True)):
                self._start_over(first + i)
                if id(given) not in seen:
                    observation = self._observation(given, 0.0)
                    seen[id(given)] = observation, self._request(observation, text)
                    self._look(*seen[id(given)])
                # those of the same observation share its picture
                observation, request = seen[id(given)]
                request = replace(request, instruction=text or self.prompt, seed=self._seed)
                asked.append((observation, request))
            started = time.perf_counter()
            chunks = self.backend.infer_batch([request for _, request in asked]) if asked else []
            infer_ms = (time.perf_counter() - started) * 1e3
            answers: list[list[Step]] = []
            for i, (chunk, (observation, request)) in enumerate(zip(chunks, asked, strict=True)):
                self._start_over(first + i)
                plan = self._solved(request, chunk, observation, infer_ms)
                answers.append(self._next_steps(plan, observation, 0))
            return answers

    def _pending(self, q_rad: F64) -> int:
        """How many of the last answer's steps were still to be played with the arm at joint angles
        [n]: no more than the host says, and fewer where the arm is further on, as one that waits at
        their end.
        """
        most = min(self.rtc_observed_delay_steps or 0, len(self._timeline_s) - 1)
        if self._path_rad is None:
            return most
        ahead = self._path_rad[::-1][: most + 1]
        off_rad = np.linalg.norm(ahead - q_rad, axis=1)
        # of equal places the last: an arm that only held has nothing to leave out
        return int(np.argmax(off_rad <= off_rad.min() + _SAME_PLACE_RAD))

    def _next_steps(
        self, plan: JointTrajectory | ActionChunk, observation: Observation, over: int
    ) -> list[Step]:
        """The plan's steps that a call returns, without the ``over`` first ones; they become the
        timeline of the next call.
        """
        steps, motion_s = self._steps(plan, observation)
        start_s = (
            observation.t_capture_s if observation.t_motion_s is None else observation.t_motion_s
        )
        over = min(over, len(steps) - 1)  # always leave a step
        most = self.actions_per_step or (
            None if self.replan_rows is None else self._steps_of(self.replan_rows)
        )
        kept = steps[over:][:most]
        motion_s = np.append(0.0, motion_s)[over : over + len(kept) + 1]
        self._timeline_s = start_s + motion_s
        self._path_rad = _joint_path(plan, observation, motion_s)
        return kept

    def _steps(
        self, plan: JointTrajectory | ActionChunk, observation: Observation
    ) -> tuple[list[Step], F64]:
        """Return a plan as action dictionaries, and the motion time at the end of each [K]."""
        hz = self.control_frequency
        if isinstance(plan, ActionChunk):
            rows, due_s = (plan.action, plan.row_times_s) if hz is None else resample_rows(plan, hz)
            names = rename_columns(plan.action_space.columns, self._action_mapping)
            return [dict(zip(names, map(float, row), strict=True)) for row in rows], due_s
        assert self._arm is not None  # it solved the plan
        steps, motion_s = self._arm.steps(plan, observation, hz)
        gripper = [None] * len(steps.q_rad) if steps.gripper is None else steps.gripper.tolist()
        return [
            dict(self._mapping.write(q, g)) for q, g in zip(steps.q_rad, gripper, strict=True)
        ], motion_s

    @property
    def prefix_rows(self) -> int:
        """Longest ``action_prefix`` that :meth:`plan` takes, fewer rows than a chunk's; 0 if the
        checkpoint declares no ``prefix_rows``.
        """
        if self.mode is not Mode.POLICY:
            return 0
        # the answer must add a row
        longest = self._rows_asked - 1
        declared = self.info.prefix_rows
        return longest if declared is None else min(longest, declared)

    @property
    def counters(self) -> Mapping[str, int]:
        """The backend's events so far by name."""
        return self.backend.counters

    def cancel(self) -> None:
        """Break off an inference under way in another thread, where the backend can; that call
        raises.
        """
        self.backend.cancel()

    @typed("observation")
    def plan(
        self,
        observation: Observation | Mapping[str, Any],
        instruction: str,
        *,
        raw_actions: Any = None,
        video: Any = None,
        action_prefix: Any = None,
        caption: str | None = None,
    ) -> JointTrajectory | ActionChunk:
        """The next chunk as a joint trajectory for the robot, or raw where the policy has none.

        It departs from the observation's anchor (else from the measured pose) at the chunk's own
        row times; the backend is told the measured state. In forward dynamics the chunk is what was
        given. A flat observation's motion time is the wall-clock time since the episode's first
        call.

        Args:
            instruction, raw_actions, video: As :meth:`get_actions_sync`'s.
            action_prefix: [rows, D] rows that the arm executes during this inference, counted from
                the observation, in the model's scale (rows of the last ``last_rollout["action"]``),
                at most :attr:`prefix_rows`. The chunk begins with them and continues.
            caption: The exact caption for the model, instead of its own around the instruction.

        Raises:
            ConfigError: The backend takes no action prefix.
            InputError: It takes none that long.
            SensorError: A view or the state is implausible, with ``on_event`` hold or error.
        """
        if action_prefix is not None and self.prefix_rows == 0:
            raise ConfigError(
                f"backend {self.info.name!r} in mode {str(self.mode)!r} takes no action_prefix: "
                "only checkpoints that declare prefix_rows were trained with one."
            )
        with self._planning:
            self._require_open()
            observation = self._observation(observation)
            request = self._request(
                observation, instruction, raw_actions, video, action_prefix, caption or ""
            )
            self._look(observation, request)
            started = time.perf_counter()
            chunk = self.backend.infer(request)
            infer_ms = (time.perf_counter() - started) * 1e3
            return self._solved(request, chunk, observation, infer_ms)

    def _look(self, observation: Observation, request: Request) -> None:
        if self.mode is Mode.POLICY:  # others are asked of recordings
            views = observation.images if self.requires_images else None
            self.backend.watch.look(request, self._inputs, self.options.on_event, views)

    def _rest(self, observation: Observation) -> JointTrajectory:
        """The plan of an arm that holds for as long as a chunk takes."""
        rows = self._rows_asked
        t_s = np.arange(1, rows + 1) / (self.embodiment.fps or 1.0)
        grippers = of_grippers(np.tile(np.atleast_1d(observation.gripper), (rows, 1)))
        return JointTrajectory(np.tile(observation.q_rad, (rows, 1)), t_s, grippers)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this policy is closed; make another.")
        if self._arm is not None:
            self._arm.require_known()

    def _solved(
        self, request: Request, chunk: Any, observation: Observation, infer_ms: float
    ) -> JointTrajectory | ActionChunk:
        if not isinstance(chunk, ActionChunk):
            raise ConfigError(
                f"backend {self.info.name!r} must return an ActionChunk, "
                f"got {type(chunk).__name__}."
            )
        started = time.perf_counter()
        self._calls += 1
        arm = None if self.mode is Mode.FORWARD_DYNAMICS else self._arm
        error = self.backend.answer_error
        try:
            plan = chunk if arm is None else arm.solve(chunk, observation, error)
        except Cosmos3Error:
            self.backend.watch.see(request, chunk, self._inputs)
            raise
        self.backend.watch.see(request, chunk, self._inputs, plan)
        if isinstance(plan, JointTrajectory):
            self._inputs.follow(plan.q_rad, plan.t_s)
        elif chunk.action_space.meaning == "joint_position":
            self._inputs.follow(chunk.action, chunk.row_times_s)
        self.last_chunk = chunk
        video, sound = (
            (chunk.video, chunk.sound) if self._files is None else self._files.write(chunk)
        )
        timing = {"infer_ms": infer_ms, "solve_ms": (time.perf_counter() - started) * 1e3}
        self.last_rollout = {
            **chunk.scores,
            "action": chunk.action,
            "video": video,
            "sound": sound,
            "seed": chunk.seed,
            "timing": {**timing, **chunk.timing},
            "action_space": chunk.action_space.name,
            **({} if chunk.quantiles is None else {"quantiles": chunk.quantiles}),
            **({"borrowed_domain": self.borrowed_domain} if self.borrowed_domain else {}),
            **({} if isinstance(plan, ActionChunk) else PolicyArm.account(plan)),
        }
        return plan

    def _observation(
        self,
        given: Observation | Mapping[str, Any],
        t_motion_s: float | Callable[[F64], float] | None = None,
    ) -> Observation:
        if isinstance(given, Observation):
            return given
        now_s = time.monotonic()
        first_s = now_s if self._first_call_s is None else self._first_call_s
        elapsed_s = now_s - first_s if t_motion_s is None else t_motion_s
        observation = self._mapping.read(
            given, now_s, self.requires_images, elapsed_s, state=self._reads_state
        )
        self._first_call_s = first_s
        return observation

    def _request(
        self,
        observation: Observation,
        instruction: str,
        raw_actions: Any = None,
        video: Any = None,
        action_prefix: Any = None,
        caption: str = "",
    ) -> Request:
        gripper = observation.gripper
        if self._arm is not None:
            gripper = self._arm.in_column_order(gripper, self.embodiment)
        return Request(
            embodiment=self.embodiment,
            action_space=self.action_space,
            instruction=instruction or self.prompt,
            n_rows=self._rows_asked,
            q_rad=observation.q_rad,
            gripper=gripper,
            limb_poses=self._limb_poses(observation.q_rad),
            limb_anchors=self._limb_poses(observation.q_anchor_rad),
            prompt=caption,
            composite=self._composite(observation),
            seed=self._seed,
            t_motion_s=observation.t_capture_s
            if observation.t_motion_s is None
            else observation.t_motion_s,
            privileged=observation.privileged if self.info.needs_privileged else None,
            images=observation.images if self.info.takes_views else {},
            mode=self.mode,
            conditioning_actions=raw_actions,
            clip=video,
            action_prefix=action_prefix,
            decode_frames=self.decode_frames,
            sound=self.options.sound,
            wait_s=observation.wait_s,
        )

    @property
    def _seed(self) -> int:
        return (self._first_seed + self._calls) % 2**32

    def _limb_poses(self, q_rad: F64 | None) -> dict[str, F64]:
        """Return the poses of the limbs' Cosmos frames at joint angles [n]; none without both."""
        if self._arm is None or q_rad is None:
            return {}
        return self._arm.T_base_cosmos(q_rad, self.embodiment)

    def _composite(self, observation: Observation) -> NDArray[np.uint8] | None:
        if not self.requires_images:
            return None
        if self.embodiment.rig is None:
            return only_picture(observation.images, self.embodiment.name)
        return (
            None
            if self.info.takes_views
            else self.backend.compose(observation.images, self.embodiment.rig)
        )


def _joint_path(
    plan: JointTrajectory | ActionChunk, observation: Observation, motion_s: F64
) -> F64 | None:
    """The joint angles [K, n] that a plan has at its own times [K]; None if its rows are none."""
    if isinstance(plan, JointTrajectory):
        t_s, q_rad = plan.t_s, plan.q_rad
    elif plan.action_space.meaning == "joint_position":
        t_s, q_rad = plan.row_times_s, plan.action[:, :-1]
    else:
        return None
    t_s, q_rad = np.append(0.0, t_s), np.vstack((observation.q_rad, q_rad))
    path: list[F64] = [np.interp(motion_s, t_s, angles_rad) for angles_rad in q_rad.T]
    return np.column_stack(path)
