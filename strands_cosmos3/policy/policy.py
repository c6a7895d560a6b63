"""The contract of strands-robots' ``Policy``, without a dependency on strands-robots.

Members, meanings and defaults are those of strands-robots 0.5.3 (``policies/base.py``, and what its
``PolicyRunner`` and MuJoCo engine call); ``get_actions``, ``set_robot_state_keys`` and
``provider_name`` are all that 0.3.8 has. The order of a rollout there: ``preflight``, the
constructor, ``set_robot_state_keys``, ``set_sim_context``, ``reset`` (with a seed only),
``set_control_frequency``, and then, for each chunk, ``set_rtc_observed_delay`` and ``get_actions``.
It never calls ``close``: whoever made the policy does.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np

from strands_cosmos3.checks import F64, positive, whole_number
from strands_cosmos3.errors import BackendError, ConfigError, InputError
from strands_cosmos3.resources import Closeable

Step = dict[str, float | list[float]]


def step_values(steps: Sequence[Step], keys: Sequence[str], policy: object) -> F64:
    """Return numbers of a policy's steps by key, [T, D]; BackendError if a step lacks one."""
    try:
        rows = [[float(np.asarray(step[key])) for key in keys] for step in steps]
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(
            f"a step of policy {type(policy).__name__!r} is malformed: {error!r}; it must "
            f"have {', '.join(keys)}."
        ) from None
    return np.array(rows).reshape(-1, len(keys))


class Policy(Closeable):
    """Everything that a runner may read and call.

    Attributes:
        requires_images: Whether observations must hold camera frames; a simulator need not draw
            them otherwise.
        actions_per_step: Steps of a chunk to execute before the next call; None leaves it to the
            policy.
        supports_rtc: Whether a chunk requested while the last one still runs continues it without a
            jump. Only then may a runner overlap inference and motion.
        reads_instruction: Whether the instruction shapes the actions.
        instruction_free_actions: Description of the actions if it does not.
        requires_action_controller: Why the robot's own actuators are not enough, or None.
        required_bodies: Bodies whose world poses every observation must hold (``body.<name>.pos``
            and so on).
        children: Policies that this one delegates to.
        control_frequency: The executor's steps a second, once set.
        rtc_observed_delay_steps: Steps executed between an observation and the first action that
            answers it, once set; a new episode forgets it.
        model_sha256: Digest of the checkpoint behind the policy, or None.
    """

    requires_images: bool = True
    actions_per_step: int | None = None
    supports_rtc: bool = False
    reads_instruction: bool = True
    instruction_free_actions: str | None = None
    requires_action_controller: ClassVar[str | None] = None
    required_bodies: tuple[str, ...] = ()
    children: tuple[Policy, ...] = ()
    control_frequency: float | None = None
    rtc_observed_delay_steps: int | None = None
    model_sha256: str | None = None

    @property
    @abstractmethod
    def provider_name(self) -> str:
        """Name under which the policy is registered."""

    @abstractmethod
    async def get_actions(
        self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any
    ) -> list[Step]:
        """The next actions, one dictionary of Python floats a step. Unknown keyword arguments
        are ignored.
        """

    @abstractmethod
    def set_robot_state_keys(self, robot_state_keys: list[str]) -> None:
        """Name the robot's state entries, in order.

        Raises:
            InputError: Not a list of distinct, non-empty strings.
        """

    @classmethod
    def preflight(cls, observation_keys: Set[str], **policy_config: Any) -> None:
        """Refuse a configuration that cannot use such observations, before anything is loaded.

        Args:
            observation_keys: What an observation will hold: state names and camera names.
            policy_config: The constructor's arguments.

        Raises:
            ValueError: The configuration cannot use them.
        """

    def get_actions_sync(
        self, observation_dict: Mapping[str, Any], instruction: str, **kwargs: Any
    ) -> list[Step]:
        """:meth:`get_actions` without ``await``, also where an event loop is already running (in
        a notebook, say).
        """

        def call() -> list[Step]:
            return asyncio.run(self.get_actions(observation_dict, instruction, **kwargs))

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call()
        with ThreadPoolExecutor(max_workers=1) as worker:
            return worker.submit(call).result()

    def set_control_frequency(self, hz: float) -> None:
        """Set how often the caller applies a step.

        Raises:
            InputError: Not a finite number above zero.
        """
        name = "set_control_frequency: control_frequency"
        if isinstance(hz, bool | str):
            raise InputError(f"{name} must be a finite number above zero, got {hz!r}.")
        self.control_frequency = positive(hz, name)

    def set_rtc_observed_delay(self, steps: int | None) -> None:
        """Set how many steps are executed between the next observation and the first action that
        answers it.

        Args:
            steps: 0 if the world waits for the answer; None if unknown.

        Raises:
            InputError: Not a whole number of at least 0.
        """
        name = "set_rtc_observed_delay: rtc_observed_delay_steps"
        self.rtc_observed_delay_steps = None if steps is None else whole_number(steps, name, 0)

    @property
    def execution_horizon(self) -> int:
        """Steps of a chunk to execute before the next call."""
        return max(1, self.actions_per_step or 1)

    def is_chunk_emitting(self) -> bool:
        """Whether a call returns more than one step."""
        return self.execution_horizon > 1

    def set_sim_context(self, model: Any, namespace: str) -> None:
        """Take the simulator's compiled model and the prefix of the robot's names in it."""

    def reset(self, seed: int | None = None) -> None:
        """Start a new episode."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Events so far by name, e.g. a service's ``reconnects``."""
        return {}

    def cancel(self) -> None:
        """Break off an inference that runs in another thread, where the policy can; that call
        raises.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what the policy remembers between two calls, for :meth:`restore`.
        ConfigError: It cannot be saved.
        """
        raise ConfigError(f"policy {self.provider_name!r} cannot be saved: it has no snapshot().")

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a snapshot."""
        raise ConfigError(f"policy {self.provider_name!r} cannot be restored.")

    def close(self) -> None:
        """Free all resources; calling it twice is harmless."""
