"""A LIBERO task with a policy of openpi, whose server is on port 8000."""

import numpy as np

INSTALL = "pip install openpi-client -e '.[gym]'; make libero"
try:
    import gymnasium
    from openpi_client.websocket_client_policy import WebsocketClientPolicy
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: {INSTALL}") from None

policy = WebsocketClientPolicy(port=8000)
env = gymnasium.make(
    "strands_cosmos3.environments:strands_cosmos3/Libero-v0", suite="libero_object", task=0
)
seen, info = env.reset(seed=0, options={"init_state": 0})
done = truncated = False
while not (done or truncated):
    views = {"observation/image": seen["agentview"], "observation/wrist_image": seen["wrist"]}
    answer = policy.infer(
        {**views, "observation/state": seen["state"], "prompt": info["instruction"]}
    )
    for action in np.asarray(answer["actions"])[:5]:
        seen, reward, done, truncated, info = env.step(action)
        if done or truncated:
            break
print(f"{info['instruction']}: success {info['success']}")
