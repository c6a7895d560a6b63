"""Ask a Cosmos 3 checkpoint in this process: what to do, and then what would happen.

Without an argument it is the packaged policy, a small checkpoint of the genuine architecture that
knows one simulated table: every step below is the one that a released checkpoint takes. With `pip
install 'strands-cosmos3[engine]'`:

    python examples/03_ask_a_checkpoint.py [CHECKPOINT]
"""

import sys

import numpy as np

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[engine]'") from None

from strands_cosmos3 import Cosmos3Engine, Cosmos3PolicyProcessor
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import Sampling

folder = sys.argv[1] if len(sys.argv) > 1 else embedded_checkpoint()

with Cosmos3Engine.from_pretrained(
    folder, device="cpu", dtype=torch.float32, decode_video=True
) as engine:
    processor = Cosmos3PolicyProcessor.for_checkpoint(
        engine.checkpoint, domain_name="droid", action_stats_path="droid"
    )
    views = {
        name: np.full((180, 320, 3), 60 * i, np.uint8)
        for i, name in enumerate(("wrist", "exterior_1", "exterior_2"), 1)
    }

    scene = {"images": views, "task": "pick up the red cube"}
    if engine.checkpoint.state_row is not None:
        # the hand's pose in the base (metres, rot6d), pointing down, and an open gripper
        scene["state"] = [0.5, 0.0, 0.4, 1, 0, 0, 0, -1, 0, 1.0]

    # What should the robot do?
    question = processor.preprocess(scene)
    print("caption:", question.prompt)
    result = engine.step(question.request(Sampling(num_steps=4)))
    actions = processor.postprocess(result, question)["action"]
    print(
        "actions:",
        tuple(actions.shape),
        "in metres, rot6d and an opening; the first row:",
        actions[0, 0].numpy().round(4),
    )
    print("milliseconds:", {part: round(ms) for part, ms in result["timing"].items()})

    # And if it does that, what happens? The answer goes back in as it is.
    question = processor.preprocess(scene | {"mode": "forward_dynamics", "cond_action": actions})
    result = engine.step(question.request(Sampling(num_steps=4)))
    print(
        "predicted frames:",
        tuple(result["pixels"].shape),
        "values",
        f"{result['pixels'].min():.2f}..{result['pixels'].max():.2f}",
    )
    echoed = processor.postprocess(result, question)["action"]
    print("the actions came back unchanged:", bool(torch.allclose(echoed, actions, atol=1e-6)))

    # The same prompt again: its keys and values are kept, so the text tower does not run.
    runs = engine.text_cache.prefills
    engine.step(question.request(Sampling(num_steps=1), seed=1))
    print("runs of the text tower for the next call:", engine.text_cache.prefills - runs)
