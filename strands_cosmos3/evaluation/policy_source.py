"""The policy of an evaluation: a new one for each episode, on backends that are opened once for
each kind of condition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.errors import BackendError, EvaluationError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.perturbed_backend import PerturbedBackend
from strands_cosmos3.evaluation.perturbed_policy import PerturbedPolicy, load_policy
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.options import MODEL_BACKENDS
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.policy.options import PolicyOptions


class Watch(Protocol):
    """What an episode's policy has answered: ``answer_ms`` of each, and the error of a ``lost``
    server or replica, if any.
    """

    @property
    def answer_ms(self) -> list[float]: ...
    @property
    def lost(self) -> BackendError | EvaluationError | None: ...


class PolicySource:
    """Makes policies, on a shared ``engine`` or one of its own.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: The policy cannot be made.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self._policy = settings.policy
        self._libero = settings.is_libero
        self._engine = engine
        self._foreign = (
            load_policy(settings.policy.policy) if settings.policy.policy is not None else None
        )
        self._opened_for: tuple[int | None, bool] = settings.policy.sampling.num_steps, True
        self._backend = self._open(*self._opened_for) if self._foreign is None else None

    @property
    def model_sha256(self) -> str | None:
        """Digest of the checkpoint, if there is one."""
        return None if self._backend is None else self._backend.info.model_sha256

    def policy(
        self, assignment: Assignment, prompt: str | None = None, limits: Any = None, **robot: Any
    ) -> tuple[Policy, Watch]:
        """Return an episode's policy, and what watches its answers.

        Args:
            prompt: The whole caption for a model in this process, instead of its own around the
                instruction.
            limits: Limits of the arm's joints.
            robot: Further arguments of :class:`~strands_cosmos3.policy.Cosmos3Policy`.
        """
        perturbation, chosen = assignment.perturbation, self._policy
        replan = (
            chosen.replan_rows if perturbation.replan_rows is None else perturbation.replan_rows
        )
        if self._foreign is not None:
            watched = PerturbedPolicy(
                self._foreign, perturbation, assignment.policy_instruction, replan
            )
            return watched, watched
        watch = PerturbedBackend(
            self._backend_for(perturbation), perturbation, assignment.policy_instruction, prompt
        )
        options = PolicyOptions(
            action_space=chosen.action_space,
            chunk_rows=chosen.chunk_rows,
            replan_rows=replan,
            borrow_domain=chosen.borrow_domain,
            arm=replace(chosen.arm, limits=limits),
        )
        return Cosmos3Policy(backend=watch, options=options, **robot), watch

    def _backend_for(self, perturbation: Perturbation) -> Backend:
        """Return the backend for a condition: its denoising steps, and without a check of text
        that is meant to be random.
        """
        num_steps = (
            self._policy.sampling.num_steps
            if perturbation.num_steps is None
            else perturbation.num_steps
        )
        if (
            wanted := (num_steps, perturbation.text != "random")
        ) != self._opened_for or self._backend is None:
            if self._engine is None:
                self.close()
            self._backend, self._opened_for = self._open(*wanted), wanted
        return self._backend

    def close(self) -> None:
        """Free the policy."""
        if self._backend is not None:
            self._backend.close()

    def _open(self, num_steps: int | None, check_language: bool) -> Backend:
        policy = self._policy
        if policy.backend == "scripted" and self._libero:
            from strands_cosmos3.worlds.libero.expert import LiberoExpert

            return LiberoExpert()
        options = replace(
            policy.for_backend,
            sampling=replace(policy.sampling, num_steps=num_steps),
            parallel=ParallelConfig(),  # replicas are split, and this process is not
            check_language=check_language,
        )
        if policy.backend not in MODEL_BACKENDS:
            return make_backend(policy.backend, None, options, policy.action_space)
        from strands_cosmos3.backends.native import EngineBackend  # needs torch

        if self._engine is not None:
            return EngineBackend(self._engine, options)
        backend = make_backend(policy.backend, policy.model, options, policy.action_space)
        # the next one shares its weights
        self._engine = backend.engine if isinstance(backend, EngineBackend) else None
        return backend
