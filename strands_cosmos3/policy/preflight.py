"""Checks of options and observations before a checkpoint is loaded, a server dialled or an arm
moved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import Any

from strands_cosmos3.backends import required_inputs
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import instance_of, known_name, require_type
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.mapping import RobotMapping, rename_columns, resolve_mapping
from strands_cosmos3.options import BACKENDS, options_of
from strands_cosmos3.policy.options import ArmOptions, PolicyOptions
from strands_cosmos3.robots.catalogue import get_robot, recorded_robot
from strands_cosmos3.robots.spec import RobotSpec
from strands_cosmos3.types import Mode


def require_every_camera(mapping: RobotMapping, cameras: Iterable[str] | None) -> None:
    """Refuse a mapping of cameras that leaves one out, and a robot without one that is needed.

    Args:
        mapping: The robot's.
        cameras: Names of the robot's cameras, or None where they are not known yet.

    Raises:
        ConfigError: The mapping names some of the cameras and not the others.
        ObservationError: The robot lacks one.
    """
    if left_out := mapping.cameras.unmapped():
        entries = ", ".join(f"{view!r}: '<its camera>'" for view in left_out)
        raise ConfigError(
            f"observation_mapping names cameras but none for {', '.join(map(repr, left_out))}; "
            "the model wants "
            f"{', '.join(mapping.cameras.views)}. Add {entries}."
        )
    if cameras is None:
        return
    mapping.cameras.require(cameras)


def require_arm(robot: str | None, arm: ArmOptions) -> None:
    """Raise ConfigError for options of an arm that are given without a robot: they would be
    ignored.
    """
    for name in ("arm_model", "limits", "obstacles"):
        if robot is None and getattr(arm, name) is not None:
            raise ConfigError(
                f"{name} describes an arm, and robot=None answers raw columns; add robot='panda'."
            )


def borrowed(robot: str | None, embodiment: str, backend: Any, allowed: bool) -> str | None:
    """Return the embodiment whose domain a model's rows borrow for a robot that Cosmos 3 has none
    for; None if none is.

    Raises:
        ConfigError: A model's domain would be borrowed, and that is not allowed.
    """
    if (
        robot is None
        or not required_inputs(backend).requires_images
        or (own := get_robot(robot)).embodiment is not None
    ):
        return None
    if not allowed:
        raise ConfigError(
            f"Cosmos 3 has no domain for robot {own.name!r}, and {embodiment!r} is another "
            "robot's. Pass borrow_domain=True "
            "(--borrow-domain) to drive it by that domain's rows all the same; the result then "
            "says so. A checkpoint that was "
            "post-trained for this robot needs the robot's embodiment: RobotSpec(embodiment=...)."
        )
    return embodiment


def require_recorded(backend: Backend, robot: str | None) -> None:
    """Refuse a recording of another known robot than the policy's, and warn if that may be an arm
    of the same kind.

    A replay joins limbs by name itself, so robots with other limbs pass.

    Raises:
        ConfigError: The recording is of another robot with the same limbs.
    """
    recorded = recorded_robot(instance_of(backend, Backend, "backend").info.recorded_robot)
    if robot is None or recorded is None or recorded.name == (own := get_robot(robot)).name:
        return
    if {limb.name for limb in own.limbs} != {limb.name for limb in recorded.limbs}:
        return
    said = f"the recording is of robot {recorded.name!r}, and the policy moves {own.name!r}"
    if own.file is None and _arms_of(own) != _arms_of(recorded):
        raise ConfigError(f"{said}, whose arms are others; replay it with robot={recorded.name!r}.")
    warnings.warn(f"{said}; its limits and its hand may differ.", stacklevel=2)


def _arms_of(robot: RobotSpec) -> tuple[object, ...]:
    return robot.model, [(limb.name, limb.joints, limb.frame) for limb in robot.limbs]


def require_arguments(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that a policy's constructor does not have.

    Raises:
        ConfigError: It lacks some of them; the message lists those that it has.
    """
    known = list(known)
    for name in config:
        if name in options_of(PolicyOptions) and name not in known:
            raise ConfigError(f"{name!r} is an option: pass options={{{name!r}: ...}}.")
        if name not in known:
            raise ConfigError(f"unknown policy option {name!r}; valid: {', '.join(known)}.")


def check_inputs(
    observation_keys: Set[str],
    embodiment: Any = "droid",
    robot: str | None = None,
    backend: Any = None,
    action_space: str | None = None,
    observation_mapping: Mapping[str, str] | None = None,
    action_mapping: Mapping[str, str] | None = None,
    model: Any = None,
    mode: Any = "policy",
    options: PolicyOptions | Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> None:
    """Check that a policy with these options can read such observations and move the robot they
    come from.

    Args:
        observation_keys: Names of states and cameras.
        embodiment: This and the others as :class:`~strands_cosmos3.policy.Cosmos3Policy` takes
            them.

    Raises:
        ObservationError: A state or camera is missing.
        ConfigError: Actions would reach no joint, or the backend needs state that another simulator
            does not provide.
        InputError: A value is out of range or an unknown name.
    """
    require_type(observation_keys, Set[str], "observation_keys")
    chosen = get_embodiment(embodiment)
    Mode.parse(mode)
    chosen_options = PolicyOptions.of(options).with_arguments(
        {"action_space": action_space, **arguments}
    )
    backend = chosen_options.once("backend", backend)
    if isinstance(backend, str):
        known_name(backend, "backend", BACKENDS)
    if required_inputs(backend).needs_privileged:
        raise ConfigError(
            "backend 'scripted' sees the state of this package's own simulation "
            "(strands_cosmos3.Robot), which another one does not show; use 'replay', "
            "'native' or 'service'."
        )
    chosen.action_space(chosen_options.action_space)
    borrowed(robot, chosen.name, backend, chosen_options.borrow_domain)
    mapping = resolve_mapping(robot, None, observation_mapping, action_mapping, chosen.rig)
    if required_inputs(backend).requires_images:
        require_every_camera(mapping, None)
        if chosen.rig is not None:
            mapping.cameras.require(sorted(observation_keys))
    if robot is not None:
        mapping.require_state(sorted(observation_keys))
        rename_columns(tuple(mapping.observed), action_mapping)
    elif action_mapping is None:
        served = backend in (None, "service") and "joint_pos" in chosen.spaces
        space = chosen.action_space(
            chosen_options.action_space or ("joint_pos" if served else None)
        )
        if observation_keys.isdisjoint(space.columns):
            raise ConfigError(
                f"actions would be called {', '.join(space.columns)}, and this robot knows none of "
                f"these names (it has {', '.join(sorted(observation_keys)) or 'none'}); pass "
                "robot='panda', or action_mapping={<column>: <actuator>}."
            )
