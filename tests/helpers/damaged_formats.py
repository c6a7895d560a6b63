"""Damaged, foreign and hostile checkpoints: their format, what is done to it, the verdict and a word of its message."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

EXECUTED = Path(tempfile.gettempdir()) / f"executed-{os.getpid()}"
Damage = Callable[[Path], object]


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return damage


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object], pattern: str = "*.safetensors") -> Damage:
    """Change the first file's weights, and its index."""

    def damage(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[0]
        weights = load_file(file)
        change(weights)
        save_file(weights, file)
        for index in file.parent.glob("*.index.json"):
            data = json.loads(index.read_text())
            others = {key: name for key, name in data["weight_map"].items() if name != file.name}
            index.write_text(json.dumps({"weight_map": others | dict.fromkeys(weights, file.name)}))

    return damage


def first(pattern: str, act: Callable[[Path], object]) -> Damage:
    return lambda folder: act(sorted(folder.glob(pattern))[0])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link_out(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.mkdir(exist_ok=True)
    os.replace(path, outside / path.name)
    path.symlink_to(outside / path.name)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def bomb(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(EXECUTED)))


def edit_dcp(change: Callable[[Any], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = next(folder.rglob(".metadata"))
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return damage


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../../outside/x.distcp"


def one_block_less(metadata: Any) -> None:
    name = next(name for name in metadata.state_dict_metadata if name.endswith("embed_tokens.weight"))
    about = metadata.state_dict_metadata[name]
    about.size = torch.Size([about.size[0] * 2, about.size[1]])


def only_an_optimizer(folder: Path) -> None:
    model = next(folder.rglob(".metadata")).parent
    dcp.save({"net_ema.step": torch.ones(3)}, checkpoint_id=model, no_dist=True)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if old in key]:
            weights[key.replace(old, new)] = weights.pop(key)

    return change


def unpaired(weights: dict[str, torch.Tensor]) -> None:
    weights.pop(next(key for key in weights if "lora_A" in key))


def wider(weights: dict[str, torch.Tensor]) -> None:
    key = next(key for key in weights if "lora_A" in key)
    weights[key] = torch.zeros(4, weights[key].shape[1] + 8)


def nan(weights: dict[str, torch.Tensor]) -> None:
    weights["action.q01"] = weights["action.q01"] * float("nan")


def pickled_only(folder: Path) -> None:
    os.replace(folder / "model.safetensors", folder / "pytorch_model.bin")


def scale_of_zero(weights: dict[str, torch.Tensor]) -> None:
    weights[next(key for key in weights if key.endswith("weight_scale"))].zero_()


def step_state(name: str) -> Damage:
    return edit_json("policy_postprocessor.json", lambda data: data["steps"][0].update(state_file=name))


def model_config(**changes: Any) -> Damage:
    return edit_json("config.json", lambda data: data["model"]["config"].update(changes))


STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
FP8 = "transformer/*.safetensors"
OMNI_4D = "omni4d.model.Omni4DModel"
CASES: dict[str, tuple[str, Damage, str, str]] = {
    "an index that leads out": (
        "export",
        edit_json("model.safetensors.index.json", lambda d: d["weight_map"].update({"x": "../outside/x.safetensors"})),
        "LayoutError",
        "only safetensors files beside it",
    ),
    "a shard that is missing": ("export", first("*.safetensors", Path.unlink), "LayoutError", "complete"),
    "a shard that is cut off": ("export", first("*.safetensors", truncate), "LayoutError", "not a readable"),
    "a shard that links out": ("export", first("*.safetensors", link_out), "LayoutError", "outside the checkpoint"),
    "a config that is no JSON": ("export", first("config.json", truncate), "LayoutError", "JSON"),
    "Omni-4D's model class": (
        "export",
        edit_json("config.json", lambda d: d["model"].update(_target_=OMNI_4D)),
        "VariantError",
        "changed sequence",
    ),
    "Omni-4D's packing": ("export", model_config(omni_4d_packing=True), "VariantError", "changed sequence"),
    "an Edge export on a Nano base": (
        "export",
        model_config(vlm_config={"model_instance": {"_target_": "x.Nemotron3DenseVLTextForCausalLM"}}),
        "VariantError",
        "base",
    ),
    "another action width": ("export", model_config(max_action_dim=32), "VariantError", "max_action_dim"),
    "an export that did not finish": (
        "export",
        first("checkpoint.json", Path.unlink),
        "LayoutError",
        "written last|writes last",
    ),
    "a policy that is no object": (
        "export",
        edit_json("checkpoint.json", lambda d: d.update(policy=[1])),
        "LayoutError",
        "policy",
    ),
    "an unknown tower": (
        "export",
        edit_weights(lambda w: w.update({"model.ears.weight": torch.ones(2)})),
        "LayoutError",
        "ears",
    ),
    "an unknown weight of the net": (
        "export",
        edit_weights(lambda w: w.update({"model.net.vae4d.weight": torch.ones(2)})),
        "WeightsError",
        "surplus",
    ),
    "a weight that is missing": ("export", edit_weights(lambda w: w.pop(sorted(w)[0])), "WeightsError", "missing"),
    "a weight under both names": (
        "export",
        edit_weights(lambda w: w.update({"model.net.proj_in.bias": torch.ones(64)})),
        "WeightsError",
        "both",
    ),
    "a policy of another type": ("lerobot", edit_json("config.json", lambda d: d.update(type="pi05")), "LayoutError", "pi05"),
    "a pi0.5 head named cosmos3": (
        "lerobot",
        edit_json("config.json", lambda d: d.pop("transformer_config")),
        "LayoutError",
        "transformer_config",
    ),
    "a step's state outside": ("lerobot", step_state("../outside/x.safetensors"), "LayoutError", "beside it"),
    "a step's state that is missing": ("lerobot", step_state("other.safetensors"), "LayoutError", "no such file"),
    "statistics that are not finite": ("lerobot", edit_weights(nan, STATE), "WeightsError", "NaN"),
    "a tower that is no eye": (
        "lerobot",
        edit_weights(renamed("model.projector", "model.ears"), "model.safetensors"),
        "LayoutError",
        "ears",
    ),
    "no transformer at all": (
        "lerobot",
        edit_weights(renamed("time_embedder", "clock"), "model.safetensors"),
        "LayoutError",
        "no transformer",
    ),
    "pickled weights": ("lerobot", pickled_only, "LayoutError", "pickled"),
    "metadata that runs code": ("dcp", lambda f: bomb(next(f.rglob(".metadata"))), "LayoutError", "nothing of it was run"),
    "metadata that is cut off": ("dcp", lambda f: truncate(next(f.rglob(".metadata"))), "LayoutError", "not readable"),
    "a rank's file that is missing": ("dcp", lambda f: next(f.rglob("*.distcp")).unlink(), "LayoutError", "complete"),
    "a rank's file that is cut off": ("dcp", lambda f: truncate(next(f.rglob("*.distcp"))), "LayoutError", "complete"),
    "a rank's file outside": ("dcp", edit_dcp(elsewhere), "LayoutError", "beside it"),
    "blocks that do not cover": ("dcp", edit_dcp(one_block_less), "WeightsError", "do not cover"),
    "a latest checkpoint outside": (
        "dcp",
        lambda f: (f / "checkpoints/latest_checkpoint.txt").write_text("../../outside"),
        "LayoutError",
        "names",
    ),
    "another network's run": ("dcp", only_an_optimizer, "WeightsError", "tensors|missing"),
    "NVFP4": ("fp8", edit_json("hf_quant_config.json", lambda d: d.update(quant_algo="NVFP4")), "LayoutError", "NVFP4"),
    "scales that are missing": ("fp8", edit_weights(renamed("weight_scale", "weight_size"), FP8), "WeightsError", "scale"),
    "a scale of zero": ("fp8", edit_weights(scale_of_zero, FP8), "WeightsError", "scales"),
    "half an adapter": ("peft", edit_weights(unpaired), "WeightsError", "one of its two"),
    "an adapter of another base": ("peft", edit_weights(wider), "WeightsError", "another base"),
    "an adapter without its scale": ("peft", first("adapter_config.json", Path.unlink), "LayoutError", "lora_alpha"),
    "an adapter of another kind": (
        "peft",
        edit_json("adapter_config.json", lambda d: d.update(use_dora=True)),
        "LayoutError",
        "use_dora",
    ),
    "a delta of unknown weights": (
        "peft",
        edit_weights(lambda w: w.update({"ears.weight": torch.ones(2)})),
        "WeightsError",
        "ears",
    ),
}
