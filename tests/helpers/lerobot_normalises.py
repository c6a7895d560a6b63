"""Runs inside lerobot's own environment: its processors write folders, and read them and ours.

python lerobot_normalises.py write FOLDER           # a folder for each mode, as a policy's
postprocessor is saved python lerobot_normalises.py read ROWS FOLDER...    # ROWS.npz: what each
folder's two pipelines make of `z` and `rows` in it
"""

import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.processor import (
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    UnnormalizerProcessorStep,
)
from lerobot.processor.converters import (
    batch_to_transition,
    policy_action_to_transition,
    transition_to_batch,
    transition_to_policy_action,
)

FEATURES = {"action": PolicyFeature(FeatureType.ACTION, (10,))}
COLUMNS = torch.linspace(0, 1, 10)
FIGURES = {
    "q01": -1 + 0.3 * COLUMNS,
    "q99": 0.5 + COLUMNS,
    "mean": 0.1 * COLUMNS,
    "std": 0.2 + COLUMNS,
}
FIGURES |= {"min": -1.5 + 0.1 * COLUMNS, "max": 2 - 0.7 * COLUMNS}


def write(folder: Path) -> None:
    for mode in ("IDENTITY", "QUANTILES", "MEAN_STD", "MIN_MAX"):
        about = (FEATURES, {FeatureType.ACTION: NormalizationMode(mode)}, {"action": FIGURES})
        PolicyProcessorPipeline(
            steps=[UnnormalizerProcessorStep(*about), DeviceProcessorStep(device="cpu")],
            name="policy_postprocessor",
        ).save_pretrained(folder / mode)
        PolicyProcessorPipeline(
            steps=[NormalizerProcessorStep(*about)], name="policy_preprocessor"
        ).save_pretrained(folder / mode)


def read(rows: Path, folders: list[str]) -> None:
    with np.load(rows) as given:
        z, actions = torch.from_numpy(given["z"]), torch.from_numpy(given["rows"])
    made = {}
    for i, folder in enumerate(folders):
        after = PolicyProcessorPipeline.from_pretrained(
            folder,
            config_filename="policy_postprocessor.json",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        )
        before = PolicyProcessorPipeline.from_pretrained(
            folder,
            config_filename="policy_preprocessor.json",
            to_transition=batch_to_transition,
            to_output=transition_to_batch,
        )
        made[f"after{i}"] = after(z).numpy()
        made[f"before{i}"] = before({"action": actions})["action"].numpy()
    np.savez(rows, **made)


if sys.argv[1] == "write":
    write(Path(sys.argv[2]))
else:
    read(Path(sys.argv[2]), sys.argv[3:])
