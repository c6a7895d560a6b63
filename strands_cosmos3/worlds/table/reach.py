"""Whether a robot reaches its workspace from home."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np

from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.robots.limits import LimitsAssumedWarning
from strands_cosmos3.robots.model import data_at, joint_ids, pose_of
from strands_cosmos3.types import OFF_POSE_BOUND_M
from strands_cosmos3.worlds.table.hands import gripper_down
from strands_cosmos3.worlds.table.scene import TableScene

_HOVER_M = 0.09  # over the table, where a hand is above a cube
_ROWS = 8  # to each place
_UPWARDS = 0.5  # of the tool's z axis along the world's: 30 degrees above the horizon


def out_of_reach(scene: TableScene) -> list[str]:
    """Return a sentence that says which place of a robot's workspace its hand misses most, if by
    more than the bound of a row that is executed: it goes there from home, to one after the other.
    None of a robot with two arms.
    """
    robot = scene.robot
    if robot.limbs[1:]:
        return []
    only = scene.only
    limb = only.limb
    data = data_at(scene.model, joint_ids(scene.model, limb.joints), limb.home_rad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LimitsAssumedWarning)
        ik = LimbIK(robot, check_collisions=False)
    T_world_tcp = pose_of(data.site(only.tcp_site))
    if T_world_tcp[2, 2] > _UPWARDS:
        return [
            "at home the hand points upwards; give a home above the workspace, "
            "with the fingers down"
        ]
    T_base_world = np.linalg.inv(only.T_world_base)
    T_home = only.kinematics.forward(limb.home_rad)
    T_tcp_frame = np.linalg.inv(T_base_world @ T_world_tcp) @ T_home
    space = robot.workspace
    targets = np.tile(np.eye(4), (5, 1, 1))
    targets[:, :3, :3] = gripper_down(np.deg2rad(space.grasp_yaw_deg))
    targets[0, :2, 3] = np.mean(space.x_m), np.mean(space.y_m)
    targets[1:, :2, 3] = list(product(space.x_m, space.y_m))
    targets[:, 2, 3] = _HOVER_M
    rows = np.repeat(T_base_world @ targets @ T_tcp_frame, _ROWS, axis=0)
    missed_m = ik.solve({limb.name: rows}, ik.home).residual_m[0, _ROWS - 1 :: _ROWS]
    if missed_m.max() <= OFF_POSE_BOUND_M:
        return []
    x_m, y_m = targets[missed_m.argmax(), :2, 3]
    return [
        f"the hand does not reach the workspace from home; {_HOVER_M:g} m above the table it "
        f"misses x y {x_m:g} {y_m:g} by {1e3 * missed_m.max():.0f} mm. Give a table "
        "[workspace] with x_m, y_m and bin_m that it reaches, and a home above it"
    ]
