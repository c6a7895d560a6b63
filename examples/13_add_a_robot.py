"""A robot that is not listed: Kinova's Gen3, from the model in robosuite's wheel. The first run
downloads 157 MB.
"""

from dataclasses import replace

try:
    import mink  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.control.trajectory import JointState, plan_motion
from strands_cosmos3.robots.fetch import ModelSource, archives, fetch_model
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.spec import Figures, LimbLimits, ServoGains

FOLDER = "robosuite/models/assets/robots/kinova3/"
source = ModelSource(
    "kinova3", ((archives()["robosuite"], (FOLDER,)),), f"{FOLDER}robot.xml", "MIT, as robosuite"
)
found, to_complete = inspect_model(fetch_model(source, progress=print))
print("\n".join(to_complete))

arm = replace(
    found.limb(),
    home=(0.0, 0.65, 0.0, 1.89, 0.0, 0.6, -np.pi / 2),  # robosuite's
    limits=LimbLimits(
        torque=Figures(
            (32.0,) * 5 + (13.0,) * 2, "Kinova's user guide UG-014, in robosuite's model"
        )
    ),
    # servos instead of motors
    gains=ServoGains(Figures((1000.0,) * 7, "chosen here"), Figures((100.0,) * 7, "chosen here")),
)
robot = replace(found, name="kinova3", title="Kinova Gen3", limbs=(arm,), source="robosuite 1.5.2")

ik = LimbIK(robot)  # warns of the limits that are assumed
step = np.eye(4)  # 2 cm along and 3 degrees about the hand's y axis
c, s = np.cos(np.deg2rad(3)), np.sin(np.deg2rad(3))
step[:3] = [[c, 0, s, 0], [0, 1, 0, 0.02], [-s, 0, c, 0]]
poses = [ik.forward(ik.home)["arm"] @ np.linalg.matrix_power(step, row) for row in range(1, 9)]
found = ik.solve({"arm": np.stack(poses)}, ik.home, dt_s=0.4)
motion = plan_motion(
    JointState.at_rest(arm.home_rad),
    found.q_rad[:, ik.q_address],
    np.arange(1, 9) / 10,
    ik.limits,
    1 / 600,
)
speed = np.abs(motion.spline.sample(np.arange(0, motion.spline.end_s, 1 / 600))[1])
print(
    f"residual {found.residual_m.max() * 1e6:.2f} um, velocity "
    f"{(speed / ik.limits.velocity).max():.2f} of the limit"
)
