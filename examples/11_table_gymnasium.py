"""Our table with a policy of your own: any function from an observation to an action."""

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[gym,sim]'") from None
import numpy as np

env = gymnasium.make(
    "strands_cosmos3.environments:strands_cosmos3/Table-v0", task="reach", pictures=False
)
observation, info = env.reset(seed=0)
start, steps = observation["joint_pos"], 0
done = False
while not done and steps < 30:
    target = start + 0.1 * np.sin(steps / 10)  # your policy
    observation, reward, done, truncated, info = env.step(np.append(target, 1.0).astype(np.float32))
    steps += 1
print(f"{info['instruction']}: success {info['success']} after {steps} steps")
