"""The part of ``golden.py`` that runs inside a tree: inputs of its cases, and action chunks.

    python benchmarks/golden_chunks.py make INPUTS          # once, by the base tree
    python benchmarks/golden_chunks.py policy INPUTS OUT    # chunks of Cosmos3Policy
    python benchmarks/golden_chunks.py engine INPUTS OUT    # chunks of Cosmos3Engine

Chunks use names of ``strands_cosmos3.__all__`` alone, which a refactoring keeps; their arrays are
in OUT/chunks.npz. Only ``make`` looks inside the package, with what a tree's tests make checkpoints
by.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

TABLES = tomllib.loads(Path(__file__).with_name("golden_policies.toml").read_text())
VIEWS = ("wrist", "exterior_1", "exterior_2")
HOME_RAD = (0.0, -0.785398, 0.0, -2.356194, 0.0, 1.570796, 0.785398)
SENTENCES = ("pick up the red cube", "put the green block into the box")


def make(folder: Path) -> None:
    """Write small random checkpoints in several formats, and pictures."""
    from helpers import checkpoint_formats as formats

    try:
        from recipes.random_checkpoint import write_checkpoint as write
    except ImportError:  # where older trees have it
        write: Any = import_module("strands_cosmos3.engine.factory").write_checkpoint
    silu = write(folder / "silu")
    write(folder / "relu2", hidden_act="relu2", seed=1)
    write(folder / "joint", action_space="joint_pos", seed=3)
    prefix = write(folder / "prefix", seed=4) / "checkpoint.json"
    about = json.loads(prefix.read_text())
    about["strands_cosmos3"] |= {"prefix_rows": 8, "replan_rows": 8}
    prefix.write_text(json.dumps(about))
    formats.contract_file(folder / "contract.toml", Path("silu"), None)
    formats.framework_export(silu, folder / "export", edge=False)
    formats.dcp_run(silu, folder / "run")
    formats.modelopt_fp8(silu, folder / "fp8")
    formats.adapter(silu, folder / "adapter", "peft")
    for i, view in enumerate(VIEWS):
        Image.fromarray(picture(i)).save(folder / f"{view}.png")
    rows = 0.1 * np.random.default_rng(1).standard_normal((16, 10))
    (folder / "actions.json").write_text(json.dumps(rows.tolist()))


def picture(number: int) -> np.ndarray:
    """Return a picture with smooth colours and a bar, [90, 160, 3] uint8."""
    x, y = np.meshgrid(np.linspace(0, 1, 160), np.linspace(0, 1, 90))
    colours = np.stack([x, y, 0.5 + 0.5 * np.sin(6 * (x + y) + number)], axis=-1)
    colours[20:40, 30 + 20 * number : 60 + 20 * number] = (1.0, 0.2, 0.1)
    return (255 * colours).astype(np.uint8)


def observation(name: str) -> dict[str, Any]:
    """Return an observation of golden_policies.toml with its pictures."""
    pictures = {view: picture(i) for i, view in enumerate(VIEWS)}
    return {key: pictures.get(value, value) for key, value in TABLES["observations"][name].items()}


def policy_chunks(inputs: Path) -> dict[str, Any]:
    """Return steps, rows and videos of two calls of every policy, and a plan with a prefix."""
    from strands_cosmos3 import Cosmos3Policy, create_policy

    rows = 0.1 * np.random.default_rng(2).standard_normal((16, 10))
    clip = np.stack([np.roll(picture(0), 3 * i, axis=1) for i in range(17)])
    calls = {"": {}, "rows": {"raw_actions": rows}, "clip": {"video": clip}}
    answers: dict[str, Any] = {}
    arguments = signature(Cosmos3Policy).parameters
    for name, case in TABLES["policies"].items():
        config = {"seed": 3, "device": "cpu", "backend": "native", **case}
        observed, more = observation(config.pop("observation")), calls[config.pop("call", "")]
        if "model" in config:
            config["model"] = inputs / config["model"]
        if "guidance_interval" in config:
            config["guidance_interval"] = tuple(config["guidance_interval"])
        # Older trees take every option as an argument.
        options = {key: config.pop(key) for key in [*config] if key not in arguments}
        config |= {"options": options} if options else {}
        with create_policy("cosmos3", **config) as policy:
            for call, sentence in enumerate(SENTENCES):
                policy.set_control_frequency(50 if call else 60)
                steps = policy.get_actions_sync(observed, sentence, **more)
                columns = list(steps[0]) if steps else []
                answers[f"{name}.{call}.columns"] = np.array(columns)
                answers[f"{name}.{call}.steps_rad"] = np.array(
                    [[step[c] for c in columns] for step in steps]
                )
                answers |= flat(f"{name}.{call}", policy.last_rollout)
    options = {"model": inputs / "prefix", "num_steps": 2, "device": "cpu", "seed": 1}
    with Cosmos3Policy(robot="panda", **options) as policy:
        policy.plan(observation("arm"), SENTENCES[0])
        rows = np.asarray(policy.last_rollout["action"])[:5]
        policy.plan(observation("arm"), SENTENCES[0], action_prefix=rows)
        answers |= flat("prefix", policy.last_rollout)
    return answers


def flat(name: str, answer: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays, numbers and texts of an answer by name, without what the clock says."""
    arrays: dict[str, np.ndarray] = {}
    for key, value in answer.items():
        if isinstance(value, dict):
            arrays |= {} if key == "timing" else flat(f"{name}.{key}", value)
        elif isinstance(value, torch.Tensor):
            arrays[f"{name}.{key}"] = value.detach().cpu().numpy()
        else:
            array = np.asarray(value)
            arrays[f"{name}.{key}"] = np.array(str(value)) if array.dtype == object else array
    return arrays


def engine_chunks(inputs: Path) -> dict[str, Any]:
    """Return answers to requests of every mode, alone and in a batch, and a processor's."""
    from strands_cosmos3 import (
        Cosmos3ActionRequest,
        Cosmos3Engine,
        Cosmos3PolicyProcessor,
        get_embodiment,
        pixel_to_latent_shape,
    )

    generator = torch.Generator().manual_seed(0)
    clip = torch.rand(1, 3, 17, 64, 96, generator=generator) * 2 - 1
    rows = torch.randn(16, 10, generator=generator)
    plain = Cosmos3ActionRequest(
        text_ids=torch.arange(40, 60),
        video_shape=pixel_to_latent_shape(17, 64, 96),
        action_chunk=16,
        domain_id=get_embodiment("droid").domain_id,
        raw_action_dim=10,
        cond_video_pixels=clip[:, :, :1],
        fps=15.0,
        num_inference_steps=3,
    )
    guided = {"neg_text_ids": torch.arange(90, 101), "guidance_scale": 1.7}
    film = {"cond_video_pixels": clip}
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "guided": guided,
        "interval": {"guidance_interval": (900, 1001), **guided},
        "prefix": {"action_prefix": rows[:3]},
        "inverse": {"mode": "inverse_dynamics", **film},
        "forward": {"mode": "forward_dynamics", "cond_action": rows},
        "umi": {"domain_id": get_embodiment("umi").domain_id},
        "two frames": {"cond_frame_indexes": (0, 1), "return_video": False, **film},
        "karras": {"use_karras_sigmas": True, "flow_shift": 5.0},
    }
    requests = {
        name: replace(plain, seed=seed, **changed)
        for seed, (name, changed) in enumerate(changes.items(), 1)
    }
    answers: dict[str, Any] = {}
    with Cosmos3Engine.from_pretrained(inputs / "silu", device="cpu") as engine:
        for name, request in requests.items():
            answers |= flat(f"silu.{name}", engine.step(request))
        alike = list(requests.values())[:-1]  # another schedule shares no batch
        for i, answer in enumerate(engine.step_batch(alike)):
            answers |= flat(f"batch.{i}", answer)
    with Cosmos3Engine.from_pretrained(inputs / "relu2", device="cpu", decode_video=True) as engine:
        for name, request in requests.items():
            frames = 5 if request.return_video else None
            answers |= flat(f"relu2.{name}", engine.step(replace(request, decode_frames=frames)))
    with Cosmos3Engine.from_pretrained(inputs / "joint", device="cpu") as engine:
        processor = Cosmos3PolicyProcessor.for_checkpoint(engine.checkpoint, domain_name="droid")
        views = {name: picture(i) for i, name in enumerate(VIEWS)}
        call = {"images": views, "task": SENTENCES[0], "state": [*HOME_RAD, 0.5]}
        processed = processor.preprocess(call)
        request = replace(processed.request(seed=2), num_inference_steps=2)
        for name in ("cond_video_pixels", "text_ids", "neg_text_ids", "action_prefix"):
            answers[f"processor.{name}"] = getattr(request, name).numpy()
        answers |= flat("processor", processor.postprocess(engine.step(request), processed))
    return answers


def main() -> None:
    """Run one of the three commands of the module's docstring."""
    torch.set_num_threads(1)
    what = sys.argv[1]
    inputs = Path(sys.argv[2])
    if what == "make":
        make(inputs)
        return
    chunks = {"policy": policy_chunks, "engine": engine_chunks}[what](inputs)
    np.savez(Path(sys.argv[3]) / "chunks.npz", **chunks)


if __name__ == "__main__":
    main()
