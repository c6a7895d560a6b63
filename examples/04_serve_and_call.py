"""Serve a policy of your own on the openpi wire, and drive with it over a socket.

    python examples/04_serve_and_call.py

The policy here is four lines of arithmetic. Put a model in its place, start it with
`strands-cosmos3 serve` on another machine, and nothing of the calling side changes. Any openpi
client can call it too.
"""

try:
    import mink  # noqa: F401
    import msgpack  # noqa: F401
    import websockets  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[serve,sim]'") from None
import numpy as np

from strands_cosmos3 import create_policy
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import ActionChunk


class Wave(Backend):
    """Turns the wrist by a hundredth of a radian a row, and closes the gripper half-way."""

    info = BackendInfo(name="wave")

    def infer(self, request):
        # seven angles in rad, then the open fraction
        rows = np.tile([*request.q_rad, 0.5], (request.n_rows, 1))
        rows[:, 6] += 0.01 * np.arange(request.n_rows)
        return ActionChunk(rows, request.action_space, request.embodiment)


with PolicyServer(ServedPolicy(Wave(), "droid", "joint_pos"), ServerConfig(port=0)) as server:
    with create_policy(
        f"cosmos3://127.0.0.1:{server.port}", embodiment="droid", robot="panda"
    ) as policy:
        view = np.zeros((180, 320, 3), np.uint8)
        home = [0.0, -np.pi / 5, 0.0, -4 * np.pi / 5, 0.0, 3 * np.pi / 5, 0.0]
        observation = {f"joint{i + 1}": angle for i, angle in enumerate(home)}
        observation |= {
            "finger_joint1": 0.04,
            "wrist": view,
            "exterior_1": view,
            "exterior_2": view,
        }
        steps = policy.get_actions_sync(observation, "wave")
        timing = policy.last_rollout["timing"]

    print("steps              ", len(steps), "of", ", ".join(steps[0]))
    print("wrist, first, last ", round(steps[0]["joint7"], 3), round(steps[-1]["joint7"], 3), "rad")
    print("fingers            ", round(steps[0]["finger_joint1"], 3), "m each, half open")
    print(
        "round trip         ",
        f"{timing['infer_ms']:.1f} ms, of which inference {timing['server_infer_ms']:.2f} ms",
    )
    print("requests served    ", dict(server.metrics.requests))
