"""Several observations answered by one inference."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import instance_of, typed
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.policy.contract import Policy, Step
from strands_cosmos3.types import ActionChunk, JointTrajectory, Mode, Observation, Request


class BatchAnswers(Policy):
    """Adds :meth:`get_actions_batch` to a policy with one backend."""

    backend: Backend
    mode: Mode
    prompt: str
    _calls: int
    _planning: Any  # a reentrant lock

    @abstractmethod
    def _require_open(self) -> None: ...
    @abstractmethod
    def _start_over(self) -> None: ...
    @abstractmethod
    def _observation(
        self, given: Observation | Mapping[str, Any], t_motion_s: float | None = None
    ) -> Observation: ...
    @abstractmethod
    def _request(
        self,
        observation: Observation,
        instruction: str,
        raw_actions: Any,
        video: Any,
        action_prefix: Any,
    ) -> Request: ...
    @abstractmethod
    def _solved(
        self, chunk: Any, observation: Observation, infer_ms: float
    ) -> JointTrajectory | ActionChunk: ...
    @abstractmethod
    def _next_steps(
        self, plan: JointTrajectory | ActionChunk, observation: Observation, delay: int
    ) -> list[Step]: ...

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
            [instructions] * len(observations)
            if isinstance(instructions, str)
            else list(instructions)
        )
        if len(texts) != len(observations):
            raise InputError(
                f"{len(texts)} instructions for {len(observations)} observations; give one for "
                "each, or one text."
            )
        with self._planning:
            self._require_open()
            first = self._calls
            read: list[Observation] = []
            requests: list[Request] = []
            for i, (given, text) in enumerate(zip(observations, texts, strict=True)):
                self._start_over()
                self._calls = first + i
                read.append(self._observation(given, 0.0))
                requests.append(self._request(read[-1], text or self.prompt, None, None, None))
            started = time.perf_counter()
            chunks = self.backend.infer_batch(requests) if requests else []
            infer_ms = (time.perf_counter() - started) * 1e3
            answers: list[list[Step]] = []
            for i, (chunk, observation) in enumerate(zip(chunks, read, strict=True)):
                self._start_over()
                self._calls = first + i
                answers.append(
                    self._next_steps(self._solved(chunk, observation, infer_ms), observation, 0)
                )
            return answers
