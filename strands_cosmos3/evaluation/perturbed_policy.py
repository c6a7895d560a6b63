"""Another project's policy under a condition: any object with ``get_actions_sync(observation,
instruction)``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from strands_cosmos3.errors import BackendError, ConfigError
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.policy import Policy
from strands_cosmos3.policy.policy import Step


def load_policy(name: str) -> Any:
    """Return the policy that ``module:name`` makes: a class or function that is called without
    arguments.

    Raises:
        ConfigError: It cannot be imported, or what it makes has no ``get_actions_sync``.
    """
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"policy {name!r} cannot be made ({error}); give module:name of a class or function."
        ) from None
    if not hasattr(policy, "get_actions_sync"):
        raise ConfigError(
            f"policy {name!r} is a {type(policy).__name__} without get_actions_sync(observation, "
            "instruction)."
        )
    return policy


class PerturbedPolicy(Policy):
    """A policy whose pictures and instruction follow a condition, and whose answers are timed.

    Members of the contract that the object lacks take their defaults.

    Attributes:
        answer_ms: Wall time of each answer so far [ms].
        lost: Always None: an error of such a policy is its own.
    """

    lost: BackendError | None = None

    def __init__(
        self, inner: Any, condition: Perturbation, policy_instruction: str, replan_rows: int | None
    ):
        self._inner, self._condition, self._instruction = inner, condition, policy_instruction
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
        """Return the object's steps for the perturbed observation and the condition's
        instruction.
        """
        shown = dict(observation_dict)
        if self._condition.images == "blank":
            shown = {
                key: np.zeros_like(value) if np.ndim(value) == 3 else value
                for key, value in shown.items()
            }
        started = time.perf_counter()
        steps = list(self._inner.get_actions_sync(shown, self._instruction, **kwargs))
        self.answer_ms.append((time.perf_counter() - started) * 1e3)
        return steps

    def set_robot_state_keys(self, robot_state_keys: list[str]) -> None:
        """Pass the names on."""
        self._member("set_robot_state_keys")(robot_state_keys)

    def set_control_frequency(self, hz: float) -> None:
        """Pass the rate on."""
        super().set_control_frequency(hz)
        self._member("set_control_frequency")(hz)

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode."""
        self._member("reset")(seed)

    def _member(self, name: str) -> Any:
        """The object's member of that name, else the contract's default."""
        return getattr(self._inner if hasattr(self._inner, name) else super(), name)
