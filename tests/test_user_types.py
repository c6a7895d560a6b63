"""What a user's editor knows of the package: every public name has its type, and misspelt
arguments are errors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import strands_cosmos3

_USES = """
import strands_cosmos3
from strands_cosmos3 import Cosmos3Policy, Robot

Robot(nonsense=3)
Cosmos3Policy(nonsense=3)
Robot().run_policy(instruction="pick up the red cube", duration="long")
rollout = Robot("panda").run_policy(instruction="pick up the red cube", task="pick")
reveal_type(rollout.success)
assert rollout.tracking is not None
reveal_type(rollout.tracking.mean_mm)
"""


def test_a_type_checker_knows_every_public_name_and_what_it_takes(tmp_path: Path):
    reveals = "".join(f"reveal_type(strands_cosmos3.{name})\n" for name in strands_cosmos3.__all__)
    user = tmp_path / "user.py"
    user.write_text(_USES + reveals)
    pyright = [
        str(Path(sys.executable).parent / "pyright"),
        "--pythonpath",
        sys.executable,
        "--outputjson",
        str(user),
    ]
    done = subprocess.run(pyright, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    found: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"]: d["rule"] for d in found if d["severity"] == "error"}
    assert errors == {4: "reportCallIssue", 5: "reportCallIssue", 6: "reportArgumentType"}
    types = [d["message"] for d in found if d["severity"] == "information"]
    assert len(types) == 2 + len(strands_cosmos3.__all__)
    assert types[:2] == [
        'Type of "rollout.success" is "bool | None"',
        'Type of "rollout.tracking.mean_mm" is "float"',
    ]
    unknown = [told for told in types if told.endswith(('is "Any"', 'is "Unknown"'))]
    assert not unknown
