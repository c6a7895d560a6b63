"""The unmodified ActionChunkBroker of openpi-client 0.1.2: openpi_broker.py PORT STEPS. Prints one
JSON line a step: its row of actions.
"""

import json
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

steps = int(sys.argv[2])
broker = ActionChunkBroker(WebsocketClientPolicy("127.0.0.1", int(sys.argv[1])), steps)
observation = {"prompt": "lift the cup", "observation/image": np.zeros((256, 256, 3), np.uint8)}
for _ in range(steps + 1):  # the last is the first of a second chunk
    print(json.dumps(broker.infer(observation)["actions"].tolist()), flush=True)
