"""Ask a Cosmos 3 checkpoint in this process: what to do, and then what would happen.

Without released weights, a small random checkpoint of the genuine architecture is made first: every
step below is the one that a released checkpoint takes, and only the numbers mean nothing. With `pip
install 'strands-cosmos3[engine]'`:

    python examples/03_ask_a_checkpoint.py [CHECKPOINT]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from strands_cosmos3 import Cosmos3Engine, Cosmos3PolicyProcessor
from strands_cosmos3.embodiments import Sampling
from strands_cosmos3.engine.factory import write_checkpoint

folder = (
    Path(sys.argv[1])
    if len(sys.argv) > 1
    else write_checkpoint(Path(tempfile.mkdtemp()) / "random")
)

with Cosmos3Engine.from_pretrained(
    folder, device="cpu", dtype=torch.float32, decode_video=True
) as engine:
    processor = Cosmos3PolicyProcessor.for_checkpoint(
        engine.checkpoint,
        domain_name="droid",
        image_size=256,
        action_chunk_size=8,
        action_stats_path="droid",
    )
    views = {
        name: np.full((180, 320, 3), 60 * i, np.uint8)
        for i, name in enumerate(("wrist", "exterior_1", "exterior_2"), 1)
    }

    # What should the robot do?
    question = processor.preprocess({"images": views, "task": "pick up the red cube"})
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
    question = processor.preprocess(
        {
            "images": views,
            "task": "pick up the red cube",
            "mode": "forward_dynamics",
            "cond_action": actions,
        }
    )
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
