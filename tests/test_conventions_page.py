"""docs/conventions.md names the test that guards each convention; the names must be true."""

from __future__ import annotations

import ast
import re

from helpers.environments import ROOT


def test_every_guard_that_the_page_names_exists():
    guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/conventions.md").read_text())
    assert len(guards) > 30
    defined = {
        path: {
            node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")
        }
        for path, _ in guards
    }
    assert not [f"{path}::{name}" for path, name in guards if name not in defined[path]]


def test_every_line_of_its_tables_has_a_guard():
    rows = [
        line
        for line in (ROOT / "docs/conventions.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert not [row for row in rows if "::" not in row and not row.endswith("| guarded by |")]
