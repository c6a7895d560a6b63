"""Validated value types: what flows through the package.

::

    Observation -> Request -> ActionChunk -> PoseTrajectory -> JointTrajectory -> Rollout

Frames are named ``T_parent_child``; ``base`` is the robot's base, ``cosmos`` the frame whose deltas
the model speaks, ``ee`` the body that inverse kinematics drives. A gripper is an open fraction: 1
is open, 0 is closed. Arrays are read-only float64 copies of what was given, images read-only uint8.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import (
    F64,
    constant_array,
    finite_array,
    image_array,
    increasing_times,
    instance_of,
    known_name,
    mask_array,
    open_fractions,
    rigid,
    seed_number,
    whole_number,
    within,
)
from strands_cosmos3.collision import CollisionReport
from strands_cosmos3.embodiments import ActionSpace, Embodiment
from strands_cosmos3.episode_summary import ErrorSummary as ErrorSummary
from strands_cosmos3.episode_summary import Outcome as Outcome
from strands_cosmos3.episode_summary import html_of, text_of
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ActionSpaceError,
    InputError,
    ShapeError,
)
from strands_cosmos3.films import Sound

WILD_Z = 10.0  # a normalised action beyond this magnitude is a fault and not motion
OFF_POSE_M = 1e-3  # a row that misses its pose by more is reported
OFF_POSE_BOUND_M = 0.01  # and one that misses it by more than that is not executed, by default

_T = TypeVar("_T")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FILLED: Any = None  # of a field that is filled, where it is left out, as the instance is made


class Mode(StrEnum):
    """Question to the model."""

    POLICY = "policy"
    FORWARD_DYNAMICS = "forward_dynamics"
    INVERSE_DYNAMICS = "inverse_dynamics"

    @classmethod
    def parse(cls, name: str) -> Mode:
        """Return the mode of that name.

        Raises:
            UnknownNameError: No such mode.
        """
        return cls(known_name(name, "mode", tuple(cls)))


def _no_entries() -> Any:
    """Declare a field that is an empty mapping, which nobody can change, by default."""
    return field(default_factory=lambda: _NOTHING)


def _set(instance: object, **values: object) -> None:
    """Assign on a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _fraction(value: Any) -> float | F64:
    """The open fraction of one gripper, or those [G] of any other number of them; rounding
    beyond [0, 1] is clipped.
    """
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        number = float(finite_array(value, "gripper", ()))
        if not -1e-6 <= number <= 1 + 1e-6:
            raise InputError(f"gripper is an open fraction in [0, 1] (1 = open), got {number:g}.")
        return min(max(number, 0.0), 1.0)
    several = cast("NDArray[Any]", value)
    near = several.dtype.kind == "f" and bool((np.abs(several - 0.5) <= 0.5 + 1e-6).all())
    return open_fractions(np.clip(several, 0.0, 1.0) if near else several)


def _only(by_limb: Mapping[str, _T]) -> _T | None:
    """The value of the only limb; None of none or of several."""
    return next(iter(by_limb.values())) if len(by_limb) == 1 else None


def _pictures(value: Any) -> Mapping[str, NDArray[np.uint8]]:
    """Read-only pictures by name."""
    images = cast("Mapping[str, Any]", instance_of(value, Mapping, "images"))
    return MappingProxyType(
        {name: _image(image, f"image {name!r}") for name, image in images.items()}
    )


def _image(
    value: Any, name: str, shape: tuple[int | None, ...] = (None, None, 3)
) -> NDArray[np.uint8]:
    """A read-only picture: the array itself if nobody can write to its pixels, else a copy."""
    image = image_array(value, name, shape)
    if not _is_constant(image):
        image = image.copy()
        image.setflags(write=False)
    return image


def _is_constant(image: NDArray[np.uint8]) -> bool:
    """Whether the pixels are those of a read-only array, or lie in a ``bytes`` object, as those of
    a decoded message do.
    """
    base: Any = image
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return base is None or isinstance(base, bytes)


@dataclass(frozen=True, eq=False)
class Observation:
    """What the robot senses at one moment.

    Args:
        q_rad: [n] joint angles.
        gripper: Open fraction; of a robot with another number of grippers than one, [G] in the
            order of its limbs.
        images: View name -> [H, W, 3] uint8.
        qd_rad_s: [n] joint velocities; zeros when not given.
        t_capture_s: When it was taken, on the caller's monotonic (or simulated) clock.
        t_motion_s: The same moment on the motion's own clock, which stops while execution falls
            behind the chunk's rate (time stretched, braking, holding); None is ``t_capture_s``.
        privileged: State that only a simulator knows (poses of objects, [4, 4] or vectors, by
            name). Only backends that declare ``needs_privileged`` receive it, and it never leaves
            the process.
        q_anchor_rad: [n] joint angles that the chunk departs from; None is ``q_rad``. A control
            loop fills it in.
        wait_s: Time for which a chunk is waited for. A control loop fills it in.

    Raises:
        ShapeError, NonFiniteError, InputError: A field is malformed.
    """

    q_rad: F64
    gripper: float | F64
    images: Mapping[str, NDArray[np.uint8]] = _no_entries()
    qd_rad_s: F64 | None = None
    t_capture_s: float = 0.0
    t_motion_s: float | None = None
    privileged: Mapping[str, F64] | None = None
    q_anchor_rad: F64 | None = None
    wait_s: float = math.inf

    def __post_init__(self) -> None:
        q = finite_array(self.q_rad, "q_rad", (None,))
        qd = (
            constant_array(len(q), 0.0)
            if self.qd_rad_s is None
            else finite_array(self.qd_rad_s, "qd_rad_s", q.shape)
        )
        gripper = _fraction(self.gripper)
        images = _pictures(self.images)
        _set(self, q_rad=q, qd_rad_s=qd, gripper=gripper, images=images)
        if self.q_anchor_rad is not None:
            _set(self, q_anchor_rad=finite_array(self.q_anchor_rad, "q_anchor_rad", q.shape))

    def anchored(self, q_anchor_rad: F64, wait_s: float = math.inf) -> Observation:
        """Return this observation with an anchor [n] and the time for which a chunk is waited for;
        the pictures are shared.
        """
        other = copy.copy(self)
        _set(other, wait_s=wait_s)
        _set(other, q_anchor_rad=finite_array(q_anchor_rad, "q_anchor_rad", self.q_rad.shape))
        return other


@dataclass(frozen=True, eq=False)
class Request:
    """One inference asked of a backend.

    Args:
        embodiment: The domain.
        action_space: Action space of the answer's rows.
        instruction: What the user said.
        n_rows: Rows of the answer.
        q_rad: [n] joint angles, or None if only a pose is known.
        gripper: Open fraction; of an embodiment with several grippers, [G] in the order of its
            limbs.
        mode: What is asked.
        prompt: The exact caption for the model, or empty to compose it from the instruction.
        composite: [H, W, 3] uint8 picture composed from the views, or None for a backend that needs
            no pictures.
        images: The separate views by name, for a backend that takes them.
        conditioning_actions: [rows, D] the known actions in the units of the answer's rows; for
            ``forward_dynamics`` only.
        action_prefix: [rows, D] rows that the arm executes during this inference, from the
            observation on, in the same units; fewer than ``n_rows``, for ``policy`` only. The
            answer begins with them. The backend checks their number.
        clip: [F, H, W, 3] uint8 recorded frames, one for each row, or the path of a video, which is
            read at the rows' rate; for ``inverse_dynamics`` only.
        decode_frames: Frames of the predicted video that are wanted, from the first on; None is all
            that the backend decodes.
        sound: Whether the predicted sound is wanted. Only backends whose ``info`` says so have one.
        limb_poses: By limb, [4, 4] measured pose of its Cosmos frame in its base; empty without an
            arm model.
        limb_anchors: By limb, [4, 4] pose of that frame from which the first row departs; empty is
            the measured one.
        seed: Noise seed.
        t_motion_s: The observation's time on the motion's own clock.
        privileged: As in :class:`Observation`; None unless the backend asks for it.
        wait_s: Time for which the answer is waited for.
    """

    embodiment: Embodiment
    action_space: ActionSpace
    instruction: str
    n_rows: int
    q_rad: F64 | None
    gripper: float | F64
    mode: Mode = Mode.POLICY
    prompt: str = ""
    composite: NDArray[np.uint8] | None = None
    seed: int = 0
    t_motion_s: float = 0.0
    privileged: Mapping[str, F64] | None = None
    images: Mapping[str, NDArray[np.uint8]] = _no_entries()
    conditioning_actions: F64 | None = None
    clip: NDArray[np.uint8] | str | Path | None = None
    action_prefix: F64 | None = None
    decode_frames: int | None = None
    sound: bool = False
    limb_poses: Mapping[str, F64] = _no_entries()
    limb_anchors: Mapping[str, F64] = _no_entries()
    wait_s: float = math.inf

    def __post_init__(self) -> None:
        whole_number(self.n_rows, "n_rows", 1)
        seed_number(self.seed)
        whole_number(self.decode_frames or 0, "decode_frames", 0)
        _set(
            self,
            q_rad=None if self.q_rad is None else finite_array(self.q_rad, "q_rad", (None,)),
            images=_pictures(self.images),
            gripper=_fraction(self.gripper),
            composite=None if self.composite is None else _image(self.composite, "composite"),
        )
        self._check_conditions()
        for name in ("limb_poses", "limb_anchors"):
            poses = cast("Mapping[str, F64]", instance_of(getattr(self, name), Mapping, name))
            checked = {limb: rigid(T, f"{name}[{limb!r}]") for limb, T in poses.items()}
            _set(self, **{name: checked})

    @property
    def grippers(self) -> F64:
        """[G] open fractions, of one gripper too."""
        return np.atleast_1d(self.gripper)

    @property
    def departures(self) -> dict[str, F64]:
        """By limb, [4, 4] pose of its Cosmos frame from which the first row departs."""
        return {**self.limb_poses, **self.limb_anchors}

    @property
    def T_base_cosmos(self) -> F64 | None:
        """[4, 4] measured pose of the Cosmos frame of the only limb; None without one."""
        return _only(self.limb_poses)

    def _check_conditions(self) -> None:
        """Known actions and an observed clip belong to one mode each, and are needed there."""
        for name, argument, value, mode in (
            (
                "conditioning_actions",
                "raw_actions",
                self.conditioning_actions,
                Mode.FORWARD_DYNAMICS,
            ),
            ("clip", "video", self.clip, Mode.INVERSE_DYNAMICS),
        ):
            if value is None and self.mode is mode:
                raise InputError(
                    f"mode {str(mode)!r} needs {name}, which a policy's "
                    f"methods take as {argument}=."
                )
            if value is not None and self.mode is not mode:
                raise InputError(
                    f"{name} belongs to mode {str(mode)!r}; this is mode {str(self.mode)!r}."
                )
        for name in ("conditioning_actions", "action_prefix"):
            if (rows := getattr(self, name)) is not None:
                _set(self, **{name: finite_array(rows, name, (None, self.action_space.width))})
        if self.clip is not None and not isinstance(self.clip, str | Path):
            _set(self, clip=_image(self.clip, "clip", (None, None, None, 3)))


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """A backend's answer: rows of one named action space, in the model's own scale (normalised,
    unless they are joint angles).

    Args:
        action: [T, D] rows.
        action_space: What the columns mean.
        embodiment: The domain.
        fps: Rows per second, at most 1000; None is the embodiment's own rate.
        seed: Noise seed.
        timing: Milliseconds by part.
        video: [F, H, W, 3] uint8, the predicted video, if it was decoded.
        sound: The sound of that video, if it was asked for.
        quantiles: 1 % and 99 % quantiles [D] with which the rows were normalised; None means the
            embodiment's packaged ones.
        T_base_departure: [4, 4] pose that a server integrated absolute poses from; None for poses
            that are goals themselves.
        scores: Figures by name that tell how far to trust it, e.g. ``novelty``; read-only.
            ``BackendInfo.scores`` says what they mean.

    Raises:
        ActionSpaceError: The width is not the action space's.
        ActionOutOfRangeError: A normalised value lies beyond +-10, where -1..1 are the quantiles.
        ShapeError, NonFiniteError: The rows are malformed.
    """

    action: F64
    action_space: ActionSpace
    embodiment: Embodiment
    fps: float | None = None
    seed: int = 0
    timing: Mapping[str, float] = _no_entries()
    video: NDArray[np.uint8] | None = None
    sound: Sound | None = None
    quantiles: tuple[F64, F64] | None = None
    T_base_departure: F64 | None = None
    scores: Mapping[str, float] = _no_entries()

    def __post_init__(self) -> None:
        action = finite_array(self.action, "action", (None, None))
        space = instance_of(self.action_space, ActionSpace, "action_space")
        embodiment = instance_of(self.embodiment, Embodiment, "embodiment")
        if space not in embodiment.spaces.values():
            have = ", ".join(embodiment.spaces)
            raise ActionSpaceError(
                f"action space {space.name!r} is not one of {embodiment.name!r}'s own: {have}."
            )
        if action.shape[1] != space.width:
            raise ActionSpaceError(
                f"action has {action.shape[1]} columns, but {space.name!r} of "
                f"{self.embodiment.name!r} has {space.width}: "
                f"{', '.join(space.columns)}.{_others_of_width(embodiment, action.shape[1])}"
            )
        if space.normalized:
            require_in_range(action, space.columns)
        fps = embodiment.fps if self.fps is None else self.fps
        if fps is None:
            raise InputError(
                f"embodiment {embodiment.name!r} has no frame rate of its own; pass fps > 0."
            )
        if self.quantiles is not None:
            q01, q99 = (
                finite_array(figure, "quantiles", (space.width,)) for figure in self.quantiles
            )
            _set(self, quantiles=(q01, q99))
        if self.T_base_departure is not None:
            _set(self, T_base_departure=rigid(self.T_base_departure, "T_base_departure"))
        given = cast("Mapping[str, float]", instance_of(self.scores, Mapping, "scores"))
        scores = {name: float(finite_array(given[name], f"score {name!r}", ())) for name in given}
        _set(self, action=action, fps=float(within(fps, "fps", 1e-6, 1e3, ())))
        _set(self, scores=MappingProxyType(scores))

    @property
    def row_times_s(self) -> F64:
        """[T] when each row is due, in seconds after the observation."""
        assert self.fps is not None  # __post_init__ resolved it
        return self.action_space.row_times_s(len(self.action), self.fps)


def require_in_range(z: F64, columns: tuple[str, ...]) -> None:
    """Raise an :class:`ActionOutOfRangeError` that names the first of the normalised [..., D]
    values beyond |z| = 10.
    """
    if (wild := np.argwhere(np.abs(z) > WILD_Z)).size:
        where = tuple(int(i) for i in wild[0])
        raise ActionOutOfRangeError(
            f"normalised action {list(where)} ({columns[where[-1]]}) is {z[where]:.4g}; beyond "
            f"|z| = {WILD_Z:g} it "
            "is a fault, not motion. Is it already de-normalised, or of another action space?"
        )


def _others_of_width(embodiment: Embodiment, width: int) -> str:
    names = [repr(name) for name, space in embodiment.spaces.items() if space.width == width]
    if not names:
        return ""
    return (
        f" {' and '.join(names)} are {width} wide: name the checkpoint's action space; the width "
        "does not."
    )


@dataclass(frozen=True, eq=False)
class PoseTrajectory:
    """Commanded poses of one named frame.

    Args:
        T_base_frame: [T, 4, 4] poses in the robot's base.
        t_s: [T] when each is to be reached, in seconds after the observation, strictly increasing.
        frame: Name of the frame, ``"cosmos"`` or a body.
        T_base_anchor: [4, 4] pose at the observation, from which the first row departs.
        gripper: [T] open fractions, or None.
    """

    T_base_frame: F64
    t_s: F64
    frame: str
    T_base_anchor: F64
    gripper: F64 | None = None

    def __post_init__(self) -> None:
        T = rigid(self.T_base_frame, "T_base_frame", 1)
        _set(
            self,
            T_base_frame=T,
            t_s=increasing_times(self.t_s, len(T)),
            T_base_anchor=rigid(self.T_base_anchor, "T_base_anchor"),
            gripper=None if self.gripper is None else open_fractions(self.gripper, len(T)),
        )
        if self.gripper is not None and self.gripper.ndim != 1:
            raise ShapeError(
                f"these poses have one gripper, [{len(T)}], got {list(self.gripper.shape)}."
            )


class ArmGeometry(Protocol):
    """What is known of an arm besides its joints: where its hands are, and what it would meet."""

    def limb_poses(self, q_rad: F64) -> Mapping[str, F64]:
        """By limb, the poses [M, 4, 4] of its driven frame in its base, at joint angles [M, n]."""
        ...

    def examine(self, q_rad: F64) -> CollisionReport:
        """Report the first of joint angles [M, n] that comes too close to something, there or on
        the way from those before; the first is the start.
        """
        ...


_OF_ROWS = {
    "residual_m": 0.0,
    "residual_rad": 0.0,
    "converged": True,
    "clamped": False,
    "held": False,
}


@dataclass(frozen=True, eq=False)
class JointTrajectory:
    """Joint angles for an arm, with an account of how well they serve the poses they came from.

    Args:
        q_rad: [T, n] joint angles.
        t_s: [T] when each is due, in seconds after the observation, strictly increasing, the first
            not negative.
        gripper: [T] open fractions, or None; of a robot with another number of grippers than one,
            [T, G] in its limbs' order.
        limb_poses: By limb, the commanded poses of its driven body in its base; empty where there
            were none.
        residual_m: [T] position the solution misses its pose by; zeros without poses.
        residual_rad: [T] rotation it misses by.
        converged: [T] whether the residual is within tolerance.
        clamped: [T] whether a joint or velocity limit held the solution back.
        t_capture_s: The observation's time stamp.
        collision: What the check of the rows against the arm itself and its static surroundings
            found.
        held: [T] whether the row holds the arm, because it or one before it would miss its pose by
            more than the arm may.
        arm: The arm's geometry, with which the motion through the rows is checked as well; None if
            it is not known.
    """

    q_rad: F64
    t_s: F64
    gripper: F64 | None = None
    limb_poses: Mapping[str, PoseTrajectory] = _no_entries()
    residual_m: F64 = _FILLED
    residual_rad: F64 = _FILLED
    converged: NDArray[np.bool_] = _FILLED
    clamped: NDArray[np.bool_] = _FILLED
    t_capture_s: float = 0.0
    collision: CollisionReport = field(default_factory=CollisionReport)
    held: NDArray[np.bool_] = _FILLED
    arm: ArmGeometry | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        q = finite_array(self.q_rad, "q_rad", (None, None))
        n = len(q)
        for name, default in _OF_ROWS.items():
            value = getattr(self, name)
            if value is None:
                value = constant_array(n, default)
            elif isinstance(default, bool):
                value = mask_array(value, name, n)
            else:
                value = finite_array(value, name, (n,))
            _set(self, **{name: value})
        gripper = None if self.gripper is None else open_fractions(self.gripper, n)
        _set(self, q_rad=q, t_s=increasing_times(self.t_s, n), gripper=gripper)

    @property
    def poses(self) -> PoseTrajectory | None:
        """The commanded poses of the only limb; None without any, and of several limbs."""
        return _only(self.limb_poses)


@dataclass(frozen=True, eq=False, repr=False)
class Rollout:
    """One episode: what was commanded, what was achieved, and how it ended.

    Args:
        seed: Seed of the scene and of the policy.
        task, instruction: Name of the task, or None; the instruction of the policy.
        outcome: How it ended; ``success`` follows from it.
        ik: IK residual against the commanded poses, over every executed row.
        path: Deviation of the commanded from the intended path, at every physics step.
        tracking: Achieved against commanded, at every physics step. These three are None in a world
            whose arm has a controller of its own.
        followed: Whether the policy achieved what its own instruction asks, where that is another
            goal than the one that is judged; None where it is not.
        drift: Achieved against a recording, where one was replayed.
        loop_drift: Achieved against the chunks' motions joined end to end: what the loop has lost
            since it began.
        between_hands: Relative pose of two hands against the commanded one, at every physics step;
            None for one hand.
        by_limb: Of several limbs, ``path``, ``tracking`` and ``loop_drift`` of each, by name.
        steps: Rows ``total, clamped, stretched, unconverged, off_pose`` (more than 1 mm off).
        latency_ms: Time from a request until its chunk was accepted, on the arm's clock; ``p50,
            p95, max``.
        counters: Events by name.
        duration_s: How long the arm was driven, in simulated seconds.
        realtime_factor: Simulated seconds for one second of wall time, over the whole loop.
        model_sha256: Digest of the checkpoint, where there is one.
        fault: What went wrong, where the outcome is a fault.
        latency_clock: The arm's clock: simulated, stopped for each answer (zero latency), or in
            wall-clock time.
        inference_ms: Wall-clock time of inference and planning, ``p50, p95, max``.
        seam_rad_s: Jump of the fastest joint's velocity that is blended out where a chunk joins the
            motion; ``p50, p95, max``.
        final_state: The executor's state after the last tick, before the arm came to rest;
            ``"fault"`` also if it could not.
        assumed: Whether limits of the arm are assumed. borrowed_domain: The embodiment, if it is
            another robot's.
        held: What the arm was waiting for, where it was in HOLD when the time was up.
        collisions: Reports of the accepted chunks that touched, avoided or were stopped before a
            collision.
        arrays: Trajectories by name, as :meth:`save_npz` writes them. video: The film, where one
            was written.
    """

    seed: int
    task: str | None
    instruction: str
    outcome: Outcome
    steps: Mapping[str, int]
    latency_ms: Mapping[str, float]
    counters: Mapping[str, int]
    duration_s: float
    realtime_factor: float
    ik: ErrorSummary | None = None
    path: ErrorSummary | None = None
    tracking: ErrorSummary | None = None
    drift: ErrorSummary | None = None
    loop_drift: ErrorSummary | None = None
    between_hands: ErrorSummary | None = None
    by_limb: Mapping[str, Mapping[str, ErrorSummary]] = _no_entries()
    model_sha256: str | None = None
    fault: str | None = None
    latency_clock: str = "simulated"
    inference_ms: Mapping[str, float] = _no_entries()
    seam_rad_s: Mapping[str, float] = _no_entries()
    final_state: str | None = None
    held: str | None = None
    assumed: bool = False
    borrowed_domain: str | None = None
    collisions: tuple[CollisionReport, ...] = ()
    arrays: Mapping[str, NDArray[Any]] = _no_entries()
    video: Path | None = None
    followed: bool | None = None

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def success(self) -> bool | None:
        """Whether the task succeeded; None where there was none to judge."""
        return None if self.task is None else self.outcome is Outcome.SUCCESS

    def to_dict(self) -> dict[str, Any]:
        """The episode as JSON-ready values (no arrays)."""
        if_any = ("held", "assumed", "borrowed_domain", "model_sha256", "fault")
        followed = {} if self.followed is None else {"followed": self.followed}
        errors = {
            name: getattr(self, name)
            for name in ("ik", "path", "tracking", "drift", "loop_drift", "between_hands")
        }
        limbs = {
            name: {figure: vars(error) for figure, error in errors.items()}
            for name, errors in self.by_limb.items()
        }
        return {
            **{name: getattr(self, name) for name in ("seed", "task", "instruction", "success")},
            **followed,
            "outcome": str(self.outcome),
            **{name: vars(error) for name, error in errors.items() if error is not None},
            **({"limbs": limbs} if limbs else {}),
            "steps": dict(self.steps),
            "latency_ms": dict(self.latency_ms),
            "latency_clock": self.latency_clock,
            **{
                name: dict(getattr(self, name))
                for name in ("inference_ms", "seam_rad_s", "counters")
            },
            "collisions": [report.to_dict() for report in self.collisions],
            "duration_s": self.duration_s,
            "realtime_factor": self.realtime_factor,
            "final_state": self.final_state,
            **{name: value for name in if_any if (value := getattr(self, name))},
        }

    def save_npz(self, path: str) -> None:
        """Write every trajectory of the episode to one compressed npz file."""
        arrays: dict[str, Any] = dict(self.arrays)
        np.savez_compressed(path, **arrays)
