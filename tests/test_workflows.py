"""The workflows run what CONTRIBUTING says, and nothing that does not exist. They themselves run on
GitHub only.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import yaml

from helpers.environments import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(workflow: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]


def commands(workflow: str) -> list[str]:
    """What the steps of a workflow run, once for each cell of its job's matrix; `.ci/run` as the
    lines that it has."""
    lines = []
    for job in jobs(workflow).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for cell in product(*matrix.values()):
            for step in job["steps"]:
                run = step.get("run", "")
                for name, value in zip(matrix, cell, strict=True):
                    run = run.replace(f"${{{{ matrix.{name} }}}}", value)
                lines += run.splitlines()
    script = (ROOT / ".ci/run").read_text().splitlines()
    return [line for command in lines for line in (script if command == ".ci/run" else [command])]


def made(workflow: str) -> set[str]:
    """The targets that a workflow makes; its check of an installation is that of the target."""
    lines = commands(workflow)
    targets = {
        word
        for line in lines
        if line.startswith("make ")
        for word in line.split()[1:]
        if "=" not in word
    }
    helpers = [line for line in lines if "python -m helpers.install_check" in line]
    return targets | ({"test-install"} if helpers else set())


def suites(when: str) -> set[str]:
    """The suites of CONTRIBUTING's table that run then."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `make ([a-z-]+)` \| .* \| ([^|]+) \|$", page, re.MULTILINE)
    return {target for target, then in rows if when in then}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_has_a_limit_and_makes_targets_that_exist(workflow):
    for name, job in jobs(workflow.name).items():
        assert job["timeout-minutes"] <= 360, name
        assert all("uses" in step or "run" in step for step in job["steps"]), name
    assert "${{" not in "".join(commands(workflow.name))
    assert made(workflow.name) <= TARGETS


def test_suites_run_when_contributing_says():
    assert suites("every pull request") == made("ci.yml")
    assert suites("nightly") == made("nightly.yml")
    assert suites("release") == made("publish.yml")
    assert made("docs.yml") == {"docs"}


def test_every_suite_is_in_contributing_s_table():
    parts = {"test-browser", "test-lerobot"}  # of make test-slow
    tests = {target for target in TARGETS if target.startswith("test")}
    assert tests - parts <= suites("every pull request") | suites("nightly") | suites("by hand")
    assert len(tests) > 10


def test_the_suite_runs_on_every_python_that_is_supported():
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    cells = jobs("ci.yml")
    assert cells["install"]["strategy"]["matrix"]["python"] == versions
    locked = cells["acceptance"]["steps"][1]["with"]["python-version"].split("\n")[-1]
    assert sorted([locked, *cells["test"]["strategy"]["matrix"]["python"]]) == versions
