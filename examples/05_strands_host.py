"""strands-robots as the host: its own Robot drives the arm with our policy.

    pip install 'strands-robots>=0.5.3' 'mujoco<4' -e '.[sim,serve]'        # Python 3.12
    python examples/05_strands_host.py

A recorded motion stands in for a model here, so nothing else is needed. For a policy server, give
`policy_config` host and port instead of backend and model, and add cameras `wrist`, `exterior_1`
and `exterior_2` to the simulation (`sim.add_camera`).
"""

# ruff: noqa: I001 - strands-robots chooses MuJoCo's OpenGL as it is imported, so it comes first
try:
    from strands_robots import Robot

    import mujoco
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed: pip install 'strands-robots>=0.5.3' 'mujoco<4' "
        "-e '.[sim,serve]'"
    ) from None
import numpy as np

from strands_cosmos3 import get_embodiment, register
from strands_cosmos3.robots.model import panda_path
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.backends.replay import Recording

T_HAND_COSMOS = get_embodiment("droid").tool_frame.T_parent_cosmos
t_s = np.arange(46) / 15
q = HOME_Q + 0.3 * (1 - np.cos(2 * np.pi * t_s / 3))[:, None] * np.array(
    [1, 0.3, -0.4, 0.3, 0.3, -0.3, 0.5]
)
T_base_hand = dh_forward(q)
recording = Recording(T_base_hand @ T_HAND_COSMOS, np.where(t_s < 1.5, 1.0, 0.0), 15.0, q[0])

# register(overwrite=True) takes its name cosmos3 over
print("strands-robots knows us as ", *register())
# its own models come from GitHub; ours is embedded
sim = Robot("panda", urdf_path=str(panda_path()))
start = dict(zip([f"joint{i + 1}" for i in range(7)], map(float, q[0]), strict=True))
sim.set_joint_positions(
    start | {"finger_joint1": 0.04, "finger_joint2": 0.04}, robot_name="panda", hold=True
)

path, fingers = [], []
state, hand = mujoco.MjData(sim.mj_model), sim.mj_model.body("panda/hand").id


def look(event):
    state.qpos[:] = sim.mj_data.qpos
    mujoco.mj_kinematics(sim.mj_model, state)
    path.append(state.xpos[hand].copy())
    fingers.append(state.qpos[7])


result = sim.run_policy(
    "panda",
    instruction="follow the recording",
    policy_provider="strands_cosmos3",
    policy_config={
        "embodiment": "droid",
        "robot": "panda",
        "backend": "replay",
        "model": recording,
    },
    duration=3.0,
    control_frequency=50.0,
    fast_mode=True,
    observer=look,
)
wanted = np.stack(
    [np.interp(np.linspace(0, 3, 3000), t_s, axis) for axis in T_base_hand[:, :3, 3].T], axis=1
)
away_mm = np.linalg.norm(np.array(path)[:, None] - wanted, axis=2).min(axis=1) * 1e3
print("the run                    ", result["status"], result["content"][0]["text"].splitlines()[0])
print(
    "hand beside its path       ", f"mean {away_mm.mean():.2f} mm, at most {away_mm.max():.2f} mm"
)
print(
    "fingers, before and after  ", f"{fingers[60] * 1e3:.1f} mm and {fingers[-1] * 1e3:.1f} mm each"
)
sim.destroy()
