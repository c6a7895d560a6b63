"""Writes framework_names.json: cosmos-framework's own names of every released weight of Edge and
Nano, by its own functions.

python tests/assets/make_framework_names.py GIT_DIRECTORY_OF_COSMOS_FRAMEWORK

``_diffusers_to_net_key`` (released -> framework) and ``_remap_language_model_state_dict`` (back)
are read from commit 5eee9ed and run alone; no line of theirs is kept here. Recorded are the pairs
outside the layers and of layer 0, and a digest of all.
"""

import ast
import hashlib
import json
import pathlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMIT = "5eee9ed"
SOURCES = (
    "cosmos_framework/inference/model.py",
    "cosmos_framework/scripts/_convert_model_to_diffusers.py",
)
WANTED = re.compile(
    r"_DIFFUSERS_|_ATTN_KEY|_LANGUAGE_MODEL_VISION|_TIME_EMB|_(diffusers_to_net|apply_diff|should_drop|is_load|remap_)"
)


def config(kind: str):
    from strands_cosmos3.engine.config import TransformerConfig
    from strands_cosmos3.engine.variants import get_variant

    sizes: dict[str, Any] = {**get_variant(kind).sizes, "head_dim": 128, "action_dim": 64}
    sizes |= (
        {"qk_norm_for_text": False, "use_und_k_norm_for_gen": True}
        if kind == "edge"
        else {"sound_dim": 64}
    )
    return TransformerConfig(**sizes)


def digest(pairs: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(pairs.items())).encode()).hexdigest()


def their_functions(git: str) -> dict[str, Any]:
    space: dict[str, Any] = {"re": re, "pathlib": pathlib, "Path": Path, "Any": Any}
    for source in SOURCES:
        text = subprocess.check_output(
            ["git", f"--git-dir={git}", "show", f"{COMMIT}:{source}"], text=True
        )
        for node in ast.parse(text).body:
            names = [node.name] if isinstance(node, ast.FunctionDef) else []
            names += [
                t.id
                for t in getattr(node, "targets", [getattr(node, "target", None)])
                if isinstance(t, ast.Name)
            ]
            if any(WANTED.match(name) for name in names):
                tree = ast.Module(
                    [ast.parse("from __future__ import annotations").body[0], node], []
                )
                exec(compile(ast.fix_missing_locations(tree), source, "exec"), space)
    return space


def main() -> None:
    from strands_cosmos3.engine.weights import expected_shapes

    theirs, recorded = their_functions(sys.argv[1]), {}
    for kind in ("edge", "nano"):
        pairs = {
            name: theirs["_diffusers_to_net_key"](name) for name in expected_shapes(config(kind))
        }
        text = {
            net.removeprefix("language_model."): name
            for name, net in pairs.items()
            if net.startswith("language_model.")
        }
        back = theirs["_remap_language_model_state_dict"]({net: net for net in text})
        assert {net: name for name, net in back.items()} == text, "their two directions differ"
        few = {
            name: net
            for name, net in pairs.items()
            if not name.startswith("layers.") or name.startswith("layers.0.")
        }
        recorded[kind] = {"count": len(pairs), "sha256": digest(pairs), "pairs": few}
    Path(__file__).with_name("framework_names.json").write_text(
        json.dumps(recorded, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
