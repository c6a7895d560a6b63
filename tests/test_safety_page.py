"""docs/safety.md and SECURITY.md name the test that holds each promise; the names must be true."""

from __future__ import annotations

import ast
import re

import pytest

from helpers.environments import ROOT

SAFETY, SECURITY = (ROOT / "docs/safety.md").read_text(), (ROOT / "SECURITY.md").read_text()
PAGES = {
    "safety": (SAFETY, SAFETY.split("## What is not guaranteed")[0], 30),
    "security": (
        SECURITY,
        SECURITY.partition("## Promises")[2].split("## What is not promised")[0],
        12,
    ),
}


@pytest.mark.parametrize(("page", "promises", "least"), PAGES.values(), ids=PAGES)
def test_every_test_that_the_page_names_exists(page, promises, least):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > least
    defined = {
        path: {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        for path in {path for path, _ in named}
    }
    assert not [
        f"{path}::{name}"
        for path, name in named
        if name not in defined[path] or not name.startswith("test_")
    ]


@pytest.mark.parametrize(("page", "promises", "least"), PAGES.values(), ids=PAGES)
def test_every_promise_names_a_test(page, promises, least):
    rows = [line for line in promises.splitlines() if line.startswith("| ")]
    assert len(rows) > least
    assert not [row for row in rows if "::test_" not in row and not row.endswith("| held by |")]
