"""A policy on LIBERO: what it observes, and its answer as actions for the controller."""

from __future__ import annotations

from typing import Any

import numpy as np

from strands_cosmos3.actions.controller_rows import controller_rows, decode_rows
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import PANDA_FINGER
from strands_cosmos3.errors import BackendError, ConfigError
from strands_cosmos3.policy import Cosmos3Policy, Policy
from strands_cosmos3.types import ActionChunk, Observation
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ
from strands_cosmos3.worlds.libero.simulation import (
    LiberoSimulation,
    as_trained,
    privileged,
    side_by_side,
)

ACTION_KEYS = ("dx", "dy", "dz", "rx", "ry", "rz", "gripper")
"""What another project's policy calls the columns of an action in its steps; the gripper opens
at -1.
"""


def next_actions(policy: Policy, world: LiberoSimulation, instruction: str) -> F64:
    """Ask a policy once and return its actions [T, 7], as many as it wants executed.

    This package's policies answer normalised rows of the ``libero`` domain. Others are asked with
    the observation of :class:`~strands_cosmos3.worlds.libero.env.LiberoEnv` and both views side
    by side as ``image``; they return steps with :data:`ACTION_KEYS`.

    Raises:
        ConfigError: The policy is of another embodiment.
        BackendError: A step lacks a key; or inference failed.
    """
    views = (
        {name: as_trained(view) for name, view in world.views().items()}
        if policy.requires_images
        else {}
    )
    image = {"image": side_by_side(views)} if views else {}
    if not isinstance(policy, Cosmos3Policy):
        steps = policy.get_actions_sync({**views, **image, "state": world.state}, instruction)
        return _actions(steps)[: policy.actions_per_step]
    chunk = policy.plan(_observation(world, image, policy.info.needs_privileged), instruction)
    if not isinstance(chunk, ActionChunk) or chunk.embodiment.name != "libero":
        raise ConfigError(
            f"a policy of embodiment {policy.embodiment.name!r} cannot act on LIBERO; make it "
            "with 'libero'."
        )
    return decode_rows(controller_rows(chunk))[: policy.replan_rows]


def _observation(world: LiberoSimulation, image: dict[str, Any], with_state: bool) -> Observation:
    seen, now_s = world.observed, world.steps / CONTROL_HZ
    gripper = float(
        np.clip(PANDA_FINGER.to_fraction(np.abs(seen["robot0_gripper_qpos"]).mean()), 0, 1)
    )
    state = privileged(world) if with_state else None
    return Observation(
        seen["robot0_joint_pos"], gripper, image, seen["robot0_joint_vel"], now_s, now_s, state
    )


def _actions(steps: list[Any]) -> F64:
    try:
        return np.array(
            [[float(np.asarray(step[key])) for key in ACTION_KEYS] for step in steps]
        ).reshape(-1, len(ACTION_KEYS))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(
            f"a step of the policy is malformed ({error!r}); it must have {', '.join(ACTION_KEYS)}."
        ) from None
