"""Ways to bring a cube to its goal without the arm's doing, in the real simulation."""

from __future__ import annotations

import mujoco
import numpy as np

from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.policy import Policy
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import HOME_Q, T_hand_tcp, dh_forward
from strands_cosmos3.worlds.table.tasks import (
    LIFT_M,
    REACH_M,
    REST_M_S,
    STACK_ASIDE_M,
    STACK_HEIGHT_M,
)

GRAVITY = 9.81


class Motion(Policy):
    """Follows ``at(time_s) -> (angles [7], open fraction)`` on a robot's clock, by joint
    targets.
    """

    provider_name, requires_images, hz = "motion", False, 50.0

    def __init__(self, robot, at=lambda _: (HOME_Q, 1.0)):
        self.robot, self.at, self.keys = robot, at, []

    def set_robot_state_keys(self, robot_state_keys):
        self.keys = robot_state_keys

    def set_control_frequency(self, hz):
        self.hz = hz

    async def get_actions(self, observation_dict, instruction, **kwargs):
        times = self.robot.now_s() + np.arange(1, 11) / self.hz
        rows = [np.r_[q, 0.04 * opening] for q, opening in map(self.at, times)]
        return [dict(zip(self.keys, map(float, row), strict=True)) for row in rows]


class Hand:
    """Moves a cube in the simulation; use it as ``on_tick``.

    Attributes:
        looked_done_s: Longest time for which the final state alone met the task's condition of 0.1.
    """

    def __init__(self, task, cube="cube_red", onto="cube_blue"):
        self.task, self.cube, self.onto = task, cube, onto
        self.looked_done_s, self._since_s = 0.0, None

    def act(self, robot):
        """What it does in a tick."""

    def __call__(self, robot):
        self.act(robot)
        now_s = robot.now_s()
        if not looks_done(robot, self.task, self.cube, self.onto):
            self._since_s = None
            return
        self._since_s = now_s if self._since_s is None else self._since_s
        self.looked_done_s = max(self.looked_done_s, now_s - self._since_s)

    def put(self, robot, xyz, R=None):
        """Put the cube somewhere, at rest."""
        at, dof, quat = (
            robot.scene.bodies[self.cube].qpos,
            robot.scene.bodies[self.cube].dof,
            np.array([1.0, 0, 0, 0]),
        )
        if R is not None:
            mujoco.mju_mat2Quat(quat, np.ravel(R))
        robot.data.qpos[at : at + 7] = [*xyz, *quat]
        robot.data.qvel[dof : dof + 6] = 0.0

    def where(self, robot, name=None):
        return robot.data.xpos[robot.scene.bodies[name or self.cube].id].copy()

    def fling(self, robot, velocity):
        dof = robot.scene.bodies[self.cube].dof
        robot.data.qvel[dof : dof + 6] = [*velocity, 0, 0, 0]


class Teleport(Hand):
    """Puts the cube at ``place(robot)`` once, or at every tick."""

    def __init__(self, task, place, at_s=0.3, until_s=0.32):
        super().__init__(task)
        self.place, self.at_s, self.until_s = place, at_s, until_s

    def act(self, robot):
        if self.at_s <= robot.now_s() < self.until_s:
            self.put(
                robot,
                self.place(robot),
                robot.data.site_xmat[robot.scene.only.tcp_site] if self.task == "pick" else None,
            )


class Throw(Hand):
    """Gives the cube a velocity, with which it arrives after ``flight_s`` at ``place(robot)`` (a
    point for its centre).
    """

    def __init__(self, task, place, flight_s, at_s=0.3):
        super().__init__(task)
        self.place, self.flight_s, self.at_s, self.thrown = place, flight_s, at_s, False

    def act(self, robot):
        if not self.thrown and robot.now_s() >= self.at_s:
            self.thrown = True
            way = self.place(robot) - self.where(robot)
            self.fling(robot, way / self.flight_s + np.array([0, 0, GRAVITY * self.flight_s / 2]))


class Carry(Hand):
    """Carries the cube along ``places(robot)``, weightless, with a velocity that fits its
    motion; then lets go.
    """

    def __init__(self, task, places, speed=0.25, stay_s=0.0):
        super().__init__(task)
        self.places, self.speed, self.left, self.stay_s, self.arrived_s = (
            places,
            speed,
            None,
            stay_s,
            None,
        )

    def act(self, robot):
        if self.left is None:
            self.left = list(self.places(robot))
        body = robot.scene.bodies[self.cube].id
        if self.left and np.linalg.norm(self.left[0] - self.where(robot)) < 0.003:
            self.left.pop(0)
        if not self.left:
            self.arrived_s = robot.now_s() if self.arrived_s is None else self.arrived_s
            staying = robot.now_s() < self.arrived_s + self.stay_s
            robot.data.xfrc_applied[body, 2] *= staying
            if staying:
                self.fling(robot, np.zeros(3))
            return
        robot.data.xfrc_applied[body, 2] = GRAVITY * robot.scene.cubes[self.cube].mass_kg
        way = self.left[0] - self.where(robot)
        self.fling(robot, way * min(50.0 / 2, self.speed / np.linalg.norm(way)))


def touching(robot, cube):
    """Names of the bodies that touch a cube."""
    model, body = robot.scene.model, robot.scene.bodies[cube].id
    pairs = model.geom_bodyid[robot.data.contact.geom]
    of_cube = pairs[(pairs == body).any(axis=1)]
    return {model.body(other).name for other in set(of_cube.ravel().tolist()) - {body}}


def looks_done(robot, task, cube, onto):
    """The tasks' conditions of release 0.1: the final state, and fingers only."""
    scene, data = robot.scene, robot.data
    at, dof = data.xpos[scene.bodies[cube].id], scene.bodies[cube].dof
    fingers = touching(robot, cube) & {"left_finger", "right_finger"}
    left = not fingers and np.linalg.norm(data.qvel[dof : dof + 3]) < REST_M_S
    if task == "reach":
        return np.linalg.norm(data.site_xpos[scene.only.tcp_site] - at) < REACH_M
    if task == "pick":
        return at[2] - 0.02 >= LIFT_M and len(fingers) == 2
    if task == "place":
        return scene.bin.contains(at) and left
    off = at - data.xpos[scene.bodies[onto].id]
    return np.linalg.norm(off[:2]) < STACK_ASIDE_M and abs(off[2] - 0.04) < STACK_HEIGHT_M and left


class Creep(Hand):
    """Pushes the cube at 8 mm/s, too slowly to count as moving, from ``at_s`` until it has come
    ``way`` [3].
    """

    def __init__(self, task, way, at_s):
        super().__init__(task)
        self.way, self.at_s, self.start = np.asarray(way), at_s, None

    def act(self, robot):
        if robot.now_s() < self.at_s:
            return
        self.start = self.where(robot) if self.start is None else self.start
        if np.linalg.norm(self.where(robot) - self.start) < np.linalg.norm(self.way):
            at = robot.scene.bodies[self.cube].qpos
            robot.data.qpos[at : at + 3] += 0.008 / 50.0 * self.way / np.linalg.norm(self.way)


class SlideUnder(Hand):
    """Puts the other cube under this one, which the hand holds, and leaves it there."""

    def __init__(self, task, at_s):
        super().__init__(task)
        self.at_s, self.done = at_s, False

    def act(self, robot):
        if not self.done and robot.now_s() >= self.at_s:
            self.done, at = True, robot.scene.bodies[self.onto].qpos
            robot.data.qpos[at : at + 3] = [*self.where(robot)[:2], 0.02]
            robot.data.qpos[at + 3 : at + 7] = robot.data.qpos[
                robot.scene.bodies[self.cube].qpos + 3 :
            ][:4]


def through(points):
    """``at`` for :class:`Motion`: turned as at home, its tool centre point is led through
    (time_s, xyz, open fraction).
    """
    times, places, openings = [points[0][0]], [np.asarray(points[0][1])], [points[0][2]]
    for time_s, xyz, opening in points[1:]:
        share = np.linspace(0, 1, 9)[1:]
        times += list(times[-1] + share * (time_s - times[-1]))
        places += list(places[-1] + share[:, None] * (np.asarray(xyz) - places[-1]))
        openings += list(openings[-1] + share * (opening - openings[-1]))
    T = np.repeat(dh_forward(HOME_Q)[None], len(places), axis=0)
    T[:, :3, 3] = places - T_hand_tcp[2, 3] * T[0, :3, 2]
    solution = MinkIKBridge(load_panda()).solve(T, np.r_[HOME_Q, 0.04, 0.04])
    assert solution.converged.all()
    q = solution.q_rad[:, :7]
    return lambda t: (
        np.array([np.interp(t, times, q[:, j]) for j in range(7)]),
        float(np.interp(t, times, openings)),
    )
