"""The steps of a recipe: each runs once, an interrupted one resumes, and every command exists."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tyro

from helpers.environments import ROOT
from recipes.libero_policy.demos import LiberoRecording
from recipes.libero_policy.recipe import RECIPE as LIBERO
from recipes.pipeline import PipelineOptions, PipelineStep, command_step, run_steps
from recipes.table_policy.recipe import RECIPE as TABLE
from recipes.table_policy.record import TableRecording
from recipes.table_policy.train import TrainOptions
from strands_cosmos3.cli import COMMANDS, _parsed
from strands_cosmos3.commands.flags import registry
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import ConfigError, TrainingError
from strands_cosmos3.resources import load_json, locked

RECORDINGS: dict[str, Any] = {
    "recipes.libero_policy.demos": LiberoRecording,
    "recipes.table_policy.record": TableRecording,
}


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def steps(ran: list[str]) -> list[PipelineStep]:
    return [
        PipelineStep(name, f"make {name}", lambda _, name=name: ran.append(name)) for name in "abc"
    ]


@pytest.mark.smoke
def test_a_finished_step_is_not_run_again(steps, ran, tmp_path: Path, capsys):
    run_steps(tmp_path, steps)
    run_steps(tmp_path, steps)
    assert ran == ["a", "b", "c"]
    assert "c: done on" in capsys.readouterr().out
    (tmp_path / "records/b.json").unlink()
    run_steps(tmp_path, steps)
    assert ran == ["a", "b", "c", "b"]


@pytest.mark.smoke
def test_an_interrupted_step_runs_again_and_its_times_add_up(steps, ran, tmp_path: Path):
    def interrupted(_: Path) -> None:
        time.sleep(0.15)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_steps(tmp_path, [steps[0], PipelineStep("b", "make b", interrupted), steps[2]])
    assert "finished" not in load_json(tmp_path / "records/b.json")
    run_steps(tmp_path, steps)
    assert ran == ["a", "b", "c"]
    assert load_json(tmp_path / "records/b.json")["seconds"] >= 0.1


@pytest.mark.smoke
def test_a_folder_keeps_the_commands_that_it_was_made_with(steps, tmp_path: Path):
    run_steps(tmp_path, steps)
    other = PipelineStep("b", "make b 2", steps[1].work)
    with pytest.raises(ConfigError, match="holds b by 'make b', which is now 'make b 2'"):
        run_steps(tmp_path, [steps[0], other])
    with locked(tmp_path, "--out"), pytest.raises(ConfigError, match="another process writes"):
        run_steps(tmp_path, steps)


@pytest.mark.smoke
def test_a_failed_command_is_named(tmp_path: Path):
    step = command_step("d", "train --out x")
    with pytest.raises(TrainingError, match=r"status 2 of: cd .* strands-cosmos3 train --out x"):
        run_steps(tmp_path, [step])


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", [TABLE, LIBERO], ids=["table", "libero"])
@pytest.mark.parametrize("tiny", [False, True], ids=["whole", "tiny"])
def test_every_command_can_be_parsed_and_workers_change_none(recipe, tiny):
    steps = recipe.steps(PipelineOptions(Path("out"), seed=3, tiny=tiny))
    assert steps == recipe.steps(PipelineOptions(Path("out"), seed=3, workers=8, tiny=tiny))
    assert steps[0].name == "demos"
    assert steps[-1].name == "card"
    for step in steps:
        program, *arguments = shlex.split(step.command)
        if program == "strands-cosmos3":
            assert arguments[0] in COMMANDS
            _parsed(arguments)
        elif program == "python":
            assert arguments[0] == "-m"
            if arguments[1] in RECORDINGS:
                how = {"config": (tyro.conf.OmitArgPrefixes,), "registry": registry}
                assert tyro.cli(RECORDINGS[arguments[1]], args=arguments[2:], **how).seed == 3
            else:
                assert arguments[1] == "recipes.table_policy.train"
                assert tyro.cli(TrainOptions, args=arguments[2:]).run.seed == 3


def test_ctrl_c_reaches_the_step_once_and_it_ends_by_itself(tmp_path: Path):
    """The command of a step is in a session of its own; here demonstrations, which end with status
    130. It begins with SIGINT ignored, as under nohup.
    """
    command = [sys.executable, "-m", "recipes.table_policy", "--out", str(tmp_path / "made")]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": ignoring}
    process = subprocess.Popen(
        [*command, "--tiny"], cwd=ROOT, stderr=subprocess.PIPE, text=True, **how
    )
    try:
        options = tmp_path / "made/.demos.parts-seed0/options.json"
        while not options.exists():  # it is at work
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert said.count("demos: interrupted.") == 1
    assert "the same command goes on" in said
    assert load_json(tmp_path / "made/records/demos.json")["seconds"] > 0


def test_all_steps_of_the_tiny_recipe(tmp_path: Path, capsys):
    out = tmp_path / "made"
    assert TABLE.main(["--out", str(out), "--tiny"]) == 0
    Checkpoint.open(out / "checkpoint").verify()
    card = (out / "checkpoint/README.md").read_text()
    for part in (
        "What it can do",
        "What it cannot do",
        "| plain | reach | 0 of 1",
        "| swapped | pick | 0 of 1",
        "| latency=0.2 | pick | 0 of 1",
        "| blank | reach | 0 of 1",
        "How it was made",
        "--joint-steps 2",
        "--seed 0",
    ):
        assert part in card
    capsys.readouterr()
    assert TABLE.main(["--out", str(out), "--tiny"]) == 0
    assert capsys.readouterr().out.count(": done on") == 10


@pytest.mark.smoke
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert TABLE.main(["--out", str(tmp_path / "file/out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bundled policy: ")
    assert len(said.splitlines()) == 1
