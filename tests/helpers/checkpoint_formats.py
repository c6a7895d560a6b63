"""One small checkpoint in every format that people hold, with each source's own names and files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from strands_cosmos3.engine.formats.framework import ATTENTION, HEADS, TIME

SHARDS = 3
VISION = {"model.net.language_model.visual.merger.mlp.0.weight": torch.ones(4, 4)}
SIGLIP = {
    "model.vision_tower.encoder.layers.0.mlp.fc1.weight": torch.ones(4, 4),
    "model.projector.bias": torch.ones(3),
}
CONTRACT = {
    "domain": "droid_lerobot",
    "action_space": "midtrain",
    "width": 10,
    "chunk": 16,
    "fps": 15.0,
    "normalization": "quantile",
    "statistics": "droid_lerobot",
    "gripper": "1=open",
    "views": ["wrist", "exterior_1", "exterior_2"],
    "prompt_format": "json",
    "resolution_tier": 256,
    "sampling": {"num_steps": 2, "guidance_scale": 1.0, "flow_shift": 10.0},
}


def framework_name(name: str) -> str:
    """The framework's name of a released one: the inverse of ``released_name``."""
    back = {new: old for old, new in (*ATTENTION.items(), *HEADS.items())}
    for old, new in TIME.items():
        name = name.replace(new, old)
    head, dot, rest = name.partition(".")
    if head in back:
        return f"{back[head]}{dot}{rest}"
    if head in ("layers", "embed_tokens", "norm", "norm_moe_gen"):
        return "language_model.model." + ".".join(back.get(part, part) for part in name.split("."))
    return f"language_model.{name}" if head == "lm_head" else name


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "transformer").glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def save_sharded(
    folder: Path, weights: dict[str, torch.Tensor], stem: str = "model", count: int = SHARDS
) -> None:
    """As transformers' ``save_pretrained`` names shards and index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i in range(count):
        name = f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors"
        mine = {key: weights[key].contiguous() for key in sorted(weights)[i::count]}
        weight_map |= dict.fromkeys(mine, name)
        save_file(mine, folder / name, metadata={"format": "pt"})
    write_json(
        folder / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}
    )


def contract_file(path: Path, checkpoint: Path, base: Path | None, **changes: Any) -> Path:
    """A contract file beside a checkpoint; a change to None leaves a field out."""
    fields = {name: value for name, value in (CONTRACT | changes).items() if value is not None}
    links = {"checkpoint": str(checkpoint)} | ({} if base is None else {"base": str(base)})
    sampling = fields.pop("sampling", None)
    lines = [f"{name} = {json.dumps(value)}" for name, value in (links | fields).items()]
    if sampling is not None:
        lines.append("sampling = { " + ", ".join(f"{k} = {v}" for k, v in sampling.items()) + " }")
    path.write_text("\n".join(lines) + "\n")
    return path


def framework_export(released: Path, folder: Path, edge: bool) -> Path:
    """cosmos-framework's export_model (5eee9ed5): sharded, N names under model.net.,
    checkpoint.json last.
    """
    weights = {f"model.net.{framework_name(key)}": w for key, w in weights_of(released).items()}
    save_sharded(folder, weights if edge else weights | VISION)
    target = (
        "cosmos_framework.model.generator.reasoner.Nemotron3DenseVLTextForCausalLM"
        if edge
        else "Qwen3VLTextForCausalLM"
    )
    config = {"max_action_dim": 64, "vlm_config": {"model_instance": {"_target_": target}}}
    model = {
        "_target_": "cosmos_framework.model.generator.omni_mot_model.OmniMoTModel",
        "config": config,
    }
    write_json(folder / "config.json", {"model_type": "cosmos3_omni", "model": model})
    write_json(folder / "export_manifest.json", {})
    policy = {"action_chunk_size": 16, "conditioning_fps": 15.0, "domain_name": "droid_lerobot"}
    write_json(
        folder / "checkpoint.json", {"use_ema_weights": True} | ({"policy": policy} if edge else {})
    )
    return folder


def lerobot_policy(released: Path, folder: Path, **changes: Any) -> Path:
    """huggingface/lerobot pull request 3745: transformer and VAE in one file, diffusers' configs
    inside config.json.
    """
    weights = {f"model.transformer.{key}": w for key, w in weights_of(released).items()}
    weights |= {
        f"model.vae.{key}": w
        for key, w in load_file(next((released / "vae").glob("*.safetensors"))).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights | SIGLIP, folder / "model.safetensors")
    config = {name: json.loads((released / file).read_text()) for name, file in {
        "transformer_config": "transformer/config.json",
        "vae_config": "vae/config.json",
        "scheduler_config": "scheduler/scheduler_config.json",
    }.items()}  # fmt: skip
    config |= {
        "type": "cosmos3",
        "text_processor_name_or_path": "nvidia/Cosmos3-Nano",
        "chunk_size": 16,
        "raw_action_dim": 10,
    }
    config |= {
        "action_space": "midtrain",
        "invert_gripper": False,
        "domain_name": "droid_lerobot",
        "conditioning_fps": 15.0,
    }
    config |= {
        "resolution_tier": "256",
        "guidance_scale": 1.0,
        "num_inference_steps": 2,
        "shift": 10.0,
    }
    views = ("wrist_cam", "over_shoulder_left_camera", "over_shoulder_right_camera")
    config |= {
        "image_keys": [f"observation.images.{view}" for view in views],
        "num_views": 3,
        "domain_id": 8,
    }
    config |= {
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "QUANTILES"}
    }
    write_json(folder / "config.json", config | changes)
    state = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    rows = {
        f"action.{name}": torch.linspace(*ends, 10)
        for name, ends in {"q01": (-1.0, -0.1), "q99": (0.5, 2.0)}.items()
    }
    save_file(rows, folder / state)
    modes = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "QUANTILES"}
    about = {
        "eps": 1e-8,
        "features": {"action": {"type": "ACTION", "shape": [10]}},
        "norm_map": modes,
    }
    step = {"registry_name": "unnormalizer_processor", "config": about, "state_file": state}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    write_json(
        folder / "policy_postprocessor.json",
        {"name": "policy_postprocessor", "steps": [step, device]},
    )
    return folder


def dcp_run(released: Path, folder: Path) -> Path:
    """cosmos-framework's trainer: net.* beside the averaged net_ema.*, which differ."""
    weights = {framework_name(key): w for key, w in weights_of(released).items()}
    state = {f"net_ema.{key}": w for key, w in weights.items()} | {
        f"net.{key}": w + 1 for key, w in weights.items()
    }
    model = folder / "checkpoints/iter_000000020/model"
    dcp.save(state, checkpoint_id=model, no_dist=True)
    (folder / "checkpoints/latest_checkpoint.txt").write_text("iter_000000020\n")
    (folder / "config.yaml").write_text("model: {}\n")
    return folder


STEP_POLICY = {
    "schema_version": 1,
    "type": "first_last_n",
    "index_space": "denoising_loop_iteration",
    "scope": ["transformer"],
    "default_mode": "native",
    "first_steps": {"count": 3, "mode": "a16"},
    "last_steps": {"count": 3, "mode": "a16"},
    "overlap": "a16",
    "reasoner": "a16",
}
"""NVIDIA's."""


def modelopt_fp8(
    released: Path,
    folder: Path,
    policy: Mapping[str, Any] | None = STEP_POLICY,
    activation: float = 1.0,
) -> tuple[Path, Path]:
    """ModelOpt's FP8 with scales in another shard, and the same weights dequantised in the
    released layout.

    Args:
        policy: Which steps round activations; None: all.
        activation: Scale of every layer's input.
    """
    plain = Path(shutil.copytree(released, folder.with_name(f"{folder.name}_plain")))
    shutil.copytree(released, folder)
    stored: dict[str, torch.Tensor] = {}
    original = weights_of(released)
    dequantized = dict(original)
    for key, w in original.items():
        if "self_attn.to_" not in key and "proj.weight" not in key:
            stored[key] = w
            continue
        scale = w.abs().max() / 448
        stored[key] = (w / scale).to(torch.float8_e4m3fn)
        stored[f"{key}_scale"], stored[key.replace(".weight", ".input_scale")] = (
            scale,
            torch.tensor(activation),
        )
        dequantized[key] = stored[key].float() * scale
    for target, weights in ((folder, stored), (plain, dequantized)):
        for old in (target / "transformer").glob("*safetensors*"):
            old.unlink()
        save_sharded(target / "transformer", weights, "diffusion_pytorch_model")
    write_json(folder / "hf_quant_config.json", {"quant_method": "modelopt", "quant_algo": "FP8"})
    if policy is not None:
        config = json.loads((folder / "transformer/config.json").read_text())
        runtime = {"quant_method": "modelopt", "runtime": {"diffusion_step_policy": policy}}
        config["quantization_config"] = runtime
        write_json(folder / "transformer/config.json", config)
    return folder, plain


def adapter(base: Path, folder: Path, scheme: str) -> tuple[Path, Path]:
    """A delta with LoRA factors on a base, and the same merged in the released layout.

    ``framework`` has whole weights and factors under N names in one file; ``peft`` has factors
    under PEFT's prefix.
    """
    generator = torch.Generator().manual_seed(5)
    weights = weights_of(base)
    lora = [key for key in weights if "mlp_moe_gen" in key and key.endswith("_proj.weight")]
    whole = (
        [key for key in weights if key.startswith("action_") or "add_q_proj" in key]
        if scheme == "framework"
        else []
    )
    stored: dict[str, torch.Tensor] = {}
    for key in whole:
        weights[key] = weights[key] + 0.01 * torch.randn(weights[key].shape, generator=generator)
        stored[framework_name(key)] = weights[key]
    for key in lora:
        A = torch.randn(4, weights[key].shape[1], generator=generator) * 0.05
        B = torch.randn(weights[key].shape[0], 4, generator=generator) * 0.05
        stem = (
            f"base_model.model.{key}" if scheme == "peft" else framework_name(key)
        ).removesuffix(".weight")
        stored[f"{stem}.lora_A.weight"], stored[f"{stem}.lora_B.weight"] = A, B
        weights[key] = weights[key] + (B @ A) * 2.0
    folder.mkdir(parents=True)
    save_file(
        stored, folder / ("adapter_model.safetensors" if scheme == "peft" else "delta.safetensors")
    )
    name = "adapter_config.json" if scheme == "peft" else "lora_config.json"
    write_json(folder / name, {"r": 4, "lora_alpha": 8})
    merged = Path(shutil.copytree(base, folder.with_name(f"{folder.name}_merged")))
    for old in (merged / "transformer").glob("*safetensors*"):
        old.unlink()
    save_sharded(merged / "transformer", weights, "diffusion_pytorch_model")
    return folder, merged
