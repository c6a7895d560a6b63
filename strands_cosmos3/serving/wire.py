"""Convert requests and action chunks to wire messages and back, for the client and the server
alike.

Grippers are inverted here and nowhere else: on the wire 1 is closed, inside 1 is open. Poses are of
the Cosmos frame in the robot's base, quaternions x y z w.

Sources: openpi-client and openpi-server (keys, arrays), cosmos-framework's RoboLab server
(observation keys, absolute replies of ``midtrain``), roboarena's and vllm-omni's policy servers
(endpoint, session, bare arrays); vllm-omni's ``entrypoints/openpi`` (connection.py @14490817,
serving.py @0a2c9512: path, metadata, seed, sampling, errors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.decode import decode_chunk
from strands_cosmos3.actions.rotations import matrix_to_quaternion, quaternion_to_matrix, se3
from strands_cosmos3.checks import (
    F64,
    LARGEST,
    finite_array,
    image_array,
    known_name,
    of_grippers,
    seed_number,
    trailing,
)
from strands_cosmos3.embodiments import (
    JOINT_POS,
    POSE_ABS,
    WIRE_GRIPPER,
    ActionSpace,
    CameraRig,
    Embodiment,
    get_embodiment,
    list_embodiments,
)
from strands_cosmos3.errors import (
    ActionSpaceError,
    BackendError,
    InputError,
    InstructionError,
    ObservationError,
    ServiceBusyError,
    ServiceChunkError,
    ServiceError,
    ServiceRefusedError,
    ServiceUnreadableError,
    ShapeError,
    WireFormatError,
)
from strands_cosmos3.films import Sound
from strands_cosmos3.observe.views import as_uint8, compose, letterbox
from strands_cosmos3.serving.codec import UnsupportedArray
from strands_cosmos3.serving.jpeg import MAX_PIXELS, decode_jpeg, encode_jpeg, has_jpeg
from strands_cosmos3.types import ActionChunk, Request

PROMPT = "prompt"
JOINTS = "observation/joint_position"
GRIPPER = "observation/gripper_position"
POSITION = "observation/eef_pos"
QUATERNION = "observation/eef_quat"
COMPOSITE = "observation/image"
ENDPOINT = "endpoint"
SESSION = "session_id"
REQUEST_ID = "cosmos3/request_id"
SEED = "cosmos3/seed"
MOTION_CLOCK = "cosmos3/t_motion_s"
QUANTILES = "cosmos3/quantiles"
SCORES = "cosmos3/scores"
SOUND = "cosmos3/sound"
DEADLINE = "cosmos3/deadline_ms"
SERVED_SPACE = "cosmos3/action_space"
SERVED_MODEL = "cosmos3/model_sha256"
PICTURES = "cosmos3/pictures"
"""Our own keys are prefixed, so that they cannot clash with those of other servers; all are
optional.
"""
RETRY_AFTER = "retry_after_ms"
PRIORITY_HEADER = "Cosmos3-Priority"
DEADLINE_HEADER = "Cosmos3-Deadline-Ms"
PICTURES_HEADER = "Cosmos3-Pictures"
VLLM_PATH = "/v1/realtime/robot/openpi"
VLLM_SEED = "seed"
VLLM_SAMPLING = "sampling_params"
VLLM_SPACE = "action_space"
_VLLM_JOINTS = "joint_position"  # what vLLM-Omni calls joint_pos

Encoding = Literal["jpeg", "raw"]
"""How views travel in the size in which they were seen."""
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
Compose = Callable[[Mapping[str, Any], CameraRig], NDArray[np.uint8]]
_FROM_ZERO = {
    "observation/exterior_image_1_left": "observation/exterior_image_0_left",
    "observation/exterior_image_2_left": "observation/exterior_image_1_left",
}
_STATE_KEYS = (
    PROMPT,
    JOINTS,
    GRIPPER,
    POSITION,
    QUATERNION,
    COMPOSITE,
    ENDPOINT,
    SESSION,
    REQUEST_ID,
    SEED,
    MOTION_CLOCK,
    SOUND,
    DEADLINE,
)
_SENT_AS = {
    JOINTS: "([7], rad)",
    GRIPPER: "(a number, 0 is open and 1 is closed)",
    POSITION: "([3], m)",
    QUATERNION: "([4], x y z w)",
}
_PICTURES = ("observation/wrist_image", "observation/exterior_image")
_UNIT_TOLERANCE = 1e-2
_MAX_ROWS = 1024
_MIN_IMAGE_SIDE = 16  # pixels of one latent patch
_CAMERA_SHAPES = (9 / 16, 3 / 4, 1.0)  # height by width of one camera's picture
_MAX_SESSION_CHARACTERS = 256
_LARGEST_S = 1e12  # of a motion clock, which may be the time of day
_LARGEST_RAD = 4 * np.pi  # of a joint; larger ones are degrees
_LARGEST_M = 10.0  # of a hand's position; larger ones are centimetres or millimetres
# the largest command by column, in words too; a gripper's is clipped, as models overshoot
_FINITE = (np.finfo(np.float64).max, "a finite number")
_COMMANDED = {
    **{
        f"joint_{i}": (_LARGEST_RAD, f"within {_LARGEST_RAD:.4g} rad of zero, and not in degrees")
        for i in range(7)
    },
    **dict.fromkeys(
        "xyz", (_LARGEST_M, f"within {_LARGEST_M:g} m of zero, and not in millimetres")
    ),
    "gripper": (2.0, "within 2 of zero; 0 is open and 1 is closed"),
}
_MAX_SHORT = 1000
MAX_PROMPT_CHARACTERS = 4096
"""Longer prompts are refused before they reach a model: its time grows with the square of their
length.
"""
_RESET_DONE = "reset successful"


@dataclass(frozen=True)
class Dialect:
    """Differences of a family of servers from openpi's."""

    name: str
    # requests name an endpoint and the episode's ``session_id``, and a reset endpoint exists
    endpoint: bool = False
    extensions: bool = False  # our own keys may be sent: request id, seed and motion clock
    numbered_from_zero: bool = False  # the exterior cameras are 0 and 1 instead of 1 and 2
    sampling: bool = False  # requests may have vLLM-Omni's noise seed and number of denoising steps
    path: str = ""  # of the server, if its address has none


ROBOLAB = Dialect("robolab", extensions=True)
DIALECTS: Mapping[str, Dialect] = {
    "robolab": ROBOLAB,
    "openpi": replace(ROBOLAB, name="openpi"),
    "vllm-omni": Dialect("vllm-omni", endpoint=True, sampling=True, path=VLLM_PATH),
    "roboarena": Dialect("roboarena", endpoint=True, numbered_from_zero=True),
}


def get_dialect(name: str) -> Dialect:
    """Return a dialect by name; an unknown one raises UnknownNameError, which lists the valid
    names.
    """
    return DIALECTS[known_name(name, "dialect", DIALECTS)]


@cache
def wire_space(embodiment: Embodiment, name: str | None) -> ActionSpace:
    """Return the action space of the rows on the wire: ``joint_pos``, or ``pose_abs`` for
    ``midtrain`` and ``pose_abs``.

    A domain without ``pose_abs`` sends its own columns, in the model's units: nothing is
    integrated, and no state is sent.

    Raises:
        ActionSpaceError: The embodiment does not have it, or its rows have no columns.
    """
    space = embodiment.action_space(
        name or ("joint_pos" if "joint_pos" in embodiment.spaces else None)
    )
    sent = space if space.meaning == "joint_position" else embodiment.spaces.get("pose_abs", space)
    if not sent.columns:
        raise ActionSpaceError(
            f"{embodiment.name!r} has no action columns, so there are no rows to send."
        )
    return sent


def stated_space(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the action space that a server's metadata state, or None.

    Raises:
        ServiceUnreadableError: It is one that this client does not know, e.g. joint velocities.
    """
    ours = metadata.get(SERVED_SPACE)
    stated = metadata.get(VLLM_SPACE) if ours is None else ours
    read = {_VLLM_JOINTS: "joint_pos"} if ours is None else {name: name for name in _spaces()}
    if stated is None:
        return None
    if not isinstance(stated, str) or stated not in read:
        raise ServiceUnreadableError(
            f"the server's actions are {short(stated)!r}; this client reads {', '.join(read)}. If "
            "the server is mistaken, pass action_space=."
        )
    return read[stated]


@cache
def _spaces() -> tuple[str, ...]:
    """Return the names of the action spaces of all embodiments."""
    names = (space for name in list_embodiments() for space in get_embodiment(name).spaces)
    return tuple(sorted({*names}))


def encode_request(
    request: Request,
    dialect: Dialect,
    session_id: str,
    request_id: int,
    num_steps: int | None = None,
    wait_s: float = math.inf,
    pictures: Encoding | None = None,
) -> dict[str, Any]:
    """Return the observation message of a request.

    Args:
        num_steps: Denoising steps that a vLLM-Omni server is asked for; None leaves them to it.
        wait_s: The time for which the answer is waited for.
        pictures: The encoding that the server reads of views as they were seen
            (:func:`agreed_pictures`); None sends them letterboxed to the rig's size, raw.

    Raises:
        BackendError: The request lacks the state that is sent.
    """
    state: dict[str, Any] = {}
    sent = wire_space(request.embodiment, request.action_space.name)
    if sent.meaning == "joint_position":
        if request.q_rad is None:
            raise BackendError(
                "a 'joint_pos' server requires joint angles, and the request has none."
            )
        state = {JOINTS: request.q_rad.astype(np.float32)}
    elif sent.meaning == "pose_absolute":
        if request.T_base_cosmos is None:
            raise BackendError(
                "a 'midtrain' server requires the measured pose; name the "
                "robot, e.g. robot='panda'."
            )
        position, quaternion = _sent_pose(request.T_base_cosmos)
        state = {POSITION: position, QUATERNION: quaternion}
    message: dict[str, Any] = {
        PROMPT: request.instruction,
        **state,
        GRIPPER: WIRE_GRIPPER.from_fraction(request.grippers).astype(np.float32),
        **_sent_pictures(request, dialect, pictures),
    }
    if dialect.endpoint:
        message |= {ENDPOINT: "infer", SESSION: session_id}
    if dialect.sampling:
        message |= {VLLM_SEED: request.seed}
        message |= {} if num_steps is None else {VLLM_SAMPLING: {"num_inference_steps": num_steps}}
    if dialect.extensions:
        message |= {REQUEST_ID: request_id, SEED: request.seed, MOTION_CLOCK: request.t_motion_s}
        message |= {DEADLINE: wait_s * 1e3} if wait_s < math.inf else {}
        message |= {SOUND: True} if request.sound else {}
    return message


def _sent_pose(T_base_cosmos: F64) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Position and quaternion as they are sent."""
    return T_base_cosmos[:3, 3].astype(np.float32), matrix_to_quaternion(
        T_base_cosmos[:3, :3]
    ).astype(np.float32)


def _sent_pictures(
    request: Request, dialect: Dialect, encoding: Encoding | None
) -> dict[str, NDArray[np.uint8] | bytes]:
    rig = request.embodiment.rig
    sent: dict[str, NDArray[np.uint8]] = {}
    if rig is not None and all(view in request.images for view in rig.views):
        for view, key in zip(rig.views, _keys(rig, dialect.numbered_from_zero), strict=True):
            picture = request.images[view]
            as_seen = encoding is not None and _is_read(picture)
            sent[key] = picture if as_seen else letterbox(picture, rig.view_hw)
    elif request.composite is not None:
        sent = {COMPOSITE: request.composite}
    return {
        key: encode_jpeg(picture) if encoding == "jpeg" and _is_read(picture) else picture
        for key, picture in sent.items()
    }


def _is_read(picture: NDArray[np.uint8]) -> bool:
    """Whether every server of ours reads a picture of this size, in either encoding, and joins
    others of half its width to it, as the composition ``framework`` does.
    """
    height, width = picture.shape[:2]
    is_sized = min(height, width) >= _MIN_IMAGE_SIDE and height * width <= MAX_PIXELS
    return is_sized and width % 2 == 0


def _keys(rig: CameraRig, numbered_from_zero: bool) -> tuple[str, ...]:
    """The rig's keys; roboarena numbers DROID's exterior cameras from 0."""
    if not numbered_from_zero:
        return rig.wire_names
    return tuple(_FROM_ZERO.get(name, name) for name in rig.wire_names)


def decode_request(
    message: Mapping[str, Any],
    embodiment: Embodiment,
    space: ActionSpace,
    *,
    images: bool,
    compose: Compose = compose,
    chunk_rows: int | None = None,
    seed: int = 0,
    t_motion_s: float = 0,
) -> Request:
    """Return the request in an observation message. Unknown keys are ignored.

    Args:
        message: The decoded message.
        embodiment, space: The policy's embodiment, and the action space of the backend's rows.
        images: Whether the backend needs pictures; views are then composed.
        compose: How.
        chunk_rows: Rows of the backend's answers; None is the embodiment's.
        seed, t_motion_s: Noise seed and motion clock if the message has none.

    Raises:
        ObservationError: A key is missing; the message names it.
        InputError: A value is malformed.
    """
    for key in message:
        if isinstance(message[key], UnsupportedArray) and (
            key in _STATE_KEYS or key.startswith(_PICTURES)
        ):
            raise WireFormatError(f"{key!r}: {message[key]}")
    read_wait_s(message.get(DEADLINE))
    sent = wire_space(embodiment, space.name)
    gripper_optional = sent not in (JOINT_POS, POSE_ABS)
    q, pose = _read_state(message, sent, () if gripper_optional else (GRIPPER,))
    prompt = message.get(PROMPT, "")
    if not isinstance(prompt, str):
        raise InputError(f"{PROMPT!r} must be text, got {type(prompt).__name__}.")
    if images and not prompt.strip():
        raise InstructionError(f"{PROMPT!r} is missing or blank; send the instruction as text.")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InputError(
            f"{PROMPT!r} has {len(prompt)} characters; at most {MAX_PROMPT_CHARACTERS} are read."
        )
    views, composite = _read_pictures(message, embodiment, compose if images else None)
    return Request(
        embodiment=embodiment,
        action_space=space,
        instruction=prompt,
        n_rows=chunk_rows or embodiment.chunk_rows(space.name),
        q_rad=q,
        gripper=_read_gripper(message, embodiment),
        limb_poses={} if pose is None else {embodiment.limbs[0].name: pose},
        composite=composite,
        seed=read_seed(message, SEED, seed),
        sound=_flag(message, SOUND),
        t_motion_s=_scalar(message, MOTION_CLOCK, _LARGEST_S)
        if MOTION_CLOCK in message
        else t_motion_s,
        images=views,
    )


def _flag(message: Mapping[str, Any], key: str) -> bool:
    """Whether a message says true under a key; InputError if it says anything but a truth value."""
    value: Any = message.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{key!r} must be true or false, got {type(value).__name__}.")
    return value


def _read_state(
    message: Mapping[str, Any], space: ActionSpace, others: tuple[str, ...]
) -> tuple[F64 | None, F64 | None]:
    """The joint angles and the pose; the one that the wire's action space needs is required, with
    ``others``, and in own columns neither.
    """
    if space.meaning not in ("joint_position", "pose_absolute"):
        return None, None
    joints_only = space.meaning == "joint_position"
    name, *keys = ("joint_pos", JOINTS) if joints_only else ("midtrain", QUATERNION, POSITION)
    if missing := [key for key in (*keys, *others) if key not in message]:
        add = ", ".join(f"{key!r} {_SENT_AS[key]}" for key in missing)
        raise _missing(message, missing, f" This server speaks {name}: add {add}.")
    q = _latest(message, JOINTS, 7, _LARGEST_RAD, "rad") if JOINTS in message else None
    if joints_only:
        return q, None
    position = _latest(message, POSITION, 3, _LARGEST_M, "m")
    return q, se3(quaternion_to_matrix(_latest(message, QUATERNION, 4)), position)


def _read_gripper(message: Mapping[str, Any], embodiment: Embodiment) -> float | F64:
    """The open fraction; those of several grippers from [G] or [T, G], or one number for all of
    them.
    """
    n = max(sum(limb.gripper is not None for limb in embodiment.limbs), 1)
    message = {GRIPPER: 0.0, **message}
    closed = _numbers(message, GRIPPER)
    if (reach := WIRE_GRIPPER.outlier(closed)) is not None:
        raise InputError(f"{GRIPPER!r} is {reach:.4g}; it is from 0 (open) to 1 (closed).")
    if n > 1 and closed.size > 1:
        return WIRE_GRIPPER.to_fraction(_latest(message, GRIPPER, n))
    if closed.ndim > 2 or (closed.ndim == 2 and closed.shape[1] != 1):
        got = list(closed.shape)
        raise ShapeError(f"{GRIPPER!r} must be a number, [T] or [T, 1], got {got}.")
    return of_grippers(np.full(n, WIRE_GRIPPER.to_fraction(closed.reshape(-1)[-1])))


def read_seed(message: Mapping[str, Any], key: str, default: int) -> int:
    """Return the noise seed under a key, or the default if it has none. InputError unless it is a
    whole number from 0 to 2**32 - 1.
    """
    if message.get(key) is None:
        return default
    number = _scalar(message, key, np.inf)
    whole = number.is_integer() and abs(number) < 2**64
    return seed_number(int(number) if whole else number, repr(key))


def read_wait_s(deadline_ms: Any) -> float:
    """Return the time for which a client waits by a message's deadline, infinite if that is None.
    InputError unless it is a number.
    """
    if deadline_ms is None:
        return math.inf
    return _scalar({DEADLINE: deadline_ms}, DEADLINE, _LARGEST_S) / 1e3


def _numbers(message: Mapping[str, Any], key: str, largest: float = LARGEST, unit: str = "") -> F64:
    """The numbers under a key, of any shape: real, finite, of a plausible size."""
    return trailing(message[key], f"{key!r} in {unit}" if unit else repr(key), (), largest)


def _scalar(message: Mapping[str, Any], key: str, largest: float) -> float:
    return float(finite_array(_numbers(message, key, largest), repr(key), ()))


def _latest(
    message: Mapping[str, Any], key: str, n: int, largest: float = LARGEST, unit: str = ""
) -> F64:
    """Return the last row [n] of [n] or [T, n]."""
    value = _numbers(message, key, largest, unit)
    return finite_array(value[-1] if value.ndim == 2 else value, repr(key), (n,))


def _read_pictures(
    message: Mapping[str, Any], embodiment: Embodiment, compose: Compose | None
) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
    """Return the views by name, and the composite, as far as the message has them."""
    rig = embodiment.rig
    views: dict[str, NDArray[np.uint8]] = {}
    keys = () if rig is None else _keys(rig, "observation/exterior_image_0_left" in message)
    missing = [key for key in keys if key not in message]
    if rig is not None and not missing:
        views = {view: _picture(message, key) for view, key in zip(rig.views, keys, strict=True)}
    if COMPOSITE in message:  # the released server prefers it
        _require_composed(message, keys)
        return views, _picture(message, COMPOSITE)
    if compose is None:
        return views, None
    if rig is None:
        raise _missing(message, [COMPOSITE])
    if len(missing) == len(keys):
        raise _missing(message, [COMPOSITE], f" Send it, or {', '.join(rig.wire_names)}.")
    if missing:
        raise _missing(message, missing)
    return views, compose(views, rig)


def _require_composed(message: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise InputError if another picture stands beside the composite: openpi's clients of other
    robots send one camera's picture under its key, and the next camera's under another.
    """
    known = (COMPOSITE, *_FROM_ZERO.values(), *keys)
    for key, value in message.items():
        if key not in known and isinstance(value, np.ndarray) and value.ndim == 3:
            raise InputError(
                f"{COMPOSITE!r} holds all views, composed into one picture; {key[:60]!r} beside it "
                "would be ignored. Compose them, or leave it out."
            )


def _picture(message: Mapping[str, Any], key: str) -> NDArray[np.uint8]:
    value: Any = message[key]
    if isinstance(value, bytes):
        value = decode_jpeg(value, repr(key))
    # as_uint8 takes no ragged lists
    converted = as_uint8(cast("NDArray[Any]", value)) if isinstance(value, np.ndarray) else value
    picture = image_array(converted, repr(key))
    if min(picture.shape[:2]) < _MIN_IMAGE_SIDE:
        got = f"{picture.shape[0]} x {picture.shape[1]}"
        raise ShapeError(
            f"{key!r} is {got} pixels; send at least {_MIN_IMAGE_SIDE} x {_MIN_IMAGE_SIDE}."
        )
    return picture


def doubtful_composite(request: Request) -> str | None:
    """Return a remark if a request's composite, sent without views, has the shape of one camera's
    picture. Like the released server, ours takes a composite of any size.
    """
    picture = request.composite
    rig = request.embodiment.rig
    if picture is None or rig is None or request.images or len(rig.views) == 1:
        return None
    height, width = picture.shape[:2]
    if not any(math.isclose(height / width, shape, rel_tol=0.01) for shape in _CAMERA_SHAPES):
        return None
    return (
        f"{COMPOSITE!r} is {height} x {width}, the shape of one camera's picture; it is read as "
        f"{', '.join(rig.views)} composed into {rig.composite_hw[0]} x {rig.composite_hw[1]}."
    )


def _missing(message: Mapping[str, Any], keys: Sequence[str], remedy: str = "") -> ObservationError:
    have = ", ".join(str(name)[:60] for name in list(message)[:16]) or "nothing"
    lacking = " and ".join(map(repr, keys))
    return ObservationError(f"the observation lacks {lacking}; it has: {have}.{remedy}")


def encodable(wanted: Encoding | None = None) -> Encoding:
    """Return the encoding in which this installation sends or reads pictures, if ``wanted``."""
    return "jpeg" if wanted != "raw" and has_jpeg() else "raw"


def offered_pictures(headers: Sequence[str]) -> Encoding | None:
    """Return what is read of a client whose handshake has these :data:`PICTURES_HEADER`; None,
    raw letterboxed views, of one that has none or asks for what is not known.
    """
    return next((encodable(known) for known in ENCODINGS if headers == [known]), None)


def agreed_pictures(metadata: Mapping[str, Any]) -> Encoding | None:
    """Return the encoding that a server's metadata state for views as they were seen; None, raw
    letterboxed views, if they state none that is known.
    """
    return next((known for known in ENCODINGS if metadata.get(PICTURES) == known), None)


def encode_metadata(
    embodiment: Embodiment,
    space: ActionSpace,
    model_sha256: str | None,
    vllm: bool,
    pictures: Encoding | None = None,
) -> dict[str, Any]:
    """Return the first frame of a connection; ``vllm`` is whether it came to vLLM-Omni's path,
    ``pictures`` what :func:`offered_pictures` makes of its handshake.
    """
    ours = {SERVED_SPACE: space.name, SERVED_MODEL: model_sha256, PICTURES: pictures}
    metadata: dict[str, Any] = {name: value for name, value in ours.items() if value}
    if vllm:  # what it calls ``policy_server_config``
        rig = embodiment.rig
        views = () if rig is None else rig.views
        outer = [view for view in views if "wrist" not in view]
        metadata |= {
            "image_resolution": [256, 256] if rig is None else list(rig.composite_hw),
            "n_external_cameras": len(outer),
            "needs_wrist_camera": len(outer) < len(views),
            "needs_stereo_camera": False,
            "needs_session_id": False,
            VLLM_SPACE: _VLLM_JOINTS if space.name == "joint_pos" else space.name,
        }
    return metadata


def encode_reply(
    chunk: ActionChunk,
    request: Request,
    message: Mapping[str, Any],
    times_ms: tuple[float, float | None],
    bare: bool,
    model_sha256: str | None = None,
) -> Any:
    """Return the reply to a message that :func:`decode_request` read: a map, or for a ``bare`` one
    only the rows. Time is the first axis of every array. Errors: as :func:`encode_rows`.

    ``times_ms`` are of this inference and of the connection's previous request, if there was one;
    ``model_sha256`` is the digest of the model that inferred, if there is one.
    """
    rows = encode_rows(chunk, request)
    if bare:
        return rows
    timing = dict(zip(("infer_ms", "prev_total_ms"), times_ms, strict=True))
    timing = {name: time_ms for name, time_ms in timing.items() if time_ms is not None}
    reply: dict[str, Any] = {"action": rows, "actions": rows, "server_timing": timing}
    if chunk.quantiles is not None and rows.shape[1] == len(chunk.quantiles[0]):
        # not an array: openpi's ActionChunkBroker takes every array's first axis for time
        reply[QUANTILES] = [figures.tolist() for figures in chunk.quantiles]
    if isinstance(request_id := message.get(REQUEST_ID), int | float | str | np.number):
        reply[REQUEST_ID] = request_id
        # not to clients that know none of our keys
        if chunk.scores:
            reply[SCORES] = dict(chunk.scores)
        if model_sha256 is not None:
            reply[SERVED_MODEL] = model_sha256
    if chunk.sound is not None:  # who asked for it knows the key
        reply[SOUND] = {"rate_hz": chunk.sound.rate_hz, "samples": chunk.sound.samples.T}
    return reply


def encode_rows(chunk: ActionChunk, request: Request) -> NDArray[np.float32]:
    """Return the wire rows of a chunk: joint angles, or absolute poses of the Cosmos frame, then
    the wire's gripper [T, 8].

    A domain that has neither sends its rows [T, D] as they are.

    Raises:
        ActionSpaceError: The chunk has another action space than the request.
        BackendError: A row does not fit float32.
    """
    require_sendable(chunk.action)
    meaning = chunk.action_space.meaning
    if wire_space(request.embodiment, request.action_space.name) not in (JOINT_POS, POSE_ABS):
        return chunk.action.astype(np.float32)
    if (meaning == "joint_position") != (request.action_space.meaning == "joint_position"):
        requested = request.action_space.name
        got = chunk.action_space.name
        raise ActionSpaceError(
            f"the request asks for {requested!r}, but the backend returned {got!r}."
        )
    if meaning == "joint_position":
        columns = chunk.action[:, :7]
        gripper = chunk.action[:, 7].clip(0.0, 1.0)
    else:
        assert request.T_base_cosmos is not None  # decode_request requires it
        poses = decode_chunk(chunk, request.T_base_cosmos)
        T = poses.T_base_frame
        columns = np.concatenate([T[:, :3, 3], matrix_to_quaternion(T[:, :3, :3])], axis=1)
        gripper = np.zeros(len(T)) if poses.gripper is None else poses.gripper
    rows = np.concatenate([columns, WIRE_GRIPPER.from_fraction(gripper)[:, None]], axis=1)
    require_sendable(rows)
    return rows.astype(np.float32)


def require_sendable(rows: F64) -> None:
    """Raise BackendError if a number does not fit float32."""
    if not (np.abs(rows) < np.finfo(np.float32).max).all():  # NaN fails, too
        raise BackendError("the backend returned a row that does not fit float32; it is not sent.")


def decode_reply(reply: Any, request: Request, request_id: int) -> ActionChunk:
    """Return the chunk in a server's reply: a map with ``action`` or ``actions`` and maybe a
    ``video``, or a bare array.

    Raises:
        ServiceRefusedError: The reply is an error.
        ServiceBusyError: The server would answer too late.
        ServiceUnreadableError: The reply does not follow the protocol, or belongs to another
            request.
        ServiceChunkError: Its rows must not be executed.
    """
    if isinstance(reply, str):
        raise ServiceRefusedError(f"the server reports an error: {short(reply)}")
    fields = cast("dict[str, Any]", reply) if isinstance(reply, dict) else {}
    if fields.get("type") == "error":
        said = short(fields.get("message", "without a message"))
        raise stated_error(fields, f"the server reports an error: {said}")
    echoed = fields.get(REQUEST_ID, request_id)
    if echoed != request_id:
        raise ServiceUnreadableError(
            f"the reply belongs to request {short(echoed)}, not to {request_id}."
        )
    rows = fields.get("action", fields.get("actions", reply))
    if not isinstance(rows, np.ndarray):
        raise ServiceUnreadableError(
            f"the reply has no array 'action' or 'actions'; it has {keys_of(fields)}."
        )
    timing = {f"server_{name}": ms for name, ms in _figures(fields.get("server_timing")).items()}
    chunk = _chunk(cast("NDArray[Any]", rows), request, timing)
    quantiles = _quantiles(fields.get(QUANTILES), chunk.action_space)
    scores = _figures(fields.get(SCORES))
    video, sound = _video(fields.get("video")), _sound(fields.get(SOUND))
    return replace(chunk, video=video, sound=sound, quantiles=quantiles, scores=scores)


def stated_error(reply: Mapping[str, Any], text: str) -> ServiceError:
    """Return the error with this text that a server's error message stands for."""
    after_ms = reply.get(RETRY_AFTER)
    if isinstance(after_ms, int | float) and after_ms >= 0:
        return ServiceBusyError(text, after_ms / 1e3)
    return ServiceRefusedError(text)


def keys_of(reply: Mapping[str, Any]) -> str:
    """Return the first keys of a reply, for a message."""
    return ", ".join(str(key)[:40] for key in list(reply)[:8]) or "no keys"


def _video(value: Any) -> NDArray[np.uint8] | None:
    """A predicted video [F, H, W, 3] uint8, also where it is the only one of a batch; None for
    anything else.
    """
    if not isinstance(value, np.ndarray):
        return None
    video = cast("NDArray[Any]", value)
    try:
        return image_array(
            video[0] if video.ndim == 5 and video.shape[0] == 1 else video,
            "video",
            (None, None, None, 3),
        )
    except InputError:
        return None


def _sound(value: Any) -> Sound | None:
    """A predicted sound, whose samples [N, channels] have time first as all arrays do."""
    if value is None:
        return None
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    samples = fields.get("samples")
    try:
        if not isinstance(samples, np.ndarray):
            raise InputError(f"it has no array 'samples', but {keys_of(fields)}.")
        waveform = cast("NDArray[Any]", samples).T
        return Sound(waveform, cast("int", fields.get("rate_hz")))
    except InputError as error:
        raise ServiceUnreadableError(f"the reply's {SOUND!r} is no sound: {error}") from None


def _quantiles(value: Any, space: ActionSpace) -> tuple[F64, F64] | None:
    """The q01 and q99 that normalised rows are in units of, from two lists or an array [2, D],
    if the server states them.
    """
    if value is None or not space.normalized:
        return None
    try:
        q01, q99 = finite_array(value, QUANTILES, (2, space.width))
    except InputError as error:
        raise ServiceUnreadableError(f"the reply's {error}") from None
    return q01, q99


def require_rows(rows: NDArray[Any], space: ActionSpace) -> None:
    """Raise ServiceChunkError unless rows are [T, D] finite numbers of an action space, in its
    units.
    """
    if (
        rows.dtype.kind not in "fi"
        or rows.ndim != 2
        or rows.shape[1] != space.width
        or not 1 <= len(rows) <= _MAX_ROWS
    ):
        raise ServiceChunkError(
            f"the server returned {rows.dtype} {list(rows.shape)}; a chunk of {space.name!r} is "
            f"float or signed integers [1..{_MAX_ROWS}, {space.width}]: "
            f"{', '.join(space.columns)}. Does it serve another action space?"
        )
    largest_by_column = _COMMANDED if space in (JOINT_POS, POSE_ABS) else {}
    for column, name in enumerate(space.columns):
        largest, valid = largest_by_column.get(name, _FINITE)
        sound = np.abs(rows[:, column].astype(np.float64)) <= largest  # NaN is not
        if not sound.all():
            row = int(sound.argmin())
            raise ServiceChunkError(
                f"action[{row}, {column}] ({name}) is {rows[row, column]:.6g}; it must be {valid}. "
                "The chunk is not executed."
            )


def _chunk(rows: NDArray[Any], request: Request, timing: dict[str, float]) -> ActionChunk:
    space = wire_space(request.embodiment, request.action_space.name)
    require_rows(rows, space)
    action = rows.astype(np.float64)
    departure = None
    if space.meaning == "pose_absolute":
        if request.T_base_cosmos is not None:
            position, quaternion = _sent_pose(request.T_base_cosmos)
            departure = se3(
                quaternion_to_matrix(quaternion.astype(np.float64)), position.astype(np.float64)
            )
        norm = np.linalg.norm(action[:, 3:7], axis=1)
        if np.abs(norm - 1).max() > _UNIT_TOLERANCE:
            raise ServiceChunkError(
                f"columns 3 to 6 have norm {norm[np.abs(norm - 1).argmax()]:.3g}, so they are not "
                "quaternions and the rows not "
                "'pose_abs'. If they are joint angles, use action_space='joint_pos'."
            )
    if space in (JOINT_POS, POSE_ABS):
        action[:, 7] = WIRE_GRIPPER.to_fraction(action[:, 7])
    try:
        return ActionChunk(
            action,
            space,
            request.embodiment,
            seed=request.seed,
            timing=timing,
            T_base_departure=departure,
        )
    except InputError as error:
        raise ServiceChunkError(f"the server's rows are not {space.name!r}: {error}") from None


def _figures(value: Any) -> dict[str, float]:
    """The server's timings in ms or scores, as far as they are finite numbers."""
    if not isinstance(value, dict):
        return {}
    return {
        str(name): float(number)
        for name, number in cast("dict[Any, Any]", value).items()
        if isinstance(number, int | float) and math.isfinite(number)
    }


def encode_reset(session_id: str) -> dict[str, Any]:
    """Return the message that resets an episode, for dialects with a reset endpoint."""
    return {ENDPOINT: "reset", SESSION: session_id}


def session_of(message: Mapping[str, Any]) -> str:
    """Return the name of a message's session, or empty. Raises InputError unless that is text or a
    whole number, and the endpoint one that there is.
    """
    endpoint: Any = message.get(ENDPOINT)
    session: Any = message.get(SESSION)
    if endpoint is not None and str(endpoint) not in ("infer", "reset"):
        raise InputError(f"{ENDPOINT!r} must be 'infer' or 'reset', got {short(endpoint)!r:.80}.")
    name = "" if session is None else str(session)
    kinds = (str, int, np.integer, type(None))
    if not issubclass(type(session), kinds) or len(name) > _MAX_SESSION_CHARACTERS:
        raise InputError(
            f"{SESSION!r} must be text, got {type(session).__name__}; at most "
            f"{_MAX_SESSION_CHARACTERS} characters are read."
        )
    return name


def error_message(text: str, retry_after_s: float = 0.0) -> dict[str, Any]:
    """Return the map that says an error: on vLLM-Omni's path any, elsewhere that an answer would
    come too late.
    """
    after = {RETRY_AFTER: math.ceil(retry_after_s * 1e3)} if retry_after_s else {}
    return {"type": "error", "message": text, **after}


def reset_reply(bare: bool) -> str | dict[str, str]:
    """Return the reply to a reset: text for roboarena's clients, else a map with a status."""
    return _RESET_DONE if bare else {"status": _RESET_DONE}


def require_reset_reply(reply: Any) -> None:
    """Check a server's reply to a reset. Raises ServiceRefusedError for an error,
    ServiceUnreadableError for anything else.
    """
    status: Any = cast("dict[Any, Any]", reply).get("status") if isinstance(reply, dict) else reply
    if status == _RESET_DONE:
        return
    if isinstance(reply, str):
        raise ServiceRefusedError(f"the server refused to reset: {short(reply)}")
    raise ServiceUnreadableError(f"the server answered {short(reply)} to a reset.")


def short(value: Any) -> str:
    """Return a foreign value as one line of at most 1000 characters; of a traceback, the last
    line.
    """
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    if not lines:
        return "(nothing)"
    line = printable(lines[-1] if lines[0].startswith("Traceback") else " ".join(lines))
    return line if len(line) <= _MAX_SHORT else line[: _MAX_SHORT - 3] + "..."


def printable(text: str) -> str:
    """Return a text with ? for line breaks, escape codes and other characters that a log or
    terminal would obey.
    """
    return "".join(c if c.isprintable() else "?" for c in text)
