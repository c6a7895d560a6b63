"""An action chunk becomes joint targets: de-normalise, integrate in SE(3), solve inverse
kinematics.

    python examples/01_decode_a_chunk.py

The chunk stands in for what a Cosmos 3 checkpoint emits: 16 rows of ten normalised columns
(translation, rot6d, grasp).
"""

try:
    import mink  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3 import (
    MinkIKBridge,
    decode_cosmos_chunk_to_targets,
    get_embodiment,
    load_action_stats,
    normalize_quantile,
)
from strands_cosmos3.sim import load_panda

droid = get_embodiment("droid")
stats = load_action_stats("droid")

# Move 8 mm a row along the tool's own x, without turning, and close the gripper half-way (1 is
# open).
physical = np.tile([0.008, 0, 0, 1, 0, 0, 0, 1, 0, 1.0], (16, 1))
physical[8:, 9] = 0.0
chunk = normalize_quantile(physical, stats.q01, stats.q99)

model = load_panda()
bridge = MinkIKBridge(model, ee_frame_name="hand", ee_frame_type="body")
q_init = np.zeros(model.nq)
q_init[:7] = [0, -np.pi / 5, 0, -4 * np.pi / 5, 0, 3 * np.pi / 5, 0]  # DROID's home

out = decode_cosmos_chunk_to_targets(chunk, droid, bridge, q_init)

moved_m = (
    out["poses"][-1][:3, 3] - (bridge.ee_pose(q_init) @ droid.tool_frame.T_parent_cosmos)[:3, 3]
)
print("joint targets        ", out["qpos"].shape, "one row for each of the chunk's")
print("hand moved           ", np.round(moved_m * 1e3, 1), "mm in the robot's base")
print("gripper (1 = open)   ", out["gripper"])
print("IK residual, max     ", f"{out['tracking_error']['max_mm']:.1e} mm")
