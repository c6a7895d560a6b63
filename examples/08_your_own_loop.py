"""A control loop of your own: ask, apply step after step, ask again. Plain MuJoCo here; any
simulator or robot will do.

    python examples/08_your_own_loop.py

`get_actions_sync` takes a flat dictionary, as strands-robots gives it, and answers dictionaries of
plain floats at the rate that you tell it. This loop waits for each answer; `07_your_own_arm.py`
shows the one that does not.
"""

try:
    import mujoco
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.backends.replay import Recording
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.sim import load_panda

HZ, SECONDS = 50, 4.0

# A circle of 8 cm, as a recording: a stand-in for a model, so that this runs anywhere.
t_s = np.arange(61) / 15
T = np.repeat(
    (dh_forward(HOME_Q) @ get_embodiment("droid").tool_frame.T_parent_cosmos)[None],
    len(t_s),
    axis=0,
)
T[:, 0, 3] += 0.04 * (np.cos(np.pi * t_s) - 1)
T[:, 1, 3] += 0.04 * np.sin(np.pi * t_s)
circle = Recording(T, np.ones(len(t_s)), 15.0, HOME_Q)

model = load_panda()
data = mujoco.MjData(model)
data.qpos[:7] = data.ctrl[:7] = HOME_Q
joints = [f"joint{i + 1}" for i in range(7)]

with Cosmos3Policy("droid", robot="panda", backend="replay", model=circle) as policy:
    policy.set_robot_state_keys([*joints, "finger_joint1"])
    policy.set_control_frequency(HZ)
    path, steps = [], []
    for _ in range(int(HZ * SECONDS)):
        if not steps:
            observation = {
                name: float(data.joint(name).qpos[0]) for name in [*joints, "finger_joint1"]
            }
            steps = policy.get_actions_sync(observation, "draw a circle")
        step = steps.pop(0)
        data.ctrl[:7] = [step[name] for name in joints]
        # the answer is in metres, as observed; the tendon takes 0..255
        data.ctrl[7] = step["finger_joint1"] / 0.04 * 255
        mujoco.mj_step(model, data, nstep=round(1 / HZ / model.opt.timestep))
        path.append(data.body("hand").xpos.copy())

print("ticks           ", len(path), f"at {HZ} Hz")
moved_mm = np.round(np.ptp(path, axis=0) * 1e3, 1)
print(
    "the hand moved in",
    moved_mm,
    "mm along x, y, z, of 80; stock servos lag behind what they are told",
)
