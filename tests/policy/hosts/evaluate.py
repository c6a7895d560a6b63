"""strands-robots' own eval_policy on the embedded arm. Run by strands-robots' Python.

    evaluate.py MODEL RECORDING [KEYFRAME]          one line of JSON: status, text, and each control
    step's MuJoCo state

It resets the scene before each episode, to the keyframe that the robot was spawned with or, without
one, to angles of zero.
"""

# ruff: noqa: I001 - strands-robots chooses MuJoCo's OpenGL as it is imported, so it comes before
# mujoco
import json
import sys

from strands_robots import Robot

import mujoco
import numpy as np

import strands_cosmos3
import strands_cosmos3.errors

model_path, recording, *keyframe = sys.argv[1:]
strands_cosmos3.register()
sim = Robot("panda", urdf_path=model_path, **({"keyframe": keyframe[0]} if keyframe else {}))
hand, rows = sim.mj_model.body("panda/hand").id, []


def look(step, observation, action):
    copy = mujoco.MjData(sim.mj_model)
    copy.qpos[:] = sim.mj_data.qpos
    mujoco.mj_kinematics(sim.mj_model, copy)
    rows.append([step, *copy.qpos[:7], *copy.xpos[hand]])


config = {"embodiment": "droid", "robot": "panda", "backend": "replay", "model": recording}
run = {
    "instruction": "follow",
    "n_episodes": 2,
    "max_steps": 150,
    "control_frequency": 50.0,
    "seed": 3,
    "on_frame": look,
}
with strands_cosmos3.Cosmos3Policy(**config) as policy:
    try:
        result = sim.eval_policy("panda", policy_object=policy, **run)
    except strands_cosmos3.errors.Cosmos3Error as error:
        result = {"status": "error", "content": [{"text": str(error)}]}
sim.destroy()
texts = [block["text"] for block in result["content"] if "text" in block]
print(
    json.dumps(
        {"status": result["status"], "text": "\n".join(texts), "rows": np.array(rows).tolist()}
    )
)
