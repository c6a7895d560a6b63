"""Apply a condition to requests between the policy and its backend, so that scene and judge know
nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.backends.base import Backend
from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import BackendError, EvaluationError, ServiceChunkError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.types import ActionChunk, Request


class PerturbedBackend(Backend):
    """A backend whose images and instruction follow a condition, and whose answers are timed.

    Args:
        inner: The backend; it is not closed with this one.
        prompt: The whole caption, instead of the model's own around the instruction.

    Attributes:
        answer_ms: Wall time of each answer so far [ms], including the wait for a shared replica.
        lost: Error of a lost server or replica, which is not the policy's failure; else None.
    """

    def __init__(
        self,
        inner: Backend,
        condition: Perturbation,
        policy_instruction: str,
        prompt: str | None = None,
    ):
        self._inner, self._condition, self._instruction, self._prompt = (
            inner,
            condition,
            policy_instruction,
            prompt,
        )
        self.info = inner.info
        self.answer_ms: list[float] = []
        self.lost: BackendError | EvaluationError | None = None

    def compose(self, views: Mapping[str, NDArray[np.uint8]], rig: CameraRig) -> NDArray[np.uint8]:
        """Return the inner backend's composite."""
        return self._inner.compose(views, rig)

    def infer(self, request: Request) -> ActionChunk:
        """Return the inner backend's answer to the perturbed request."""
        request = self.shown(request)
        started = time.perf_counter()
        try:
            chunk = self._inner.infer(request)
        except ServiceChunkError:
            raise
        except (BackendError, EvaluationError) as error:
            self.lost = error
            raise
        self.answer_ms.append((time.perf_counter() - started) * 1e3)
        return chunk

    def shown(self, request: Request) -> Request:
        """Return the perturbed request."""
        request = replace(
            request, instruction=self._instruction, prompt=self._prompt or request.prompt
        )
        if self._condition.images == "seen":
            return request
        composite = None if request.composite is None else _black(request.composite)
        return replace(
            request,
            composite=composite,
            images={name: _black(view) for name, view in request.images.items()},
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """The inner backend's."""
        return self._inner.counters

    def cancel(self) -> bool:
        """Break off the inner backend's inference."""
        return self._inner.cancel()

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode of the inner backend, which is not closed with this one."""
        self._inner.reset(seed)


def _black(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.zeros_like(image)
