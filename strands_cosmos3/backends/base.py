"""The backend contract: one request, one action chunk, wherever inference happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.embodiments import CameraRig, Embodiment
from strands_cosmos3.errors import BackendError, ConfigError
from strands_cosmos3.language import Language
from strands_cosmos3.monitors import ScoreLimit, ScoreMonitor, Watch
from strands_cosmos3.observe.views import compose
from strands_cosmos3.types import ActionChunk, Mode, Request


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """Properties of a backend that its callers read. A backend that wraps another one passes them
    on whole.

    Args:
        name: Name shown to users.
        needs_privileged: Whether it needs state that only a simulator knows. Such a backend must
            run in this process.
        requires_images: Whether it needs camera pictures.
        takes_views: Whether it takes the separate views (``Request.images``) instead of the
            composed picture.
        modes: Modes it can answer.
        action_space: Name of the action space of its answers; None is ``preferred_space``.
        preferred_space: Name of the action space of its answers for embodiments that have it; for
            others, and with None, it is the embodiment's default.
        replan_rows: Rows to execute before the next request, or None for whole chunks.
        chunk_rows: Rows of its answers; None is the embodiment's.
        prefix_rows: Longest ``Request.action_prefix`` that it takes: 0 is none, None is any that is
            shorter than the chunk.
        instruction_free_actions: Description of the actions where the instruction does not shape
            them, else None.
        language: The sentences that its checkpoint understands; None if it declares none.
        example_instruction: An instruction that it understands; a server warms up with it.
        model_sha256: Digest of the model, where it is known without reading; callers ask for
            :attr:`Backend.model_sha256`.
        recorded_robot: Name of the robot that its motion was recorded on, where that is known.
        scores: The scores that its chunks may have, with their limits.
        sound: Whether its chunks have a sound where a request asks for it.
    """

    name: str = "backend"
    needs_privileged: bool = False
    requires_images: bool = True
    takes_views: bool = False
    modes: tuple[Mode, ...] = (Mode.POLICY,)
    action_space: str | None = None
    preferred_space: str | None = None
    replan_rows: int | None = None
    chunk_rows: int | None = None
    prefix_rows: int | None = 0
    instruction_free_actions: str | None = None
    language: Language | None = None
    example_instruction: str = "warm up"
    model_sha256: str | None = None
    recorded_robot: str | None = None
    scores: tuple[ScoreLimit, ...] = ()
    sound: bool = False

    def action_space_for(self, embodiment: Embodiment) -> str | None:
        """Return the name of the action space of answers for an embodiment; None is the
        embodiment's default.
        """
        preferred = self.preferred_space if self.preferred_space in embodiment.spaces else None
        return self.action_space or preferred


class Backend(ABC):
    """Answers requests with action chunks. A subclass states its ``info`` and implements
    :meth:`infer`.

    Attributes:
        info: Its properties.
        answer_error: What is raised where a robot must not execute its rows.
    """

    info: BackendInfo = BackendInfo()
    answer_error: type[BackendError] = BackendError

    @property
    def model_sha256(self) -> str | None:
        """Digest of its checkpoint, or None. An engine reads the checkpoint for it when it is first
        asked for, and raises DigestError if that fails.
        """
        return self.info.model_sha256

    @cached_property
    def watch(self) -> Watch:
        """What is shown each inference by the policies and servers that ask it."""
        return Watch(ScoreMonitor(self.info.scores))

    @property
    def counters(self) -> Mapping[str, int]:
        """Events so far by name: those of its watch, or e.g. a service's ``reconnects``."""
        return self.watch.counters

    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> NDArray[np.uint8]:
        """Return the picture that the model is shown, [H, W, 3] uint8, composed of a rig's
        views. A server calls it while :meth:`infer` runs on another thread.
        """
        return compose(views, rig)

    @abstractmethod
    def infer(self, request: Request) -> ActionChunk:
        """Return the chunk for a request.

        Raises:
            BackendError: Inference failed, or the request lacks something that this backend needs.
        """

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        """Return the chunk for each request. An engine computes those of equal shape in one
        pass. Errors: as :meth:`infer`.
        """
        return [self.infer(request) for request in requests]

    def cancel(self) -> bool:
        """Break off an inference that runs in another thread; its call raises.

        Returns:
            Whether this backend can do so. A backend that cannot returns False and lets the
            inference finish.
        """
        return False

    def reset(self, seed: int | None = None) -> None:  # noqa: B027 - optional for implementers
        """Start a new episode."""

    def snapshot(self) -> Any:
        """Return what it remembers between two requests of an episode, for :meth:`restore`; None is
        nothing. A backend with such memory overrides both.
        """
        return None

    def restore(self, state: Any) -> None:  # noqa: B027 - optional for implementers
        """Return to a snapshot."""

    def close(self) -> None:  # noqa: B027 - optional for implementers
        """Free all resources; calling it twice is harmless."""


class WrappedBackend(Backend):
    """Passes everything on to another backend, except for what a subclass overrides."""

    def __init__(self, inner: Backend):
        self._inner = inner
        self.info = inner.info
        self.watch = inner.watch
        self.answer_error = inner.answer_error

    @property
    def model_sha256(self) -> str | None:
        return self._inner.model_sha256

    @property
    def counters(self) -> Mapping[str, int]:
        return self._inner.counters

    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> NDArray[np.uint8]:
        return self._inner.compose(views, rig)

    def infer(self, request: Request) -> ActionChunk:
        return self._inner.infer(request)

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        return self._inner.infer_batch(requests)

    def cancel(self) -> bool:
        return self._inner.cancel()

    def reset(self, seed: int | None = None) -> None:
        self._inner.reset(seed)

    def snapshot(self) -> Any:
        return self._inner.snapshot()

    def restore(self, state: Any) -> None:
        self._inner.restore(state)

    def close(self) -> None:
        self._inner.close()


def own_backend(backend: Any) -> Backend:
    """Return a caller's backend; ConfigError if it is none."""
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"{type(backend).__name__} is no backend; subclass "
            "strands_cosmos3.backends.base.Backend and implement infer()."
        )
    return backend
