"""Feasible motions of any robot's limbs: steps of 1 to 3 cm and 1 to 5 degrees a row, drawn by
each limb's own Jacobian.
"""

from __future__ import annotations

import mujoco
import numpy as np

from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.robots.catalogue import packaged_robots, source_of

BUNDLED_ROBOTS = [name for name, robot in packaged_robots().items() if source_of(robot) is None]
"""Those whose model need not be fetched."""
SPEED_SHARE, ROOM_RAD, TRIES = 0.8, 0.05, 400


def feasible_motion(ik: LimbIK, rng: np.random.Generator, rows: int, fps: float) -> np.ndarray:
    """[rows + 1, nq] configurations; every limb within its ranges and below 80 % of its speed
    limits, none in collision.
    """
    for _ in range(TRIES):
        q = _walk(ik, rng, rows, fps)
        if q is not None and (
            ik.collisions is None or ik.collisions.examine(q[0], q[1:]).row is None
        ):
            return q
    raise AssertionError(f"no feasible motion of {ik.robot.name} was found")


def limb_poses(ik: LimbIK, q: np.ndarray) -> dict[str, np.ndarray]:
    """By the limb's name, [T, 4, 4] poses of its frame in its base."""
    rows = [ik.forward(row) for row in q]
    return {name: np.stack([row[name] for row in rows]) for name in ik.bridges}


def _walk(ik: LimbIK, rng: np.random.Generator, rows: int, fps: float) -> np.ndarray | None:
    out, data = np.repeat(ik.home[None], rows + 1, axis=0), mujoco.MjData(ik.model)
    out[:, ik.q_address] += rng.uniform(-0.3, 0.3, len(ik.q_address))
    for name, bridge in ik.bridges.items():
        limits, address = bridge.limits, bridge.q_address
        direction, axis = rng.normal(size=(2, 3))
        for i in range(rows):
            direction, axis = (
                v / np.linalg.norm(v) + 0.3 * rng.normal(size=3) for v in (direction, axis)
            )
            wanted = np.concatenate(
                (direction / np.linalg.norm(direction), axis / np.linalg.norm(axis))
            )
            wanted *= np.repeat((rng.uniform(0.012, 0.028), np.deg2rad(rng.uniform(1.2, 4.8))), 3)
            data.qpos[:] = out[i]
            step = _step(
                ik.model,
                data,
                ik.robot.limb(name),
                wanted,
                [ik.model.joint(j).dofadr[0] for j in bridge.joint_names],
            )
            angles = out[i, address] + step
            if (np.abs(step) * fps > SPEED_SHARE * limits.velocity).any():
                return None
            if (angles < limits.q_min + ROOM_RAD).any() or (angles > limits.q_max - ROOM_RAD).any():
                return None
            out[i + 1, address] = angles
    return out if _within(limb_poses(ik, out)) else None


def _step(model, data, limb, wanted, dofs) -> np.ndarray:
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    J = np.zeros((6, model.nv))
    mujoco.mj_jacBody(model, data, J[:3], J[3:], model.body(limb.frame).id)
    return np.linalg.pinv(J[:, dofs], rcond=1e-3) @ wanted


def _within(poses: dict[str, np.ndarray]) -> bool:
    for T in poses.values():
        moved = np.linalg.norm(np.diff(T[:, :3, 3], axis=0), axis=1)
        turned = np.arccos(
            np.clip((np.einsum("nij,nij->n", T[:-1, :3, :3], T[1:, :3, :3]) - 1) / 2, -1, 1)
        )
        if (
            moved.min() < 0.01
            or moved.max() > 0.03
            or turned.min() < np.deg2rad(1)
            or turned.max() > np.deg2rad(5)
        ):
            return False
    return True
