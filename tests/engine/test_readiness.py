"""``inspect`` calls a checkpoint ready if and only if a policy acts with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers import checkpoint_formats as formats
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.formats.inspect import inspect
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.robots.panda import HOME_Q
from strands_cosmos3.types import Observation

JOINTS = {
    "action_space": "joint_pos",
    "width": 8,
    "normalization": "none",
    "chunk": 32,
    "statistics": None,
}
LIBERO = {
    "domain": "libero",
    "statistics": "libero",
    "normalization": "quantile_rot",
    "views": ["third_person", "wrist"],
}
AV = {
    "domain": "av",
    "normalization": "none",
    "width": 9,
    "gripper": "none",
    "chunk": 60,
    "statistics": None,
    "views": ["front"],
}
PUSHT = {
    "domain": "pusht",
    "normalization": "none",
    "width": 2,
    "gripper": "none",
    "statistics": None,
    "views": ["front"],
}
LOW, HIGH = [-1.0] * 10, [1.0] * 10
OFTEN = {
    "joints": (JOINTS, True),
    "LIBERO": (LIBERO, True),
    "figures that are missing": ({"normalization": "meanstd"}, False),
    "raw figures that are missing": ({"normalization": "quantile_rot"}, False),
    "a closed gripper": ({"gripper": "1=closed"}, False),
    "normalised joints": (
        JOINTS | {"normalization": "quantile", "statistics": "droid_lerobot"},
        False,
    ),
    "half the figures": (
        {"normalization": "meanstd", "statistics": {"q01": LOW, "q99": HIGH}},
        False,
    ),
}
RARELY = {
    "poses": ({}, True),
    "rows as they are": ({"normalization": "none"}, True),
    "mean and deviation": (
        {
            "normalization": "meanstd",
            "statistics": {"q01": LOW, "q99": HIGH, "mean": [0.1] * 10, "std": HIGH},
        },
        True,
    ),
    "UMI": ({"domain": "umi", "statistics": "umi", "views": ["wrist"]}, True),
    "a camera": (AV, True),
    "a camera with statistics": (AV | {"normalization": "quantile"}, False),
    "raw columns": (PUSHT, True),
    "no actions": (PUSHT | {"domain": "no_action", "width": 1}, False),
    "arms without statistics": (
        {"domain": "xdof_yam", "width": 20, "statistics": None, "views": ["front"]},
        False,
    ),
    **{f"{n} rows": ({"chunk": n}, True) for n in (1, 15, 17)},
    **{f"{fps} Hz": ({"fps": fps}, True) for fps in (0.1, 1000)},
    **{f"tier {tier}": ({"resolution_tier": tier}, True) for tier in (128, 480)},
    "the framework's composition": ({"composition": "framework"}, True),
    "sampling at its bounds": (
        {"sampling": {"num_steps": 2, "guidance_scale": 0, "flow_shift": 1000}},
        True,
    ),
    "no prompt form": ({"prompt_format": None}, False),
    "no sampling": ({"sampling": None}, False),
}


def acts(path: Path, domain: str) -> bool:
    """Whether a policy returns steps; if not, with an error of this package."""
    rig = get_embodiment(domain).rig
    picture = np.random.default_rng(0).integers(0, 255, (96, 128, 3), np.uint8)
    images = dict.fromkeys(("front",) if rig is None else rig.views, picture)
    try:
        with Cosmos3Policy(domain, model=path, device="cpu") as policy:
            steps = policy.get_actions_sync(Observation(HOME_Q, 0.5, images), "pick up the cube")
    except Cosmos3Error:
        return False
    assert steps
    return True


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARELY)]
)
def test_ready_means_that_a_policy_acts(checkpoints, tmp_path, name):
    changes, expected = (OFTEN | RARELY)[name]
    changes = {
        "resolution_tier": 128,
        "sampling": {"num_steps": 1, "guidance_scale": 1.0, "flow_shift": 5.0},
        **changes,
    }
    if isinstance(figures := changes.get("statistics"), dict):
        (tmp_path / "figures.json").write_text(json.dumps(figures))
        changes["statistics"] = "figures.json"
    folder = formats.framework_export(checkpoints["silu"], tmp_path / "c", edge=False)
    path = formats.contract_file(tmp_path / "my.toml", folder, checkpoints["silu"], **changes)
    report = inspect(path)
    assert (report["verdict"] == "ready") == expected, report
    assert acts(path, changes.get("domain", "droid")) == expected


def without_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder / "text_tokenizer")


def of_umi(folder: Path) -> None:
    data = json.loads((folder / "checkpoint.json").read_text())
    quick = {"num_steps": 1, "guidance_scale": 1.0, "flow_shift": 5.0}
    data["strands_cosmos3"] |= {"domain": "umi", "resolution_tier": 128, "sampling": quick}
    (folder / "checkpoint.json").write_text(json.dumps(data))


def test_a_released_folder_is_ready_if_it_acts(checkpoints, tmp_path):
    for i, (damage, verdict) in enumerate([(without_tokenizer, "LayoutError"), (of_umi, "ready")]):
        folder = Path(shutil.copytree(checkpoints["silu"], tmp_path / str(i)))
        damage(folder)
        assert inspect(folder)["verdict"] == verdict
        assert not acts(folder, "droid")
    assert acts(folder, "umi")
