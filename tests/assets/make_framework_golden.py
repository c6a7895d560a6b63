"""Writes framework_golden.json: pictures and captions of NVIDIA's cosmos-framework, made by its own
functions on seeded inputs.

python tests/assets/make_framework_golden.py GIT_DIRECTORY_OF_COSMOS_FRAMEWORK

The functions are read from commit 5eee9ed and run alone (only numpy and torch are needed); no line
of theirs is kept here. A picture is recorded as every 29th row and 31st column of it. Two of the
ratios have weights that float32 cannot hold, so that a level may be cut off differently by another
build of torch; they are marked inexact.
"""

import ast
import json
import logging
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import torch
import torch.nn.functional as F

COMMIT, ROOT = "5eee9ed", "cosmos_framework"
SERVER, ACTION = "scripts/action_policy_server_robolab.py", "data/generator/action/utils"
KEYS = (
    "observation/wrist_image_left",
    "observation/exterior_image_1_left",
    "observation/exterior_image_2_left",
)
# name: sizes of the wrist view and both exteriors, or of one picture; dtype; whether every weight
# is exact
CASES = {
    "views of 360 x 640": (((360, 640),) * 3, "uint8", True),
    "views of 720 x 1280": (((720, 1280),) * 3, "uint8", True),
    "views of 480 x 640": (((480, 640),) * 3, "uint8", False),
    "views of three sizes": (((360, 640), (720, 1280), (180, 320)), "uint8", True),
    "float views": (((180, 320),) * 3, "float32", True),
    "a picture of 270 x 320": (((270, 320),), "uint8", True),
    "a picture of 100 x 123": (((100, 123),), "uint8", False),
    "a float picture": (((540, 640),), "float64", True),
    "an integer picture": (((540, 640),), "int64", True),
}
INSTRUCTIONS = ("pick up the red cube", "stop!", "is it there?", "go. ", "halt…", "go..", "")
VIEWS = (
    "ego_view",
    "third_person_view",
    "wrist_view",
    "concat_view",
    "top_down_2d_view",
    "video_game_view",
)
CLIPS = ((33, 15, (544, 736)), (17, 5, (256, 320)), (61, 10, (480, 832)))


def picture(seed, hw, dtype):
    rng = np.random.RandomState(seed)
    if dtype == "uint8":
        return rng.randint(0, 256, (*hw, 3)).astype(np.uint8)
    return rng.uniform(-20, 280, (*hw, 3)).astype(dtype)


def definitions(git, path, names, **known):
    """Top-level functions, classes and constants of a module there, run with only what is
    ``known``.
    """
    shown = ["git", "--git-dir", git, "show", f"{COMMIT}:{ROOT}/{path}"]
    tree = ast.parse(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
    wanted = [node for node in tree.body if set(names) & set(_names(node))]
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *wanted], [])
    scope = {
        "np": np,
        "torch": torch,
        "F": F,
        "math": math,
        "Any": Any,
        "Literal": Literal,
        "Optional": Optional,
        **known,
    }
    exec(compile(ast.fix_missing_locations(module), path, "exec"), scope)
    return scope


def _names(node):
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]


class Augmentor:
    """Stands for the framework's base class, which keeps three arguments."""

    def __init__(self, input_keys, output_keys, args):
        self.args = args


def composites(git):
    reading = (
        "_ensure_rgb_uint8_image",
        "_resize_rgb_uint8",
        "_compose_roboarena_views",
        "_extract_observation_image",
    )
    server = definitions(git, SERVER, reading)
    found = {}
    for name, (sizes, dtype, exact) in CASES.items():
        pictures = [picture(seed, hw, dtype) for seed, hw in enumerate(sizes)]
        keys = KEYS if len(sizes) == 3 else ("observation/image",)
        made = server["_extract_observation_image"](dict(zip(keys, pictures, strict=True)))
        if made.shape[:2] != (540, 640):
            made = server["_resize_rgb_uint8"](made, (540, 640))
        found[name] = {
            "sizes": sizes,
            "dtype": dtype,
            "exact": exact,
            "pixels": made[::29, ::31].tolist(),
        }
    return found


def captions(git):
    table = definitions(git, "data/generator/utils.py", ("VIDEO_RES_SIZE_INFO",))[
        "VIDEO_RES_SIZE_INFO"
    ]
    known = {"Augmentor": Augmentor, "log": logging.getLogger("framework")}
    views = definitions(
        git,
        f"{ACTION}/viewpoint_utils.py",
        ("DEFAULT_VIEWPOINT_TEMPLATES", "ViewpointTextInfo"),
        **known,
    )
    known |= {
        "DEFAULT_VIEWPOINT_TEMPLATES": views["DEFAULT_VIEWPOINT_TEMPLATES"],
        "VIDEO_RES_SIZE_INFO": table,
    }
    formatting = (
        "ActionPromptJsonFormatter",
        "_should_append_idle_frame_info",
        "_is_inverse_dynamics",
    )
    to_json = definitions(git, f"{ACTION}/json_formatter.py", formatting, **known)[
        "ActionPromptJsonFormatter"
    ]()
    folder = "data/generator/augmentors"
    times = definitions(
        git,
        f"{folder}/duration_fps_text_timestamps.py",
        ("DEFAULT_TEMPLATE", "DurationFPSTextTimeStamps"),
        **known,
    )
    sizes = ("DEFAULT_IMAGE_TEMPLATE", "DEFAULT_VIDEO_TEMPLATE", "ResolutionTextInfo")
    resolution = definitions(git, f"{folder}/resolution_text_info.py", sizes, **known)
    plain = [
        views["ViewpointTextInfo"](),
        times["DurationFPSTextTimeStamps"](),
        resolution["ResolutionTextInfo"](),
    ]
    layout = definitions(git, SERVER, ("_CONCAT_VIEW_DESCRIPTION",))["_CONCAT_VIEW_DESCRIPTION"]
    found = []
    for instruction, view, (frames, fps, hw) in product(INSTRUCTIONS, VIEWS, CLIPS):
        if instruction != INSTRUCTIONS[0] and (view != "concat_view" or frames != 33):
            continue
        for kind, steps in (("plain", plain), ("json", [to_json])):
            sample = {
                "ai_caption": instruction,
                "viewpoint": view,
                "mode": "wam",
                "video": torch.zeros(3, frames, *hw),
            }
            sample |= {
                "conditioning_fps": torch.tensor(fps),
                "image_size": torch.tensor([*hw, *hw]),
            }
            if view == "concat_view":
                sample["additional_view_description"] = layout
            for step in steps:
                sample = step(sample)
            caption = sample["ai_caption"]
            text = json.dumps(caption) if isinstance(caption, dict) else caption
            found.append([instruction, kind, view, frames, fps, hw, text])
    return found


if __name__ == "__main__":
    golden = {
        "source": f"NVIDIA cosmos-framework {COMMIT}, run by {Path(__file__).name}",
        "composites": composites(sys.argv[1]),
    }
    golden["captions"] = captions(sys.argv[1])
    target = Path(__file__).with_name("framework_golden.json")
    target.write_text(
        json.dumps(golden, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8"
    )
