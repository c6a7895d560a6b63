"""The unmodified openpi-client 0.1.2, in its own environment: openpi_calls.py PORT [TOKEN].
Prints one JSON line a call.
"""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

assert np.__version__ < "2"
policy = WebsocketClientPolicy(
    "127.0.0.1", int(sys.argv[1]), api_key=sys.argv[2] if len(sys.argv) > 2 else None
)
print(json.dumps(policy.get_server_metadata()), flush=True)
observation = {
    "prompt": "pick up the red cube",
    "observation/joint_position": np.arange(7, dtype=np.float64) / 10,
    "observation/gripper_position": np.float32(0.2),
    "observation/wrist_image_left": np.full((360, 640, 3), 1, np.uint8),
    "observation/exterior_image_1_left": np.full((360, 640, 3), 2, np.uint8),
    "observation/exterior_image_2_left": np.full((360, 640, 3), 3, np.uint8),
    "session_id": "ignored",
}
for _ in range(2):
    reply = policy.infer(observation)
    assert reply["action"].dtype == np.float32
    assert np.array_equal(reply["action"], reply["actions"])
    print(
        json.dumps({"rows": reply["action"].tolist(), "timing": reply["server_timing"]}), flush=True
    )
try:
    policy.infer({"prompt": "no state"})
except RuntimeError as error:
    print(json.dumps({"error": str(error)}), flush=True)
