"""A Panda of the tests' own, to judge collisions: no file, list or code of the project is used.

Frames are the published Denavit-Hartenberg figures (modified convention), shapes the coarse ones of
franka_description. MuJoCo finds the contacts. Bodies are numbered along the chain: 0 to 7 the
links, 8 the hand, 9 and 10 the fingers.
"""

import mujoco
import numpy as np

FRAMES = (  # a [m], d [m], alpha in quarter turns, of links 1 to 7
    (0, 0.333, 0),
    (0, 0, -1),
    (0, 0.316, 1),
    (0.0825, 0, 1),
    (-0.0825, 0.384, -1),
    (0, 0, 1),
    (0.088, 0, 1),
)
CAPSULES = {  # link -> (end, end, radius) [m]
    0: [((-0.10, 0, 0.065), (-0.02, 0, 0.065), 0.06)],
    1: [((0, 0, -0.19), (0, 0, -0.05), 0.06)],
    2: [((0, 0, -0.06), (0, 0, 0.06), 0.06)],
    3: [((0, 0, -0.22), (0, 0, -0.07), 0.06)],
    4: [((0, 0, -0.06), (0, 0, 0.06), 0.06)],
    5: [((0, 0, -0.31), (0, 0, -0.21), 0.06), ((0, 0.08, -0.20), (0, 0.08, -0.06), 0.03)],
    6: [((0, 0, -0.07), (0, 0, 0.01), 0.05)],
    7: [((0, 0, -0.06), (0, 0, 0.065), 0.04)],
}
HAND, FINGERS = 8, (9, 10)
Q_MIN = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
Q_MAX = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])


def _text(numbers):
    return " ".join(f"{number:.17g}" for number in numbers)


def _xml(table_height_m):
    text = ""
    for link in range(8):
        if link:
            a, d, turns = FRAMES[link - 1]
            angle = turns * np.pi / 2
            place = _text((a, -d * np.sin(angle), d * np.cos(angle)))
            text += f'<body name="{link}" pos="{place}" quat="{_text((np.cos(angle / 2), np.sin(angle / 2), 0, 0))}"><joint/>'
        else:
            text += '<body name="0">'
        for end, other, radius in CAPSULES[link]:
            text += f'<geom type="capsule" fromto="{_text((*end, *other))}" size="{radius}"/>'
    yaw = -np.pi / 8
    text += f'<body name="8" pos="0 0 .107" quat="{_text((np.cos(yaw), 0, 0, np.sin(yaw)))}">'
    text += '<geom type="box" size=".0316 .1021 .0329" pos="0 0 .0329"/>'
    for body, quat in zip(FINGERS, ("1 0 0 0", "0 0 0 1"), strict=True):
        text += (
            f'<body name="{body}" pos="0 0 .0584" quat="{quat}"><joint type="slide" axis="0 1 0"/>'
        )
        text += '<geom type="box" size=".01 .0085 .017" pos="0 .0145 .017"/>'
        text += '<geom type="box" size=".0095 .006 .0097" pos="0 .006 .0443"/></body>'
    text += "</body>" * 9
    if table_height_m is not None:
        text += f'<geom type="box" size=".3 .4 .05" pos=".6 0 {table_height_m - 0.05}"/>'
    return f'<mujoco><compiler angle="radian"/><worldbody>{text}</worldbody></mujoco>'


class PandaOracle:
    def __init__(self, table_height_m=None):
        self.model = mujoco.MjModel.from_xml_string(_xml(table_height_m))
        self.data = mujoco.MjData(self.model)

    def contacts(self, q_rad, opening_m=0.04):
        """[(body, body, depth in metres)] of the penetrations at arm angles [7]; the world is
        None.
        """
        self.data.qpos[:] = (*q_rad[:7], opening_m, opening_m)
        mujoco.mj_forward(self.model, self.data)
        names = [None, *range(11)]
        found = []
        for contact in self.data.contact:
            one, two = (names[int(self.model.geom_bodyid[geom])] for geom in contact.geom)
            if contact.dist < 0 and not by_design(one, two):
                found.append((one, two, -float(contact.dist)))
        return found

    def deepest_m(self, q_rows):
        """[N] depth at each of N rows; 0 where nothing touches."""
        return np.array(
            [max((depth for *_, depth in self.contacts(q)), default=0.0) for q in q_rows]
        )


def by_design(one, two):
    """Whether two bodies may touch: neighbours, and neighbours' neighbours among the links; what
    is fixed to the table.
    """
    if one is None or two is None:
        return 0 in (one, two)
    one, two = sorted((one, two))
    if two <= 7:
        return two - one <= 2
    return one >= 7 or (two == HAND and one == 6)


def between(q_start, q_rows, parts=5):
    """Points on straight lines in joint space from the start through the rows, the rows
    included.
    """
    q = np.vstack([q_start, q_rows])
    share = (np.arange(parts) + 1)[None, :, None] / parts
    return (q[:-1, None] + (q[1:] - q[:-1])[:, None] * share).reshape(-1, q.shape[1])


def random_chunk(rng, oracle, rows=32):
    """A start anywhere in the joints' range that touches nothing, and poses [rows, 4, 4] of the
    hand on a wandering path.
    """
    from strands_cosmos3.actions.rotations import so3_exp
    from strands_cosmos3.robots.panda import dh_forward

    while True:
        q = rng.uniform(Q_MIN + 0.02, Q_MAX - 0.02)
        if not oracle.contacts(q):
            break
    velocity, spin = rng.normal(size=(2, 3))
    speed_m, speed_rad = rng.uniform(0.01, 0.03), np.deg2rad(rng.uniform(1, 5))
    T, poses = dh_forward(q), []
    for _ in range(rows):
        velocity, spin = velocity + 0.3 * rng.normal(size=3), spin + 0.3 * rng.normal(size=3)
        T = T.copy()
        T[:3, 3] += speed_m * velocity / np.linalg.norm(velocity)
        T[:3, :3] = T[:3, :3] @ so3_exp(speed_rad * spin / np.linalg.norm(spin))
        poses.append(T)
    return q, np.stack(poses)
