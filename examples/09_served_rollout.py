"""A rollout whose policy is behind a socket, with inference that takes its time.

    python examples/09_served_rollout.py             # prints figures
    python examples/09_served_rollout.py film.mp4    # and films it

The server turns the arm about its base and takes 0.3 s for each answer. `strands-cosmos3 serve`
runs a model in its place, and any server on the openpi wire would do. The robot asks for the next
chunk while it follows the present one.
"""

import sys
import time

try:
    import mink  # noqa: F401
    import msgpack  # noqa: F401
    import websockets  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[serve,sim]'") from None
import numpy as np

from strands_cosmos3 import Robot
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import ActionChunk


class Turn(Backend):
    """From wherever the arm is, a hundredth of a radian a row (0.15 rad/s)."""

    info = BackendInfo(name="turn")

    def infer(self, request):
        time.sleep(0.3)
        # seven angles in rad, then the open fraction
        rows = np.tile([*request.q_rad, 1.0], (request.n_rows, 1))
        rows[:, 0] += 0.01 * np.arange(request.n_rows)
        return ActionChunk(rows, request.action_space, request.embodiment)


with PolicyServer(ServedPolicy(Turn(), "droid", "joint_pos"), ServerConfig(port=0)) as server:
    rollout = Robot("panda").run_policy(
        instruction="turn to the left",
        policy_provider="cosmos3",
        policy_config={"embodiment": "droid", "port": server.port},
        duration=5.0,
        realtime=True,
        video=sys.argv[1] if len(sys.argv) > 1 else None,
    )

q = rollout.arrays["q_achieved_rad"]
print("outcome  ", rollout.outcome)
print("turned by", round(float(q[-1, 0] - q[0, 0]), 2), "rad in", rollout.duration_s, "s")
print(
    "latency  ",
    {name: round(ms) for name, ms in rollout.latency_ms.items()},
    "ms",
    f"({rollout.latency_clock})",
)
print(
    "counters ",
    {
        name: rollout.counters[name]
        for name in ("chunks", "deadline_misses", "idle_ticks", "expired")
    },
)
print("tracking ", f"mean {rollout.tracking.mean_mm:.2f} mm, max {rollout.tracking.max_mm:.2f} mm")
