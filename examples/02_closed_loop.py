"""A simulated Franka does a task in a closed loop, with real dynamics, and reports what happened.

    python examples/02_closed_loop.py            # prints figures
    python examples/02_closed_loop.py film.mp4   # and films it

The scripted backend is an expert that speaks the model's own action rows; put another backend in
its place and nothing else changes.
"""

import sys

try:
    import mink  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None

from strands_cosmos3 import Robot

rollout = Robot("panda").run_policy(
    robot_name="panda",
    instruction="stack the green cube on the blue cube",
    policy_provider="cosmos3",
    policy_config={"embodiment": "droid", "backend": "scripted"},
    duration=20.0,
    control_frequency=50.0,
    task="stack",
    seed=1,
    video=sys.argv[1] if len(sys.argv) > 1 else None,
)

print("outcome        ", rollout.outcome, "-", rollout.outcome.message)
print("rows           ", rollout.steps)
print(
    "tracking       ",
    f"mean {rollout.tracking.mean_mm:.2f} mm, max {rollout.tracking.max_mm:.2f} mm",
)
print("path deviation ", f"mean {rollout.path.mean_mm:.2f} mm, max {rollout.path.max_mm:.2f} mm")
print(
    "chunk inference", {name: round(value, 1) for name, value in rollout.inference_ms.items()}, "ms"
)
print("speed          ", f"{rollout.realtime_factor:.1f} x real time")
