# pyright: reportAttributeAccessIssue=false
"""The arm as a MuJoCo model: the embedded one, or another by path or name."""

from __future__ import annotations

from pathlib import Path

import mujoco

from strands_cosmos3.errors import (
    ConfigError,
    EnvironmentalError,
    MissingDependencyError,
    ResourceNotFoundError,
    UnknownNameError,
)
from strands_cosmos3.resources import resource

MODEL_NAMES = ("panda", "menagerie")
PHYSICS_HZ = 600
"""Physics steps a second; 40 of them between two rows of a 15 Hz chunk."""


def panda_path() -> Path:
    """The embedded MJCF's path.

    Raises:
        ResourceNotFoundError: The installation lacks it.
    """
    return resource("assets/panda.xml")


def load_panda() -> mujoco.MjModel:
    """The embedded Franka Panda with its hand, alone: qpos = 7 joints [rad], then 2 fingers [m]; ctrl = 8 actuators.

    600 Hz, ``implicitfast``; the base is the world's origin. Names are in :mod:`strands_cosmos3.arm.panda`.

    Raises:
        ResourceNotFoundError: The installation lacks the model file.
    """
    return mujoco.MjModel.from_xml_path(str(panda_path()))


def _load_menagerie() -> mujoco.MjModel:
    try:
        from git.exc import GitError
        from robot_descriptions.loaders.mujoco import load_robot_description
    except ImportError as error:
        raise MissingDependencyError(
            "the 'menagerie' arm needs robot_descriptions: pip install 'strands-cosmos3[sim]'; "
            "or use the embedded arm, 'panda'."
        ) from error
    try:
        return load_robot_description("panda_mj_description")
    except (GitError, OSError, RuntimeError, ValueError) as error:  # no git, no network, no space, or not a model
        raise EnvironmentalError(
            f"MuJoCo Menagerie's panda could not be fetched or read ({type(error).__name__}: {error}); it is cloned "
            "from GitHub at its first use. Use the embedded arm, 'panda', or give the path of an .xml or .mjb file."
        ) from error


def load_model(spec: str | Path | mujoco.MjModel | None = None) -> mujoco.MjModel:
    """An arm's model.

    Args:
        spec: None or ``"panda"`` for the embedded arm, the path of an ``.xml`` or ``.mjb`` file, ``"menagerie"`` for
            MuJoCo Menagerie's panda (fetched over the network at its first use, and only then), or a model, returned
            as it is.

    Raises:
        UnknownNameError: Neither a known name nor a path.
        ResourceNotFoundError: The file does not exist.
        ConfigError: MuJoCo cannot compile or read the file.
        MissingDependencyError: ``menagerie`` without robot_descriptions.
        EnvironmentalError: ``menagerie`` could not be fetched.
    """
    if isinstance(spec, mujoco.MjModel):
        return spec
    if spec is None or spec == "panda":
        return load_panda()
    if spec == "menagerie":
        return _load_menagerie()
    path = Path(spec).expanduser()
    if path.suffix.lower() not in (".xml", ".mjb"):
        raise UnknownNameError("arm model", str(spec), (*MODEL_NAMES, "a path ending in .xml or .mjb"))
    if not path.is_file():
        raise ResourceNotFoundError(f"arm model {str(path)!r} does not exist; give an existing file or 'panda'.")
    try:
        if path.suffix.lower() == ".mjb":
            return mujoco.MjModel.from_binary_path(str(path))
        return mujoco.MjModel.from_xml_path(str(path))
    except (ValueError, mujoco.FatalError) as error:
        raise ConfigError(f"MuJoCo cannot load {str(path)!r}: {error}") from error
