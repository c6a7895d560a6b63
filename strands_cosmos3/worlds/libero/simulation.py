"""The simulation behind one LIBERO task, without pictures unless they are asked for.

Four things make an episode repeatable, and published evaluations have missed some of them. Fixtures
stand where ``numpy.random`` puts them at every reset, so it is seeded before. The controller's goal
and the gripper's ramp outlive a state that is merely set, so the reset comes first. Objects fall
for some steps before the first action. And what robosuite observes after a step, poses and pictures
alike, was sampled some physics steps earlier; how many depends on how often the environment was
reset, so here the clocks of all sensors start anew, as in a fresh environment.

LIBERO's pictures have the bottom row first. Everybody trains on pictures turned by 180 degrees,
which are upright but mirrored left to right (cosmos-framework ``closed_loop_eval.py`` 396-397,
openpi ``main.py`` 115-122, lerobot ``LiberoProcessorStep``).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3
from strands_cosmos3.checks import F64
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.sim.render import choose_gl
from strands_cosmos3.worlds.libero.protocol import CONTROL_HZ, OPEN, LiberoConfig
from strands_cosmos3.worlds.libero.suites import Goal, LiberoTask, load_init_states

Picture = NDArray[np.uint8]
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""View -> robosuite's camera, in the order in which they stand side by side (cosmos-framework
``closed_loop_eval.py`` 404).
"""
TCP = "tcp"
"""Key of the pose [4, 4] of the point between the fingers in the world; every other key is an
object's extent [2, 3].
"""
_MOST_STEPS = 10_000  # robosuite refuses to go on after its own horizon; ours ends episodes


class LiberoSimulation:
    """Steps one task. Call :meth:`reset` first; :meth:`close` frees OpenGL, which otherwise leaks.

    Args:
        pictures: Whether :meth:`rendered` can be called; without it, OpenGL is not needed.

    Attributes:
        horizon: Most actions of an episode.
        steps: Actions since the reset.
        observed: robosuite's observation after the last step; it includes the objects' poses, which
            no policy may see.

    Raises:
        MissingDependencyError, RenderError: LIBERO is not installed; OpenGL does not start.
    """

    def __init__(self, task: LiberoTask, config: LiberoConfig | None = None, pictures: bool = True):
        self.task = task
        self.config = config or LiberoConfig()
        self.horizon = self.config.steps(task.suite.horizon)
        self.steps = 0
        self.can_draw = pictures
        if pictures:
            os.environ.setdefault("MUJOCO_GL", choose_gl())  # robosuite reads it at its import
        with needed_by("LIBERO"):
            from libero.libero.envs.env_wrapper import ControlEnv  # pyright: ignore
        self._env: Any = ControlEnv(
            bddl_file_name=str(task.problem_file),
            control_freq=CONTROL_HZ,
            horizon=_MOST_STEPS,
            use_camera_obs=pictures,
            has_offscreen_renderer=pictures,
            camera_names=list(CAMERAS.values()),
            camera_heights=self.config.picture_px,
            camera_widths=self.config.picture_px,
        )
        self.observed: dict[str, Any] = {}
        self._views: dict[str, Picture] = {}
        self._look(False)

    def reset(self, init_state: int | None, seed: int = 0) -> None:
        """Begin the episode of an official initial state, 0 to 49, wait, and look; ``seed`` places
        the fixtures.

        None is a layout that the seed draws from the regions of the problem file.
        """
        outside = np.random.get_state()  # noqa: NPY002 - LIBERO draws from it
        try:
            np.random.seed(seed)  # noqa: NPY002
            for sensor in self._sensors.values():
                sensor.reset()
            self._env.reset()
        finally:
            np.random.set_state(outside)  # noqa: NPY002
        self.observed = self._env.set_init_state(
            self._env.get_sim_state()
            if init_state is None
            else load_init_states(self.task.suite.name, self.task.number)[init_state]
        )
        if self.can_draw and not self.config.wait_steps:
            self._views = self.rendered()
        for left in reversed(range(self.config.wait_steps)):
            self.step([0, 0, 0, 0, 0, 0, OPEN], look=self.can_draw and not left)
        self.steps = 0

    def step(self, action: Any, look: bool = False) -> bool:
        """Apply an action [7] for a twentieth of a second; return whether the task's goal is
        fulfilled.

        ``look`` also takes the pictures that :meth:`views` returns; in software they cost ten times
        the step.
        """
        self._look(look)
        self.observed, _, fulfilled, _ = self._env.step(action)
        self._views = (
            {view: self.observed.pop(f"{camera}_image") for view, camera in CAMERAS.items()}
            if look
            else {}
        )
        self._look(False)
        self.steps += 1
        return bool(fulfilled)

    def _look(self, look: bool) -> None:
        """Switch the cameras on or off, in step with the other sensors."""
        if not self.can_draw:
            if look:
                raise ConfigError(
                    "this LIBERO world was made without pictures; make another with pictures=True."
                )
            return
        clock = self._sensors["robot0_eef_pos"]
        for camera in CAMERAS.values():
            sensor = self._sensors[f"{camera}_image"]
            if sensor.is_enabled() != look:
                sensor.set_enabled(look)
                sensor.set_active(look)
                sensor._time_since_last_sample = clock._time_since_last_sample
                sensor._sampled = clock._sampled

    @property
    def _sensors(self) -> dict[str, Any]:
        return self._env.env._observables

    def fulfilled(self, goal: Goal) -> bool:
        """Return whether a goal is fulfilled now, the task's or another one in this scene."""
        return all(bool(self._env.env._eval_predicate(list(predicate))) for predicate in goal)

    @property
    def time_is_up(self) -> bool:
        """Whether the horizon is reached."""
        return self.steps >= self.horizon

    @property
    def state(self) -> F64:
        """Position [3] of the point between the fingers in the world, its rotation vector [3],
        and the fingers' travel [2].
        """
        position, xyzw, fingers = (
            self.observed[f"robot0_{name}"] for name in ("eef_pos", "eef_quat", "gripper_qpos")
        )
        return np.concatenate((position, _rotation_vector(xyzw), fingers))

    def views(self) -> dict[str, Picture]:
        """Return the pictures of the last step, or of the reset, bottom row first:
        :func:`as_trained` and :func:`as_seen` turns them.

        Raises:
            ConfigError: That step did not look.
        """
        if not self._views:
            raise ConfigError(
                "the last step of this LIBERO world took no pictures; call step(action, look=True)."
            )
        return self._views

    def rendered(self) -> dict[str, Picture]:
        """Draw the views as they are now, e.g. for a film; :meth:`views` are robosuite's own
        observation.
        """
        px = self.config.picture_px
        return {
            view: self._env.sim.render(width=px, height=px, camera_name=camera)
            for view, camera in CAMERAS.items()
        }

    @property
    def robosuite(self) -> Any:
        """robosuite's environment: model, objects and state, for experts and tests."""
        return self._env.env

    def close(self) -> None:
        """Free the simulation; closing twice is harmless."""
        if self._env is not None:
            self._env.close()
        self._env = None


def _rotation_vector(xyzw: F64) -> F64:
    """Return a quaternion's rotation vector as robosuite's ``quat2axisangle``: of length up to 2
    pi, not the shorter way.
    """
    w = float(np.clip(xyzw[3], -1, 1))
    sine = np.sqrt(1 - w * w)
    return np.zeros(3) if np.isclose(sine, 0) else xyzw[:3] * 2 * np.arccos(w) / sine


def as_trained(rendered: Picture) -> Picture:
    """Return a rendered picture [H, W, 3] turned by 180 degrees: upright and mirrored."""
    return np.ascontiguousarray(rendered[::-1, ::-1])


def as_seen(rendered: Picture) -> Picture:
    """Return a rendered picture upright and not mirrored."""
    return np.ascontiguousarray(rendered[::-1])


def side_by_side(views: dict[str, Picture]) -> Picture:
    """Return the views in one picture [H, 2 W, 3], third person left, wrist right."""
    return np.concatenate([views[name] for name in CAMERAS], axis=1)


def privileged(simulation: LiberoSimulation) -> dict[str, F64]:
    """Return the pose of the hand and the lowest and highest corner [2, 3] in m of every
    object's collision geoms.
    """

    R = quaternion_to_matrix(simulation.observed["robot0_eef_quat"])
    robosuite = simulation.robosuite
    extents = {
        name: _extent(robosuite, body.root_body) for name, body in robosuite.objects_dict.items()
    }
    return {TCP: se3(R, simulation.observed["robot0_eef_pos"]), **extents}


def _extent(robosuite: Any, root_body: str) -> F64:
    model = robosuite.sim.model._model
    data = robosuite.sim.data._data
    root = robosuite.sim.model.body_name2id(root_body)
    geoms = np.flatnonzero(
        (model.body_rootid[model.geom_bodyid] == root) & (model.geom_contype > 0)
    )
    R = data.geom_xmat[geoms].reshape(-1, 3, 3)
    boxes = model.geom_aabb[geoms]
    centre = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", R, boxes[:, :3])
    reach = np.einsum("gij,gj->gi", np.abs(R), boxes[:, 3:])
    return np.array([(centre - reach).min(axis=0), (centre + reach).max(axis=0)])
