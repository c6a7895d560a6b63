"""A backend behind the wire protocol: one frame in, one frame out. No sockets here."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3 import __version__
from strands_cosmos3.checks import instance_of
from strands_cosmos3.embodiments import CameraRig, Embodiment, get_embodiment
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    Cosmos3Error,
    InputError,
    InstructionError,
    NonFiniteError,
    RanksError,
    SensorError,
    WireFormatError,
)
from strands_cosmos3.input_monitor import InputMonitor
from strands_cosmos3.monitors import OnEvent
from strands_cosmos3.serving import wire
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, Limits, decode, encode, peek
from strands_cosmos3.serving.dialects import served_dialect
from strands_cosmos3.serving.routes import HttpDialect, ServedModel
from strands_cosmos3.types import ActionChunk, Request

logger = logging.getLogger(__name__)

_MAX_SESSIONS = 1024  # of one connection
_HOLD_S = 0.2  # until implausible inputs may be right again
_HOME_Q_RAD = (0.0, -np.pi / 5, 0.0, -4 * np.pi / 5, 0.0, 3 * np.pi / 5, 0.0)


@runtime_checkable
class Inference(Protocol):
    """The part of :class:`~strands_cosmos3.backends.base.Backend` that a server uses; ``info`` is
    a :class:`~strands_cosmos3.backends.base.BackendInfo`, ``watch`` a
    :class:`~strands_cosmos3.monitors.Watch`.
    """

    @property
    def info(self) -> Any: ...
    @property
    def model_sha256(self) -> str | None: ...
    @property
    def watch(self) -> Any: ...
    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> NDArray[np.uint8]: ...
    def infer(self, request: Request) -> ActionChunk: ...
    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]: ...
    def reset(self, seed: int | None = None) -> None: ...


@dataclass
class Episode:
    """The running episode of a ``session_id``."""

    # on the monotonic clock; None before the first request
    started_s: float | None = None
    calls: int = 0  # inferences
    inputs: InputMonitor = field(default_factory=InputMonitor)


@dataclass
class Session:
    """State of one connection."""

    # whether the client came to vLLM-Omni's path: its connection stays open after an error
    is_vllm: bool = False
    # by ``session_id``, the last used one at the end
    episodes: OrderedDict[str, Episode] = field(default_factory=OrderedDict[str, Episode])
    # from the last request's arrival to the departure of its reply
    previous_total_ms: float | None = None
    bare: bool = False  # whether the client expects bare arrays: it names the endpoint ``infer``
    # how the client may send views as they were seen; None if it does not know how
    pictures: wire.Encoding | None = None

    def episode(self, name: str) -> Episode:
        """Return a session's episode; without a name that of the session asked last. Beyond 1024,
        the one idle for longest is forgotten.
        """
        name = name or next(reversed(self.episodes), "")
        self.episodes[name] = self.episodes.pop(name, None) or Episode()
        if len(self.episodes) > _MAX_SESSIONS:
            self.episodes.popitem(last=False)
        return self.episodes[name]

    def moved(self, by_s: float) -> Session:
        """Return a copy whose times are later: on the clock of another machine."""
        moved = OrderedDict(
            (name, replace(one, started_s=None if one.started_s is None else one.started_s + by_s))
            for name, one in self.episodes.items()
        )
        return replace(self, episodes=moved)

    def sent(self, name: str) -> Session:
        """Return what is sent along with a request that names a session: a copy with that episode
        only, whose times count from now.
        """
        episode = self.episode(name)
        only = OrderedDict({next(reversed(self.episodes)): episode})
        return replace(self, episodes=only).moved(-time.monotonic())

    def returned(self, sent: Session) -> None:
        """Take over what became of a copy that was sent along."""
        self.bare = sent.bare
        self.episodes |= sent.moved(time.monotonic()).episodes


@dataclass(frozen=True, eq=False)
class Message:
    """A frame from a connection, or an item of an HTTP dialect's request, and when it arrived on
    the monotonic clock.
    """

    frame: bytes | str | Mapping[str, Any]
    session: Session
    arrived_s: float
    # what :meth:`ServedPolicy.read` makes of it, if that was begun on another thread
    reading: Future[ReadMessage] | None = None


@dataclass(frozen=True)
class Answer:
    """A reply frame, and the outcome: ``ok``, ``reset``, ``refused`` (it would come too late),
    ``held`` (its inputs are implausible), ``lost`` (of a fleet: who inferred for it is gone), or
    ``error``, ``late`` and ``moved`` (of a fleet: another kind of model is served by now); after
    these the connection is closed.
    """

    frame: bytes | str
    outcome: str
    infer_s: float = 0.0
    waited_s: float = 0.0  # from the request's arrival to the start of its inference
    retry_after_s: float = 0.0  # of one that may be asked again

    @property
    def failed(self) -> bool:
        """Whether the frame is the text of an error."""
        return self.outcome in ("error", "late")

    def sent(self, session: Session) -> bytes | str:
        """Return the frame as the session's protocol has it."""
        if self.retry_after_s or (self.failed and session.is_vllm):
            return encode(wire.error_message(str(self.frame), self.retry_after_s))
        return self.frame


@dataclass(frozen=True, eq=False)
class _PendingInference:
    """A request for an inference, its episode, and what makes a reply of the chunk and the time
    in s that it took.
    """

    request: Request
    episode: Episode
    encode_reply: Callable[[ActionChunk, float], bytes | str]


@dataclass(frozen=True, eq=False)
class _PendingReset:
    """A request for a new episode of a session."""

    session: Session
    name: str


ReadMessage = _PendingInference | _PendingReset | Answer
"""What a message asks for, or the answer that says why it cannot be read."""
Item = TypeVar("Item")
Done = TypeVar("Done")


def _refusal(error: Cosmos3Error) -> Answer:
    text = wire.printable(f"{type(error).__name__}: {error}")
    logger.warning("request refused: %s", text)
    return Answer(text, "error")


@dataclass
class ServedPolicy:
    """Answers wire messages with a backend. Its methods run on one thread, except for
    :meth:`read`.

    Args:
        backend: The backend. It must not need privileged state, which never leaves the simulator's
            process.
        embodiment: The policy's embodiment.
        action_space: ``joint_pos``, or ``midtrain``, which is sent as absolute poses. None is the
            backend's, else ``joint_pos`` if available.
        seed: Noise seed for clients that send none; each call of an episode uses the next one.
        limits: Size limits of messages.
        warm_up_message: A wire message that the backend can answer; None uses a synthetic one.
        http: The HTTP dialect that is answered too, or its name; None is the embodiment's, if there
            is one. A backend of another embodiment must be able to answer it, as a checkpoint of
            all domains is.

        on_event: What follows from implausible inputs of an episode: a warning here, or a refusal,
            after which the connection stays open (``hold``) or not (``error``).

    Attributes:
        dialect: The HTTP dialect, or None.
        failures: Inferences that failed by no client's fault since the last that did not.

    Raises:
        ConfigError: The backend cannot be served.
        UnknownNameError: There is no such HTTP dialect.
        ActionSpaceError: The wire protocol does not support the embodiment's action space.
    """

    backend: Inference
    embodiment: Embodiment | str = "droid"
    action_space: str | None = None
    seed: int = 0
    limits: Limits = DEFAULT_LIMITS
    warm_up_message: Mapping[str, Any] | None = None
    http: HttpDialect | str | None = None
    on_event: OnEvent = "warn"
    dialect: HttpDialect | None = field(init=False, repr=False)
    failures: int = field(default=0, init=False)
    _embodiment: Embodiment = field(init=False, repr=False)
    # names that were warned of in requests without an episode
    _warned: set[str] = field(default_factory=set[str], init=False, repr=False)

    def __post_init__(self) -> None:
        self._embodiment = get_embodiment(self.embodiment)
        if not isinstance(cast("Any", self.backend), Inference):
            raise ConfigError(
                f"{type(self.backend).__name__} is no backend; subclass "
                "strands_cosmos3.backends.base.Backend."
            )
        if self.backend.info.needs_privileged:
            raise ConfigError(
                f"backend {self.backend.info.name!r} needs the simulator's state, which never "
                "leaves its process. Serve replay or a model backend."
            )
        stated = self.action_space or self.backend.info.action_space_for(self._embodiment)
        travels = wire.wire_space(self._embodiment, stated)
        self._space = (
            self._embodiment.action_space("midtrain")
            if travels.meaning == "pose_absolute"
            else travels
        )
        self.dialect = served_dialect(self.http, self._embodiment)

    @property
    def about(self) -> dict[str, str]:
        """Labels of the served policy: version of this package, backend, embodiment, action space
        and the checkpoint's digest.
        """
        return {
            "version": __version__,
            "backend": self.backend.info.name,
            "embodiment": self._embodiment.name,
            "action_space": self._space.name,
            "model_sha256": self.backend.model_sha256 or "",
        }

    def metadata(self, session: Session) -> dict[str, Any]:
        """Return the first frame of a session."""
        digest = self.backend.model_sha256
        return wire.encode_metadata(
            self._embodiment, self._space, digest, session.is_vllm, session.pictures
        )

    @property
    def _model(self) -> ServedModel:
        about = self.backend.info
        return ServedModel(
            f"strands-cosmos3 {__version__} {about.name}",
            self._embodiment,
            self.seed,
            about.chunk_rows,
        )

    def page(self, path: str) -> Mapping[str, Any]:
        """Return what the HTTP dialect says at the path of one of its pages."""
        assert self.dialect is not None
        return self.dialect.pages[path](self._model, self.backend.model_sha256)

    def wait_s(self, frame: bytes | str) -> float:
        """Return the time for which the client waits for the answer to a frame; infinite if the
        frame states none, or cannot be read.
        """
        if isinstance(frame, str):
            return math.inf
        try:
            return wire.read_wait_s(peek(frame, wire.DEADLINE, self.limits))
        except InputError:  # its answer says why
            return math.inf

    def warm_up(self) -> None:
        """Run one inference, so that no client waits for compilation. Raises Cosmos3Error if the
        backend fails.
        """
        message = self._some_message() if self.warm_up_message is None else self.warm_up_message
        self._infer(
            [self._pending(decode(encode(dict(message), self.limits), self.limits), Session())]
        )
        self.backend.reset(None)

    def answer(self, messages: Sequence[Message]) -> list[Answer]:
        """Answer messages of different connections, with one pass of inference where the backend
        can.

        Never raises: an error becomes a line of text; its traceback is logged here only. One
        message's error is not another's.
        """
        read = [
            self.read(message) if message.reading is None else message.reading.result()
            for message in messages
        ]
        prepared = [
            self._caught(self._reset, item) if isinstance(item, _PendingReset) else item
            for item in read
        ]
        answers = iter(
            self._infer_all([item for item in prepared if isinstance(item, _PendingInference)])
        )
        return [item if isinstance(item, Answer) else next(answers) for item in prepared]

    def read(self, message: Message) -> ReadMessage:
        """Return what a message asks for, its pictures composed; never raises, as :meth:`answer`.

        Any thread may call it, while others infer: of the backend it uses ``info`` and ``compose``.
        The messages of one session come one after the other.
        """
        return self._caught(self._read, message)

    def _infer_all(self, pending: Sequence[_PendingInference]) -> list[Answer]:
        if len(pending) > 1:
            try:
                return self._infer(pending)
            except RanksError as error:
                # its processes are gone: asking again for each would start and lose them again
                self.failures += 1
                return [_refusal(error)] * len(pending)
            except BaseException:
                logger.info(
                    "a batch failed; its requests are inferred for one by one", exc_info=True
                )
        return [self._caught(lambda one: self._infer([one])[0], item) for item in pending]

    def _caught(self, work: Callable[[Item], Done], item: Item) -> Done | Answer:
        try:
            return work(item)
        except Cosmos3Error as error:
            self.failures += isinstance(error, RanksError)
            refusal = _refusal(error)
            if isinstance(error, SensorError) and not error.final:
                return replace(refusal, outcome="held", retry_after_s=_HOLD_S)
            return refusal
        except BaseException as error:
            # a backend may raise anything, and the next request must be served
            self.failures += 1
            logger.exception("inference failed")
            return Answer(
                f"InternalError: inference failed ({type(error).__name__}); see the server's log.",
                "error",
            )

    def _read(self, message: Message) -> _PendingInference | _PendingReset:
        session, dialect = message.session, self.dialect
        if dialect is not None and isinstance(message.frame, Mapping):
            return self._looked_at(
                _PendingInference(
                    dialect.decode_request(message.frame, self._model),
                    Episode(inputs=InputMonitor(self._warned)),
                    lambda chunk, _: dialect.encode_reply(chunk),
                )
            )
        if not isinstance(message.frame, bytes):
            raise WireFormatError("a request must be a binary msgpack frame, got text.")
        content = decode(message.frame, self.limits)
        if not isinstance(content, dict):
            raise WireFormatError(f"a request must be a map, got {type(content).__name__}.")
        content = cast("dict[str, Any]", content)
        name = wire.session_of(content)
        endpoint = content.get(wire.ENDPOINT)
        if endpoint == "reset":
            return _PendingReset(session, name)
        session.bare |= endpoint == "infer" or session.is_vllm
        return self._looked_at(self._pending(content, session))

    def _looked_at(self, pending: _PendingInference) -> _PendingInference:
        """An inference of plausible inputs; SensorError where they are not, and are refused."""
        self.backend.watch.look(pending.request, pending.episode.inputs, self.on_event)
        return pending

    def _reset(self, reset: _PendingReset) -> Answer:
        self.backend.reset(None)
        session = reset.session
        episode = session.episode(reset.name)
        episode.started_s = None
        episode.calls = 0
        episode.inputs = InputMonitor()
        reply = wire.reset_reply(session.bare and not session.is_vllm)
        return Answer(reply if isinstance(reply, str) else encode(reply, self.limits), "reset")

    def _pending(self, message: Mapping[str, Any], session: Session) -> _PendingInference:
        now = time.monotonic()
        episode = session.episode(wire.session_of(message))
        if episode.started_s is None:
            episode.started_s = now
        default = (self.seed + episode.calls) % 2**32
        request = wire.decode_request(
            message,
            self._embodiment,
            self._space,
            images=self.backend.info.requires_images,
            compose=self.backend.compose,
            chunk_rows=self.backend.info.chunk_rows,
            seed=wire.read_seed(message, wire.VLLM_SEED, default) if session.is_vllm else default,
            t_motion_s=now - episode.started_s,
        )
        if request.sound and not self.backend.info.sound:
            raise InputError(
                f"{wire.SOUND!r} is true, and this server predicts no sound; leave it out, or "
                "start the server with --sound on a checkpoint that has ears."
            )
        if not episode.calls and (remark := wire.doubtful_composite(request)):
            logger.warning("%s", remark)

        def encode_reply(chunk: ActionChunk, infer_s: float) -> bytes:
            times_ms = infer_s * 1e3, session.previous_total_ms
            digest = self.backend.model_sha256
            reply = wire.encode_reply(chunk, request, message, times_ms, session.bare, digest)
            episode.inputs.follow(reply if session.bare else reply["action"], chunk.row_times_s)
            return encode(reply, self.limits)

        return _PendingInference(request, episode, encode_reply)

    def _infer(self, pending: Sequence[_PendingInference]) -> list[Answer]:
        started_s = time.monotonic()
        requests = [item.request for item in pending]
        try:
            inferred = (
                [self.backend.infer(requests[0])]
                if len(requests) == 1
                else self.backend.infer_batch(requests)
            )
            chunks = [instance_of(chunk, ActionChunk, "the backend's answer") for chunk in inferred]
        except InstructionError:  # the client's
            raise
        except (NonFiniteError, InputError) as error:
            # an invalid chunk is the backend's fault, not the client's
            raise BackendError(f"the backend's rows are not sent: {error}") from error
        infer_s = time.monotonic() - started_s
        self.failures = 0
        for item, chunk in zip(pending, chunks, strict=True):
            self.backend.watch.see(item.request, chunk, item.episode.inputs)
        answers = [
            Answer(item.encode_reply(chunk, infer_s), "ok", infer_s)
            for item, chunk in zip(pending, chunks, strict=True)
        ]
        for item in pending:
            item.episode.calls += 1
        return answers

    def _some_message(self) -> dict[str, Any]:
        """A synthetic request: gray pictures and an arm at rest."""
        message: dict[str, Any] = {
            wire.PROMPT: self.backend.info.example_instruction,
            wire.JOINTS: np.array(_HOME_Q_RAD),
            wire.GRIPPER: np.zeros(1),
            wire.POSITION: np.array([0.4, 0.0, 0.4]),
            wire.QUATERNION: np.array([1.0, 0.0, 0.0, 0.0]),
        }
        if self._embodiment.rig is not None:
            view = np.full((*self._embodiment.rig.view_hw, 3), 128, np.uint8)
            message |= dict.fromkeys(self._embodiment.rig.wire_names, view)
        else:
            message[wire.COMPOSITE] = np.full((256, 256, 3), 128, np.uint8)
        return message
