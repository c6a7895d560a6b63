"""Damaged, foreign and hostile checkpoints: their format, what is done to it, the verdict and a
word of its message.
"""

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


def edit_weights(
    change: Callable[[dict[str, torch.Tensor]], object], pattern: str = "*.safetensors"
) -> Damage:
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
    name = next(
        name for name in metadata.state_dict_metadata if name.endswith("embed_tokens.weight")
    )
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


def under(prefix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """The same weights a second time, under another prefix."""
    return lambda weights: weights.update(
        {prefix + key.removeprefix("base_model.model."): w * 9 for key, w in weights.items()}
    )


def as_dtype(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({key: w.to(dtype) for key, w in weights.items()})


def second_weights(folder: Path) -> None:
    save_file({"proj_in.bias": torch.ones(64)}, folder / "model.safetensors")


def second_config(folder: Path) -> None:
    (folder / "lora_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 80}))


def adapter_beside(name: str) -> Damage:
    return lambda folder: save_file({"proj_in.lora_A.weight": torch.ones(4, 64)}, folder / name)


def adapter_config(**options: Any) -> Damage:
    return edit_json("adapter_config.json", lambda data: data.update(options))


def lerobot_config(**options: Any) -> Damage:
    return edit_json("config.json", lambda data: data.update(options))


def step_state(name: str) -> Damage:
    return edit_json(POST, lambda data: data["steps"][0].update(state_file=name))


def step_config(**config: Any) -> Damage:
    return edit_json(POST, lambda data: data["steps"][0].update(config=config))


def further_step(name: str, at: int = 1) -> Damage:
    return edit_json(
        POST, lambda data: data["steps"].insert(at, {"registry_name": name, "config": {}})
    )


def other_preprocessor(folder: Path) -> None:
    """Its normaliser has other figures than the postprocessor's."""
    rows = load_file(folder / STATE)
    save_file({**rows, "action.q99": rows["action.q99"] * 2}, folder / "pre.safetensors")
    step = {"registry_name": "normalizer_processor", "config": {}, "state_file": "pre.safetensors"}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))


def records(**metadata: Any) -> Damage:
    """What ``checkpoint.json`` of a released folder records."""
    return edit_json("checkpoint.json", lambda data: data["strands_cosmos3"].update(metadata))


def other_statistics(folder: Path) -> None:
    low, high = [-1.0] * 10, [1.0] * 10
    records(
        domain="droid_lerobot",
        width=10,
        normalization="quantile",
        statistics={"q01": low, "q99": high},
    )(folder)
    figures = {
        "schema": 1,
        "domain": "droid_lerobot",
        "columns": [f"c{i}" for i in range(10)],
        "q01": low,
        "q99": [2.0] * 10,
    }
    (folder / "action_stats.json").write_text(json.dumps(figures))


def model_config(**changes: Any) -> Damage:
    return edit_json("config.json", lambda data: data["model"]["config"].update(changes))


POST = "policy_postprocessor.json"
STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
FP8 = "transformer/*.safetensors"
OMNI_4D = "omni4d.model.Omni4DModel"
CASES: dict[str, tuple[str, Damage, str, str]] = {
    "an index that leads out": (
        "export",
        edit_json(
            "model.safetensors.index.json",
            lambda d: d["weight_map"].update({"x": "../outside/x.safetensors"}),
        ),
        "LayoutError",
        "only safetensors files beside it",
    ),
    "a shard that is missing": (
        "export",
        first("*.safetensors", Path.unlink),
        "LayoutError",
        "complete",
    ),
    "a shard that is cut off": (
        "export",
        first("*.safetensors", truncate),
        "LayoutError",
        "not a readable",
    ),
    "a shard that links out": (
        "export",
        first("*.safetensors", link_out),
        "LayoutError",
        "outside the checkpoint",
    ),
    "a config that is no JSON": ("export", first("config.json", truncate), "LayoutError", "JSON"),
    "Omni-4D's model class": (
        "export",
        edit_json("config.json", lambda d: d["model"].update(_target_=OMNI_4D)),
        "VariantError",
        "changed sequence",
    ),
    "Omni-4D's packing": (
        "export",
        model_config(omni_4d_packing=True),
        "VariantError",
        "changed sequence",
    ),
    "an Edge export on a Nano base": (
        "export",
        model_config(
            vlm_config={"model_instance": {"_target_": "x.Nemotron3DenseVLTextForCausalLM"}}
        ),
        "VariantError",
        "base",
    ),
    "another action width": (
        "export",
        model_config(max_action_dim=32),
        "VariantError",
        "max_action_dim",
    ),
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
    "a weight that is missing": (
        "export",
        edit_weights(lambda w: w.pop(sorted(w)[0])),
        "WeightsError",
        "missing",
    ),
    "a weight under both names": (
        "export",
        edit_weights(lambda w: w.update({"model.net.proj_in.bias": torch.ones(64)})),
        "WeightsError",
        "both",
    ),
    "a policy of another type": (
        "lerobot",
        edit_json("config.json", lambda d: d.update(type="pi05")),
        "LayoutError",
        "pi05",
    ),
    "a pi0.5 head named cosmos3": (
        "lerobot",
        edit_json("config.json", lambda d: d.pop("transformer_config")),
        "LayoutError",
        "transformer_config",
    ),
    "a step's state outside": (
        "lerobot",
        step_state("../outside/x.safetensors"),
        "LayoutError",
        "beside it",
    ),
    "a step's state that is missing": (
        "lerobot",
        step_state("other.safetensors"),
        "LayoutError",
        "no file beside it",
    ),
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
    "metadata that runs code": (
        "dcp",
        lambda f: bomb(next(f.rglob(".metadata"))),
        "LayoutError",
        "nothing of it was run",
    ),
    "metadata that is cut off": (
        "dcp",
        lambda f: truncate(next(f.rglob(".metadata"))),
        "LayoutError",
        "not readable",
    ),
    "a rank's file that is missing": (
        "dcp",
        lambda f: next(f.rglob("*.distcp")).unlink(),
        "LayoutError",
        "complete",
    ),
    "a rank's file that is cut off": (
        "dcp",
        lambda f: truncate(next(f.rglob("*.distcp"))),
        "LayoutError",
        "complete",
    ),
    "a rank's file outside": ("dcp", edit_dcp(elsewhere), "LayoutError", "beside it"),
    "blocks that do not cover": ("dcp", edit_dcp(one_block_less), "WeightsError", "do not cover"),
    "a latest checkpoint outside": (
        "dcp",
        lambda f: (f / "checkpoints/latest_checkpoint.txt").write_text("../../outside"),
        "LayoutError",
        "names",
    ),
    "another network's run": ("dcp", only_an_optimizer, "WeightsError", "tensors|missing"),
    "NVFP4": (
        "fp8",
        edit_json("hf_quant_config.json", lambda d: d.update(quant_algo="NVFP4")),
        "LayoutError",
        "NVFP4",
    ),
    "scales that are missing": (
        "fp8",
        edit_weights(renamed("weight_scale", "weight_size"), FP8),
        "WeightsError",
        "scale",
    ),
    "a scale of zero": ("fp8", edit_weights(scale_of_zero, FP8), "WeightsError", "scales"),
    "half an adapter": ("peft", edit_weights(unpaired), "WeightsError", "one of its two"),
    "an adapter of another base": ("peft", edit_weights(wider), "WeightsError", "another base"),
    "an adapter without its scale": (
        "peft",
        first("adapter_config.json", Path.unlink),
        "LayoutError",
        "lora_alpha",
    ),
    "an adapter of another kind": (
        "peft",
        edit_json("adapter_config.json", lambda d: d.update(use_dora=True)),
        "LayoutError",
        "use_dora",
    ),
    "a factor under two names": (
        "peft",
        edit_weights(under("transformer.")),
        "WeightsError",
        "are both",
    ),
    "a weight under two names": (
        "peft",
        edit_weights(
            lambda w: w.update(
                {"proj_in.bias": torch.ones(64), "transformer.proj_in.bias": torch.zeros(64)}
            )
        ),
        "WeightsError",
        "are both",
    ),
    "an adapter of an eye": (
        "peft",
        edit_weights(renamed("mlp_moe_gen", "visual_mlp")),
        "WeightsError",
        "no weight of",
    ),
    "an adapter of nothing": ("peft", edit_weights(dict.clear), "WeightsError", "no weight of"),
    "factors in FP8": (
        "peft",
        edit_weights(as_dtype(torch.float8_e4m3fn)),
        "WeightsError",
        "F8_E4M3",
    ),
    "factors that are whole numbers": (
        "peft",
        edit_weights(as_dtype(torch.int8)),
        "WeightsError",
        "I8",
    ),
    **{
        f"an adapter beside {source}": (source, adapter_beside(name), "LayoutError", name)
        for source, name in {
            "released": "pytorch_lora_weights.safetensors",
            "fp8": "adapter_model.safetensors",
            "lerobot": "adapter_model.safetensors",
            "dcp": "lora_step_400.safetensors",
        }.items()
    },
    "an adapter's second weights": ("peft", second_weights, "LayoutError", "model.safetensors"),
    "an adapter's second config": ("peft", second_config, "LayoutError", "lora_config.json"),
    **{
        f"an adapter with {name}={value}": (
            "peft",
            adapter_config(**{name: value}),
            "LayoutError",
            f"{name} ?=",
        )
        for name, value in [
            *(
                ("init_lora_weights", "pissa"),
                ("init_lora_weights", "olora"),
                ("layer_replication", [[0, 2], [1, 2]]),
            ),
            *(
                ("use_qalora", True),
                ("bias", "all"),
                ("lora_bias", True),
                ("peft_type", "LOHA"),
                ("alora_invocation_tokens", [1]),
            ),
            *(
                ("modules_to_save", ["lm_head"]),
                ("rank_pattern", {"q": 2}),
                ("something_new", 3),
                ("rank", 2),
                ("alpha", 99),
            ),
            *(
                ("lora_alpha", True),
                ("lora_alpha", 0),
                ("lora_alpha", -8),
                ("lora_alpha", 1e38),
                ("lora_alpha", "8"),
            ),
            ("base_model_name_or_path", "nvidia/Cosmos3-Edge"),
        ]
    },
    **{
        f"a policy with {name}={value}": (
            "lerobot",
            lerobot_config(**{name: value}),
            verdict,
            f"{name}|{word}",
        )
        for name, value, verdict, word in [
            ("domain_id", 20, "ContractError", ""),
            ("num_views", 1, "ContractError", ""),
            ("max_action_dim", 3, "ContractError", "action_dim is 3"),
            ("use_state", True, "ContractError", "state_row is True"),
            ("use_relative_actions", True, "LayoutError", ""),
            ("history_length", 2, "LayoutError", ""),
            ("invert_gripper", True, "LayoutError", ""),
            ("invert_gripper", "no", "LayoutError", ""),
            ("image_keys", ["wrist", "wrist", "wrist_cam"], "ContractError", "views is"),
            ("image_keys", 3, "LayoutError", ""),
            ("raw_action_dim", 9, "ContractError", "width is 9"),
        ]
    },
    "a step that normalises otherwise": (
        "lerobot",
        step_config(norm_map={"ACTION": "MEAN_STD"}),
        "ContractError",
        f"'quantile' in .*config.json and 'meanstd' in .*{POST}",
    ),
    "a policy and a step that normalise otherwise": (
        "lerobot",
        lerobot_config(normalization_mapping={"ACTION": "IDENTITY"}),
        "ContractError",
        "normalization is 'none' in",
    ),
    "an empty unnormaliser": (
        "lerobot",
        further_step("unnormalizer_processor", 0),
        "LayoutError",
        "one unnormalizer",
    ),
    "a step with absolute actions": (
        "lerobot",
        further_step("absolute_actions_processor"),
        "LayoutError",
        "absolute",
    ),
    "a step of one's own": (
        "lerobot",
        further_step("my_scale_by_100"),
        "LayoutError",
        "my_scale_by_100",
    ),
    "other figures before than after": (
        "lerobot",
        other_preprocessor,
        "ContractError",
        "policy_preprocessor.json and",
    ),
    "figures that are whole numbers": (
        "lerobot",
        edit_weights(as_dtype(torch.int8), STATE),
        "LayoutError",
        "int8",
    ),
    "NVFP4 beside FP8": (
        "fp8",
        edit_json("hf_quant_config.json", lambda d: d.update(quantization={"quant_algo": "NVFP4"})),
        "LayoutError",
        "NVFP4",
    ),
    "FP8 with groups": (
        "fp8",
        edit_json("hf_quant_config.json", lambda d: d.update(group_size=128)),
        "LayoutError",
        "group_size",
    ),
    "an index with an endless name": (
        "export",
        edit_json(
            "model.safetensors.index.json",
            lambda d: d["weight_map"].update({"x": "a" * 300 + ".safetensors"}),
        ),
        "LayoutError",
        "no file beside it",
    ),
    "a record of a closed gripper": (
        "released",
        records(gripper="1=closed"),
        "ContractError",
        "1 as closed",
    ),
    "a record of no gripper": (
        "released",
        records(domain="droid_lerobot", gripper="none"),
        "ContractError",
        "checkpoint.json and '1=open or 1=closed' in embodiment",
    ),
    "a record of three columns": ("released", records(width=3), "ContractError", "3 columns"),
    "a record of another width": (
        "released",
        records(domain="umi", width=3),
        "ContractError",
        "width is 3 in .* and 10 in",
    ),
    "a record of figures that are absent": (
        "released",
        records(normalization="meanstd"),
        "StatisticsError",
        "no mean/std",
    ),
    "a record of half the figures": (
        "released",
        records(
            domain="libero", normalization="meanstd", statistics={"q01": [-1] * 10, "q99": [1] * 10}
        ),
        "StatisticsError",
        "incomplete",
    ),
    "a record of rates beyond reason": ("released", records(fps=1e300), "LayoutError", "fps"),
    "a record of an unknown domain": (
        "released",
        records(domain="nobody"),
        "LayoutError",
        "domain",
    ),
    "statistics beside others": (
        "released",
        other_statistics,
        "ContractError",
        "action_stats.json differ",
    ),
    "a delta of unknown weights": (
        "peft",
        edit_weights(lambda w: w.update({"ears.weight": torch.ones(2)})),
        "WeightsError",
        "ears",
    ),
}
