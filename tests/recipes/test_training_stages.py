"""The stages of the bundled policy: each runs once, an interrupted one resumes, and changes
reach all later ones.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tyro

from helpers.environments import ROOT
from recipes.pipeline import (
    Stage,
    digest,
    make,
    program,
    read_record,
    run_stages,
)
from recipes.table_policy import __main__ as program_module
from recipes.table_policy.recipe import TINY, Recipe
from strands_cosmos3.cli import COMMANDS, _union
from strands_cosmos3.commands.demos import Demos
from strands_cosmos3.commands.train import locked_run
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import ConfigError, TrainingError
from strands_cosmos3.resources import locked
from strands_cosmos3.training.cost import seconds_of
from strands_cosmos3.training.matching import DataShard


class Line:
    """Three stages; the second reads the first's file, and the third, which has a folder, both."""

    def __init__(self, folder: Path):
        self.folder, self.ran, self.said, self.options = folder, [], [], {"a": 1, "b": 1, "c": 1}
        self.broken: str | None = None

    def stage(self, name: str, reads: tuple[str, ...], made: str) -> Stage:
        def work(folder: Path) -> None:
            self.ran.append(name)
            (folder / made).parent.mkdir(exist_ok=True)
            earlier = "".join((folder / path).read_text() for path in reads)
            (folder / f"{made}.partial").write_text("begun")
            if self.broken == name:
                raise KeyboardInterrupt
            (folder / made).write_text(f"{earlier}{name}{self.options[name]}")

        decides = {"option": self.options[name]}
        owns = (made, f"{made}.partial")
        return Stage(name, f"make {name}", decides, reads, (made,), owns, work)

    def make(self) -> list[str]:
        self.ran = []
        stages = (
            self.stage("a", (), "a.txt"),
            self.stage("b", ("a.txt",), "b.txt"),
            self.stage("c", ("a.txt", "b.txt"), "c/c.txt"),
        )
        make(self.folder, stages, self.said.append)
        return self.ran

    def text(self) -> str:
        return (self.folder / "c/c.txt").read_text()


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path / "made")


def test_a_finished_stage_is_not_run_again(line: Line):
    assert line.make() == ["a", "b", "c"]
    assert line.make() == []
    assert "c: done on" in line.said[-1]


def test_other_options_reach_all_later_stages_and_nothing_is_deleted(line: Line):
    line.make()
    line.options["b"] = 2
    assert line.make() == ["b", "c"]
    assert line.text() == "a1a1b2c1"
    assert (line.folder / "stale-1/b.txt").read_text() == "a1b1"
    assert (line.folder / "stale-1/c/c.txt").read_text() == "a1a1b1c1"
    assert json.loads((line.folder / "stale-1/records/b.json").read_text())["decides"] == {
        "option": 1
    }
    line.options["c"] = 2
    assert line.make() == ["c"]
    assert (line.folder / "stale-2/c/c.txt").exists()


@pytest.mark.parametrize(
    ("path", "again"), [("a.txt", ["a", "b", "c"]), ("b.txt", ["b", "c"]), ("c/c.txt", ["c"])]
)
def test_what_was_changed_or_lost_is_made_again(line: Line, path: str, again: list[str]):
    line.make()
    (line.folder / path).write_text("something else")
    assert line.make() == again
    assert line.text() == "a1a1b1c1"
    (line.folder / path).unlink()
    assert line.make() == again


def test_an_input_that_was_put_there_with_its_record_reaches_the_later_stages(
    line: Line, tmp_path: Path
):
    line.make()
    other = Line(tmp_path / "other")
    other.options["a"] = line.options["a"] = 2
    other.make()
    for path in ("a.txt", "records/a.json"):
        (line.folder / path).write_bytes((other.folder / path).read_bytes())
    assert line.make() == ["b", "c"]
    assert line.text() == "a2a2b1c1"


def test_an_interrupted_stage_resumes_with_what_it_has(line: Line):
    line.broken = "b"
    with pytest.raises(KeyboardInterrupt):
        line.make()
    record = read_record(line.folder, "b")
    assert "makes" not in record
    line.broken = None
    assert line.make() == ["b", "c"]
    assert not list(line.folder.glob("stale-*"))
    assert read_record(line.folder, "b")["began"] == record["began"]
    assert read_record(line.folder, "b")["seconds"] >= record["seconds"]


def test_an_interrupted_stage_with_other_options_begins_anew(line: Line):
    line.broken = "b"
    with pytest.raises(KeyboardInterrupt):
        line.make()
    line.broken, line.options["b"] = None, 2
    assert line.make() == ["b", "c"]
    assert (line.folder / "stale-1/b.txt.partial").exists()


def test_files_of_unknown_origin_are_kept_aside(line: Line):
    line.folder.mkdir()
    (line.folder / "b.txt").write_text("mine")
    line.make()
    assert (line.folder / "stale-1/b.txt").read_text() == "mine"


def test_a_stage_that_makes_nothing_is_named(line: Line):
    with pytest.raises(TrainingError, match=r"stage d did not write d\.txt .*make d"):
        make(
            line.folder,
            [Stage("d", "make d", {}, (), ("d.txt",), ("d.txt",), lambda _: None)],
            line.said.append,
        )
    with pytest.raises(TrainingError, match=r"status 2 of: cd .* strands-cosmos3 train --out x"):
        program(["train", "--out", "x"])(line.folder)


def test_a_second_process_is_kept_out_of_a_folder(line: Line, tmp_path: Path):
    parts = tmp_path / ".demos.parts-seed0"
    busy = r"another process writes to .*; wait for it, stop it, or choose another --out\."
    for folder, work in (
        (line.folder, line.make),
        (parts, Demos(tmp_path / "demos", episodes=1).run),
        (
            tmp_path / "run",
            partial(ExitStack().enter_context, locked_run(tmp_path / "run", DataShard())),
        ),
    ):
        folder.mkdir()
        with locked(folder, "--out"), pytest.raises(ConfigError, match=busy):
            work()
    # not the first of its processes
    with locked(tmp_path / "run", "--out"), locked_run(tmp_path / "run", DataShard(1, 2)):
        assert line.make() == ["a", "b", "c"]


def test_a_folders_digest_is_that_of_its_names_and_contents(tmp_path: Path):
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_text("1")
    first = digest(tmp_path / "d")
    (tmp_path / "d/.hidden").write_text("2")
    assert digest(tmp_path / "d") == first
    (tmp_path / "d/e/f").rename(tmp_path / "d/e/g")
    assert digest(tmp_path / "d") not in (first, None)
    assert digest(tmp_path / "nothing") is None


@pytest.mark.parametrize("recipe", [Recipe(), TINY], ids=["full", "tiny"])
def test_every_command_can_be_parsed_and_reads_what_was_made(recipe: Recipe):
    stages = recipe.stages(2)
    made = set[str]()
    for stage in stages:
        assert set(stage.reads) <= made
        made |= {*stage.makes, f"records/{stage.name}.json"}
        command = shlex.split(stage.command)
        if command[0] == "strands-cosmos3":
            assert command[1] in COMMANDS
            tyro.cli(_union(command[1:]), args=command[1:])
    assert [stage.name for stage in stages][:6] == [
        "demos",
        "vae",
        "policy",
        "preview",
        "joint",
        "decoder",
    ]


def test_more_steps_of_a_stage_leave_the_earlier_ones_and_workers_change_nothing():
    def identity(recipe: Recipe, workers: int = 2):
        return {stage.name: (stage.decides, stage.reads) for stage in recipe.stages(workers)}

    plain = identity(Recipe())
    assert identity(Recipe(), 8) == plain
    assert identity(Recipe(evaluate_every=0)) == plain
    changed = {
        name: [
            stage
            for stage, value in identity(replace(Recipe(), **{name: other})).items()
            if value != plain[stage]
        ]
        for name, other in {
            "joint_steps": 5,
            "vae_steps": 5,
            "decoder_steps": 5,
            "hidden": 64,
            "latent_patch": 2,
            "seeds": 3,
            "conditions": "plain",
            "few_seeds": 3,
        }.items()
    }
    assert changed == {
        "joint_steps": ["joint"],
        "vae_steps": ["vae"],
        "decoder_steps": ["decoder"],
        "hidden": ["policy", "joint"],
        "latent_patch": ["policy", "joint"],
        "seeds": ["evaluation", "conditions"],
        "conditions": ["conditions"],
        "few_seeds": ["controls"],
    }


@pytest.mark.slow
def test_ctrl_c_reaches_the_stage_once_and_it_ends_by_itself(tmp_path: Path):
    """The command of a stage is in a session of its own; here demonstrations, which end with status
    130.

    It begins with SIGINT ignored, as under nohup.
    """
    command = [
        sys.executable,
        "-m",
        "recipes.table_policy",
        "--out",
        str(tmp_path / "made"),
        "--tiny",
    ]
    ignoring = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": ignoring}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **how)
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
    assert said.count("strands-cosmos3: interrupted.") == 1
    assert "the same command goes on" in said
    assert read_record(tmp_path / "made", "demos")["seconds"] > 0


@pytest.mark.slow
def test_all_stages_of_the_tiny_recipe(tmp_path: Path, capsys):
    out = tmp_path / "made"
    assert program_module.main(["--out", str(out), "--tiny"]) == 0
    Checkpoint.open(out / "checkpoint").verify()
    card = (out / "checkpoint/README.md").read_text()
    for part in (
        "What it can do",
        "What it cannot do",
        "| plain | reach | 0 of 1",
        "| swapped | pick | 0 of 1",
        "| latency=0.2 | pick | 0 of 1",
        "| latency=0.2 | 0.",
        "| blank | reach | 0 of 1",
        "How it was made",
        "--joint-steps 2",
        "Seed 0.",
    ):
        assert part in card
    before = digest(out / "checkpoint")
    capsys.readouterr()
    assert program_module.main(["--out", str(out), "--tiny"]) == 0
    assert capsys.readouterr().out.count(": done on") == 10
    assert digest(out / "checkpoint") == before


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    assert (
        run_stages(
            ["--out", str(tmp_path / "file/out")],
            "small thing",
            "",
            lambda tiny, seed, workers: (),
            "made",
        )
        == 1
    )
    said = capsys.readouterr().err
    assert said.startswith("small thing: ")
    assert len(said.splitlines()) == 1


def test_the_command_makes_another_policy_with_another_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = list[Stage]()
    monkeypatch.setattr("recipes.pipeline.make", lambda folder, stages: asked.extend(stages))
    for seed in (0, 3):
        assert program_module.main(["--out", str(tmp_path), "--seed", str(seed)]) == 0
        assert all(f"--seed {seed} " in stage.command for stage in asked[:6])
        asked.clear()


def test_time_of_a_curve_leaves_interruptions_out(tmp_path):
    curve = tmp_path / "curve.jsonl"
    assert seconds_of(curve) == 0
    curve.write_text(
        "".join(
            json.dumps({"step": i, "time": at}) + "\n" for i, at in enumerate((5, 7, 9, 3609, 3612))
        )
    )
    assert seconds_of(curve) == 7
