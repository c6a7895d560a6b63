"""docs/safety.md and SECURITY.md make promises; each names a test, and the names must be true."""

from __future__ import annotations

import ast
import re

from helpers.environments import ROOT

SAFETY = (ROOT / "docs/safety.md").read_text().split("## What is not guaranteed")[0]
SECURITY = (ROOT / "SECURITY.md").read_text()
HELD = [
    line.split("\t")
    for line in (ROOT / "tests/data/safety_promises.tsv").read_text().splitlines()[1:]
]


def rows(page: str, header: str) -> list[str]:
    """The first cells of a page's tables, without their headers."""
    lines = [re.split(r"(?<!\\)\|", line) for line in page.splitlines() if line.startswith("| ")]
    return [cells[1].strip() for cells in lines if cells[1].strip() not in header.split(",")]


def missing(tests: set[str]) -> list[str]:
    """Tests, as path::name, that do not exist."""
    defined = {
        path: {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        for path in {test.split("::")[0] for test in tests}
    }
    return [test for test in tests if test.split("::")[1] not in defined[test.split("::")[0]]]


def test_every_promise_of_the_safety_page_has_a_test():
    headers = "guarantee,state,what happens,what you do,promise,what is found,known"
    headers += ",what is noticed,`on_event`"
    promises = rows(SAFETY, headers)
    assert len(promises) > 50
    assert set(promises) == {promise for promise, _ in HELD}
    assert not missing({test for _, test in HELD})


def test_every_promise_of_the_security_page_names_a_test():
    promises = SECURITY.partition("## Promises")[2].split("## What is not promised")[0]
    lines = [line for line in promises.splitlines() if line.startswith("| ")]
    assert len(lines) > 12
    assert not [row for row in lines if "::test_" not in row and not row.endswith("| held by |")]
    named = set(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", SECURITY))
    assert len(named) > 12
    assert not missing(named)
