"""docs/safety.md names the test that holds each promise; the names must be true."""

from __future__ import annotations

import ast
import re

from helpers.environments import ROOT

PAGE = ROOT / "docs/safety.md"
PROMISES = PAGE.read_text().split("## What is not guaranteed")[0]


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 30
    defined = {
        path: {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
        for path, _ in named
    }
    assert not [f"{path}::{name}" for path, name in named if name not in defined[path] or not name.startswith("test_")]


def test_every_promise_names_a_test():
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    assert not [row for row in rows if "::test_" not in row and not row.endswith("| held by |")]
