"""The policy of an episode under a condition: a new one for each episode, on backends that are
opened once for each kind of condition.

The condition is applied between the policy and its backend, so scene and judge know nothing of it.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import Backend, WrappedBackend
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    Cosmos3Error,
    EvaluationError,
    ServiceChunkError,
)
from strands_cosmos3.evaluation.plan import Condition
from strands_cosmos3.evaluation.settings import Settings
from strands_cosmos3.evaluation.sources import sources_of
from strands_cosmos3.options import SAMPLER_BACKENDS
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.policy.policy import Step
from strands_cosmos3.resources import sha256
from strands_cosmos3.types import ActionChunk, Request


class PolicySource:
    """Makes policies, on a shared ``engine`` or one of its own.

    Raises:
        CheckpointError, ConfigError, EnvironmentalError: The policy cannot be made.
    """

    def __init__(self, settings: Settings, engine: Any = None):
        self._settings = settings
        self._options = settings.policy
        self._engine = engine
        self._opened: Any = None
        name = self._options.policy
        self._source_sha256 = None if name is None else source_sha256(name)
        self._foreign = None if name is None else load_policy(name)
        self._backend_key: tuple[int | None, bool] = self._options.sampling.num_steps, True
        self._backend = self._open(*self._backend_key) if self._foreign is None else None

    @property
    def model_sha256(self) -> str | None:
        """Digest of what answers: the checkpoint, a policy's source, or what a service has stated
        since it was asked.
        """
        return self._source_sha256 if self._backend is None else self._backend.model_sha256

    def policy(self, condition: Condition, arguments: Mapping[str, Any]) -> tuple[Policy, Monitor]:
        """Return an episode's policy, and what times its answers. ``arguments`` are those of
        :class:`~strands_cosmos3.policy.Cosmos3Policy` that follow from the world.
        """
        replan_rows = condition.policy.replan_rows or self._options.replan_rows
        if self._foreign is not None:
            foreign = ConditionedPolicy(self._foreign, condition, replan_rows)
            return foreign, foreign
        backend = ConditionedBackend(self.backend_for(condition), condition)
        options = replace(self._options.without_backend, replan_rows=replan_rows)
        return Cosmos3Policy(backend=backend, options=options, **arguments), backend

    def backend_for(self, condition: Condition) -> Backend:
        """Return the backend for a condition: its denoising steps, and without a check of text
        that is meant to be random.
        """
        steps = condition.policy.num_steps or self._options.sampling.num_steps
        key = steps, condition.policy.text != "random"
        if key != self._backend_key or self._backend is None:
            if self._engine is None and self._opened is None:
                self.close()
            self._backend = self._open(*key)
            self._backend_key = key
        return self._backend

    def close(self) -> None:
        """Free the policy."""
        if self._backend is not None:
            self._backend.close()

    def _open(self, num_steps: int | None, check_language: bool) -> Backend:
        policy = self._options
        if policy.backend == "scripted":
            return self._settings.get_world().required_expert(self._settings.robot)
        options = replace(
            policy.for_backend,
            sampling=replace(policy.sampling, num_steps=num_steps),
            parallel=ParallelConfig(),  # replicas are split, and this process is not
            check_language=check_language,
        )
        if self._opened is not None:
            return self._opened.with_options(options)
        if self._engine is not None:
            from strands_cosmos3.backends.engine_backend import EngineBackend  # needs PIL

            return EngineBackend(self._engine, options)
        assert policy.backend is not None  # the settings require one
        backend: Any = make_backend(policy.backend, policy.model, options, policy.action_space)
        if policy.backend in SAMPLER_BACKENDS:
            self._opened = backend  # the next one shares its weights
        return backend


class ConditionedBackend(WrappedBackend):
    """A backend whose images follow a condition, and whose answers are timed.

    Args:
        inner: The backend; it is not closed with this one.

    Attributes:
        answer_ms: Wall time of each answer so far [ms], including the wait for a shared replica.
        lost: Error of a lost server or replica, which is not the policy's failure; else None.
    """

    def __init__(self, inner: Backend, condition: Condition):
        super().__init__(inner)
        self._blank = condition.policy.images == "blank"
        self.answer_ms: list[float] = []
        self.lost: BackendError | EvaluationError | None = None

    infer_batch = Backend.infer_batch  # one by one, so that each is timed

    def infer(self, request: Request) -> ActionChunk:
        """Return the inner backend's answer."""
        if self._blank:
            composite = request.composite
            request = replace(
                request,
                composite=None if composite is None else np.zeros_like(composite),
                images={name: np.zeros_like(view) for name, view in request.images.items()},
            )
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

    def close(self) -> None:
        """Do nothing: the next episode uses the inner backend too."""


class ConditionedPolicy(Policy):
    """Another project's policy, whose pictures follow a condition, and whose answers are timed: any
    object with ``get_actions_sync(observation, instruction)``.

    Members of the contract that the object lacks take their defaults.

    Attributes:
        answer_ms: Wall time of each answer so far [ms].
        lost: Always None: an error of such a policy is its own.
    """

    lost: BackendError | None = None

    def __init__(self, inner: Any, condition: Condition, replan_rows: int | None):
        self._inner = inner
        self._blank = condition.policy.images == "blank"
        self.requires_images = self._member("requires_images")
        self.actions_per_step = (
            self._member("actions_per_step") if replan_rows is None else replan_rows
        )
        self.answer_ms: list[float] = []

    @property
    def provider_name(self) -> str:
        """Name of the object's class."""
        return type(self._inner).__name__

    async def get_actions(
        self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any
    ) -> list[Step]:
        """As :meth:`get_actions_sync`."""
        return self.get_actions_sync(observation_dict, instruction, **kwargs)

    def get_actions_sync(
        self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any
    ) -> list[Step]:
        """Return the object's steps."""
        observation = {
            key: np.zeros_like(value) if self._blank and np.ndim(value) == 3 else value
            for key, value in observation_dict.items()
        }
        started = time.perf_counter()
        with blamed(BackendError, f"policy {self.provider_name} raised"):
            steps = list(self._inner.get_actions_sync(observation, instruction, **kwargs))
        self.answer_ms.append((time.perf_counter() - started) * 1e3)
        return steps

    def set_robot_state_keys(self, robot_state_keys: list[str]) -> None:
        """Pass the names on."""
        self._call("set_robot_state_keys", robot_state_keys)

    def set_control_frequency(self, hz: float) -> None:
        """Pass the rate on."""
        super().set_control_frequency(hz)
        self._call("set_control_frequency", hz)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode."""
        self._call("reset", seed)

    def _call(self, name: str, value: Any) -> None:
        with blamed(BackendError, f"policy {self.provider_name} raised in {name}"):
            self._member(name)(value)

    def _member(self, name: str) -> Any:
        """The object's member of that name, else the contract's default."""
        return getattr(self._inner if hasattr(self._inner, name) else super(), name)


Monitor = ConditionedBackend | ConditionedPolicy
"""What times an episode's answers."""


def load_policy(name: str) -> Any:
    """Return the policy that ``module:name`` makes: a class or function that is called without
    arguments.

    Raises:
        ConfigError: It cannot be made, or what it makes has no ``get_actions_sync``.
    """
    policy = made_by(name, "policy")
    if not hasattr(policy, "get_actions_sync"):
        raise ConfigError(
            f"policy {name!r} is a {type(policy).__name__} without "
            "get_actions_sync(observation, instruction)."
        )
    return policy


def made_by(name: str, what: str) -> Any:
    """Return what ``module:name``, a class or function without arguments, makes; ConfigError if it
    makes nothing. ``what`` is the message's word for it.
    """
    with blamed(ConfigError, _UNMADE.format(what, name)):
        return _factory(name)()


def source_sha256(name: str, what: str = "policy") -> str:
    """Return the SHA-256 of the files of ``module:name``: where it is named, where it is defined,
    and what these name in their own folders
    (:func:`~strands_cosmos3.evaluation.sources.sources_of`). Errors: as :func:`load_policy`.
    """
    with blamed(ConfigError, _UNMADE.format(what, name)):
        modules = name.partition(":")[0], _factory(name).__module__
        digests = {sha256(path) for module in modules for path in sources_of(module)}
        return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def _factory(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def blamed(kind: type[Cosmos3Error], what: str) -> Iterator[None]:
    """Raise whatever another project's code raises as an error of this package, of a kind."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise kind(f"{what} {error!r}.") from error


_UNMADE = (
    "{} {!r} cannot be made (give module:name of a class or function without arguments; for a "
    "module in this folder set PYTHONPATH=.):"
)
