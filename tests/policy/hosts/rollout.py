"""strands-robots' own Robot drives the embedded arm with our policy. Run by strands-robots' Python.

    rollout.py JOBS.json          one line of JSON for each job: what was measured

A job: ``way`` ("object": policy_object=; "name": policy_provider= ours; "builtin":
policy_provider="cosmos3", taken over), ``config`` (the policy's), ``q_start``, ``cameras``, ``run``
(arguments of run_policy). Every figure is read from MuJoCo's state by this script and not by the
policy, which is asked for nothing.
"""

# ruff: noqa: I001 - strands-robots chooses MuJoCo's OpenGL as it is imported, so it comes before
# mujoco
import json
import sys
from importlib.metadata import version
from pathlib import Path

from strands_robots import Robot

import mujoco
import numpy as np

import strands_cosmos3


def drive(job):
    names = strands_cosmos3.register(overwrite=job["way"] == "builtin")
    sim = Robot("panda", urdf_path=job["model"])
    for place, name in enumerate(job["cameras"]):
        added = sim.add_camera(
            name,
            position=[1.2, 0.8 * (place - 1), 0.8],
            target=[0.4, 0.0, 0.3],
            width=320,
            height=180,
        )
        assert added["status"] == "success", added
    start = {f"joint{i + 1}": angle for i, angle in enumerate(job["q_start"])}
    sim.set_joint_positions(
        start | {"finger_joint1": 0.04, "finger_joint2": 0.04}, robot_name="panda", hold=True
    )

    model, data, rows = sim.mj_model, sim.mj_data, []
    # nobody looks closely at these pictures
    model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
    copy, hand = mujoco.MjData(model), model.body("panda/hand").id

    def look(event):
        if type(event).__name__ == "RunPolicyStep":
            copy.qpos[:] = data.qpos
            mujoco.mj_kinematics(model, copy)
            gripper = [data.qpos[7], data.ctrl[7], event.action["finger_joint1"]]
            rows.append([data.time, *copy.xpos[hand], *copy.xmat[hand], *gripper])

    arguments = {"control_frequency": 50.0, "fast_mode": True, "observer": look, **job["run"]}
    if job["way"] == "object":
        with strands_cosmos3.Cosmos3Policy(**job["config"]) as policy:
            result = sim.run_policy("panda", policy_object=policy, **arguments)
    else:
        result = sim.run_policy(
            "panda", policy_provider=names[-1], policy_config=job["config"], **arguments
        )
    sim.destroy()
    texts = [block["text"] for block in result["content"] if "text" in block]
    return {"status": result["status"], "text": "\n".join(texts), "rows": np.array(rows).tolist()}


for job in json.loads(Path(sys.argv[1]).read_text()):
    told = drive(job)
    told |= {
        "torch": "torch" in sys.modules,
        "versions": [version("strands-robots"), mujoco.__version__],
    }
    print(json.dumps(told))
