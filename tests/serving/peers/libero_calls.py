"""The client of NVIDIA's LIBERO evaluation, unmodified: libero_calls.py CHECKOUT PACKAGES PORT.
Prints one JSON line a call.

PACKAGES is a folder with requests and scipy, for what this environment lacks. Modules that need
more are empty, but for the sentences about views, which are read from the checkout's own file.
"""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

checkout, packages, port = sys.argv[1:]
sys.path.append(packages)  # behind this environment's own numpy

import numpy as np  # noqa: E402

ACTION = "cosmos_framework.data.generator.action"
views = Path(checkout, ACTION.replace(".", "/"), "utils/viewpoint_utils.py").read_text()
sentences = next(
    ast.literal_eval(node.value)
    for node in ast.parse(views).body
    if isinstance(node, ast.AnnAssign) and node.target.id == "DEFAULT_VIEWPOINT_TEMPLATES"
)
for name, members in {
    f"{ACTION}.libero_pose_utils": {
        "libero_rotation_format": None,
        "libero_rotation_space_from_action_dim": None,
    },
    f"{ACTION}.utils.pose_utils": {"convert_rotation": None},
    f"{ACTION}.utils.viewpoint_utils": {"DEFAULT_VIEWPOINT_TEMPLATES": sentences},
}.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)
sys.path.insert(0, str(Path(checkout, "cosmos_framework/simulation/libero")))
import closed_loop_eval  # noqa: E402


def views_of(step):
    """Third person and wrist, each of one colour with a bright bar at the top left."""
    pictures = [np.full((256, 256, 3), value + step, np.uint8) for value in (40, 80)]
    for picture in pictures:
        picture[:64, :32] = 255
    return pictures


prompt = closed_loop_eval._augment_task_prompt_with_viewpoint(
    "put the soup in the basket", ["agentview", "wrist"]
)
client = closed_loop_eval.ActionEnvironmentClient(
    f"http://127.0.0.1:{port}", "libero", prompt, 256, 30.0
)
assert client.check_health()
print(json.dumps({"width": client.get_info()["raw_action_dim"]}), flush=True)
for step in range(2):
    print(json.dumps({"action": client.predict(views_of(step))["action"]}), flush=True)
client.notify_next_episode()
print(json.dumps({"actions": client.predict_batch([views_of(0), views_of(1)])}), flush=True)
client.domain_name = "nowhere"
try:
    client.predict(views_of(0))
except RuntimeError as error:
    print(json.dumps({"error": str(error)}), flush=True)
