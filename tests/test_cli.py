"""The command line as a stranger uses it: files that can be looked at, exit statuses, errors in
one line.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rich.console import Console

from strands_cosmos3.cli import COMMANDS, main
from strands_cosmos3.commands import doctor
from strands_cosmos3.commands.flags import help_texts
from strands_cosmos3.commands.progress import WaitNotice
from strands_cosmos3.commands.rollout import FileFlags
from strands_cosmos3.errors import BackendError
from strands_cosmos3.extras import EXTRAS, Extra
from strands_cosmos3.options import options_of
from strands_cosmos3.robots.panda import FER
from strands_cosmos3.sim.film import VideoRecorder
from strands_cosmos3.types import ErrorSummary, Outcome, Rollout
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.world import Start

EPISODE = Path(__file__).parent / "assets/droid_episode_48330.json"
EXPERT = ["rollout", "--backend", "scripted"]
POSITIONAL = ("action", "what", "part", "model", "path", "question")


def replayed(trajectory: Path, report: Path) -> dict[str, Any]:
    """What the report says of a trajectory's replay."""
    command = ["rollout", "--backend", "replay", "--trajectory", str(trajectory)]
    assert main([*command, "--json", str(report)]) == 0
    (episode,) = json.loads(report.read_text())["episodes"]
    return episode


def test_a_rollout_leaves_a_film_figures_a_plot_and_trajectories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = {name: tmp_path / f"deep/er/a.{name}" for name in ("mp4", "json", "png", "npz")}
    flags = zip(
        ("--video", "--json", "--plot", "--npz"), ("mp4", "json", "png", "npz"), strict=True
    )
    files = [word for flag, name in flags for word in (flag, str(out[name]))]
    command = [*EXPERT, "--task", "reach", "--instruction", "reach the green cube"]
    assert main([*command, "--duration", "0.6", *files]) == 1
    assert str(out["mp4"]) in capsys.readouterr().out.replace("\n", "")
    report = json.loads(out["json"].read_text())
    assert set(report) == {"episodes", "summary", "versions"}
    (episode,) = report["episodes"]
    assert episode["success"] is False
    assert episode["instruction"] == "reach the green cube"
    assert set(episode["tracking"]) == {"mean_mm", "max_mm", "mean_deg", "max_deg"}
    assert set(episode["steps"]) == {"total", "clamped", "stretched", "unconverged", "off_pose"}
    assert set(episode["latency_ms"]) == set(episode["inference_ms"]) == {"p50", "p95", "max"}
    with av.open(str(out["mp4"])) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    # the outcome stands for 1.5 s
    assert len(frames) == pytest.approx((episode["duration_s"] + 1.5) * 20, abs=2)
    assert min(frames[0].std(), frames[-1].std()) > 20  # something is to be seen
    assert np.abs(frames[-1].astype(float) - frames[0]).mean() > 1  # and it moves
    with np.load(out["npz"]) as arrays:
        assert len(arrays["t_s"]) == pytest.approx(episode["duration_s"] * 600, abs=1)
        gap_mm = 1e3 * np.linalg.norm(
            arrays["T_base_hand_commanded"][:, :3, 3] - arrays["T_base_hand_achieved"][:, :3, 3],
            axis=1,
        )
    assert gap_mm.mean() == pytest.approx(episode["tracking"]["mean_mm"], rel=1e-6)
    assert out["png"].stat().st_size > 10_000
    assert not list(tmp_path.rglob(".*")), "half-written files were left behind"


def test_several_episodes_get_a_file_each_that_can_be_replayed_and_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    npz, report = tmp_path / "a.npz", tmp_path / "a.json"
    arguments = [*EXPERT, "--task", "reach", "--episodes", "2", "--seed", "7"]
    assert main([*arguments, "--npz", str(npz), "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "success" in said
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["a-seed7.npz", "a-seed8.npz"]
    assert "a-seed8.npz" in said
    of_both = json.loads(report.read_text())
    assert [episode["seed"] for episode in of_both["episodes"]] == [7, 8]
    assert of_both["summary"]["success_rate"] == 1.0
    of_replay = replayed(tmp_path / "a-seed7.npz", report)
    with np.load(tmp_path / "a-seed7.npz") as arrays:
        assert of_replay["duration_s"] == pytest.approx(len(arrays["t_s"]) / 600, abs=0.15)
    assert of_replay["drift"]["mean_mm"] < 0.5
    assert of_replay["drift"]["max_mm"] < 2.0


def test_a_later_episode_that_fails_takes_no_figures_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_episode = Robot.run_episode

    def gone(robot: Robot, policy: Any, start: Start, *arguments: Any, **options: Any) -> Any:
        if start.seed > 0:
            raise BackendError("the server is gone")
        return run_episode(robot, policy, start, *arguments, **options)

    monkeypatch.setattr(Robot, "run_episode", gone)
    report = tmp_path / "a.json"
    assert (
        main(
            [
                *EXPERT,
                "--task",
                "reach",
                "--duration",
                "0.3",
                "--episodes",
                "2",
                "--json",
                str(report),
            ]
        )
        == 1
    )
    (episode,) = json.loads(report.read_text())["episodes"]
    assert episode["seed"] == 0


def test_an_interrupted_episode_is_no_failure():
    from strands_cosmos3.commands.rollout import _summary

    nothing = ErrorSummary(0.0, 0.0, 0.0, 0.0)
    won, stopped = (
        Rollout(0, "pick", "", outcome, {}, {}, {}, 1.0, 1.0, nothing, nothing, nothing)
        for outcome in (Outcome.SUCCESS, Outcome.INTERRUPTED)
    )
    assert _summary([won, stopped])["success_rate"] == 1.0
    assert _summary([stopped])["success_rate"] is None


def test_a_droid_episode_is_read_as_it_is(tmp_path: Path):
    episode = replayed(EPISODE, tmp_path / "d.json")
    assert episode["success"] is None
    assert episode["outcome"] == "completed"
    assert episode["tracking"]["mean_mm"] < 0.5
    assert episode["tracking"]["max_mm"] < 2.0
    assert 0 < episode["drift"]["mean_mm"] < 0.5


def test_ctrl_c_brings_the_arm_to_rest_and_keeps_everything(tmp_path: Path):
    film, report, npz = (tmp_path / f"a.{suffix}" for suffix in ("mp4", "json", "npz"))
    files = ["--json", str(report), "--npz", str(npz), "--video", str(film), "--film", "views"]
    arguments = [*EXPERT, "--task", "place", "--episodes", "3", *files]
    process = subprocess.Popen(
        [sys.executable, "-m", "strands_cosmos3.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 0 for path in tmp_path.glob(".a*")):  # it is filming
        assert time.monotonic() < deadline, "no film was begun"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "interrupted" in out
    assert "a-seed0.npz" in out.replace("\n", "")
    (episode,) = json.loads(report.read_text())["episodes"]
    assert episode["outcome"] == "interrupted"
    with np.load(tmp_path / "a-seed0.npz") as arrays:
        last = np.abs(np.diff(arrays["q_commanded_rad"][-3:], axis=0)) * 600**3
    # The last reference is at rest, and a stop may end in the tick's last step: before it the arm
    # moves by as much as its jerk limit allows one and two steps before rest.
    assert (last <= FER.jerk * np.array([[7 / 6], [1 / 6]]) * (1 + 1e-6)).all()
    with av.open(str(tmp_path / "a-seed0.mp4")) as kept:
        assert sum(1 for _ in kept.decode(video=0)) > 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("older", [True, False])
def test_a_film_that_this_run_did_not_write_is_not_named_as_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    older: bool,
):
    """Ctrl-C comes before the first picture; an older film keeps its bytes."""
    film, report = tmp_path / "a.mp4", tmp_path / "a.json"
    if older:
        film.write_bytes(b"an older film")
    presses = iter([signal.SIGINT])
    monkeypatch.setattr(
        VideoRecorder, "film_tick", lambda *_: [signal.raise_signal(key) for key in presses]
    )
    assert main([*EXPERT, "--video", str(film), "--json", str(report)]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert f"wrote {report}" in lines
    assert f"wrote {film}" not in lines
    (said,) = (line for line in lines if line.startswith("did not write"))
    assert str(film) in said
    assert ("the older one is as it was" in said) == older
    assert not older or film.read_bytes() == b"an older film"


def test_files_of_some_episodes_are_named(tmp_path: Path):
    nothing = ErrorSummary(0.0, 0.0, 0.0, 0.0)
    first, second = (
        Rollout(seed, "pick", "", Outcome.SUCCESS, {}, {}, {}, 1.0, 1.0, nothing, video=video)
        for seed, video in ((0, tmp_path / "a-seed0.mp4"), (1, None))
    )
    files = FileFlags(video=tmp_path / "a.mp4", dataset=tmp_path / "set")
    assert [*files.written([first, second], True, 1)] == [
        f"wrote {tmp_path}/a-seed0.mp4",
        f"wrote {tmp_path}/set",
    ]
    (film, dataset) = files.written([second], True, 0)
    assert film.startswith(f"did not write {tmp_path}/a-seed1.mp4")
    assert dataset.startswith(f"did not write {tmp_path}/set")


def test_a_command_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Before it loads anything, and before the first inference; here with no patience at all."""

    class Timer:
        def __init__(self, after_s: float, say: Any, phase: list[str]):
            assert after_s < 2
            self.start = lambda: say(*phase)

        def cancel(self) -> None:
            pass

    monkeypatch.setattr("strands_cosmos3.commands.progress.Timer", Timer)
    assert main([*EXPERT, "--task", "reach", "--duration", "0.1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "loading world table and policy scripted ...",
        "waiting for the first answer ...",
    ]


def test_a_wait_names_a_world_as_it_was_written(capsys: pytest.CaptureFixture[str]):
    """Brackets in its name are no markup of the terminal's."""
    with WaitNotice(Console(width=80), after_s=0.0) as wait:
        wait.begin("loading world [/red]a[b].py:World")
        deadline_s = time.monotonic() + 20
        while not (said := capsys.readouterr().out) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert said == "loading world [/red]a[b].py:World ...\n"


def test_a_short_wait_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]):
    with WaitNotice(Console(), after_s=0.2) as wait:
        wait.begin("loading")
        wait.begin("waiting for the first answer")
        wait.end()
        wait.begin("drawing")
    time.sleep(0.3)
    assert capsys.readouterr().out == ""


def test_a_failed_task_is_status_one():
    assert main([*EXPERT, "--task", "place", "--duration", "1"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rollout", "--backend", "replay"], "--trajectory"),
        (["rollout", "--backend", "replay", "--trajectory", "/no/such.json"], "/no/such.json"),
        (["rollout", "--trajectory", "x.json"], "x.json"),
        (["rollout", "--instruction", "pick up the pink cube"], "red, green, blue"),
        (
            ["rollout", "--task", "stack"],
            "the bundled policy knows task 'reach' or 'pick' or 'place' on its own simulated table, "
            "not 'stack': use --backend scripted",
        ),
        (
            ["rollout", "--robot", "fr3", "--task", "reach"],
            "the bundled policy knows robot 'panda' or 'franka' on its own simulated table, not "
            "'fr3': use --backend scripted",
        ),
        (["view", "--task", "stack"], "not 'stack': use --backend scripted"),
        (["rollout", "--control-frequency", "70"], "50"),
        (["rollout", "--video", "film.gif"], ".mp4"),
        (["rollout", "--json", "/proc/nowhere/a.json"], "/proc/nowhere"),
        (["rollout", "--episodes", "0"], "--episodes"),
        (["rollout", "--derating", "2"], "derating"),
        (["rollout", "--duration", "-1"], "duration"),
        ([*EXPERT, "--port", "8000"], "--backend service"),
        (["rollout", "--seed", "-1"], "--seed must be a whole number"),
        (["view", "--port", "9000"], "the page's is --page-port 9000"),
        (["view", "--play", "nowhere"], "--play 'nowhere' does not exist"),
        (
            ["demos", "--out", "/proc/nowhere/demos"],
            "--out '/proc/nowhere/demos' cannot be written",
        ),
        (
            ["rollout", "--backend", "replay", "--trajectory", "x.json", "--dialect", "openpi"],
            "--backend service",
        ),
        (
            [*EXPERT, "--num-steps", "3"],
            "--num-steps 3 belongs to --backend native, onnx, distributed, diffusers or service, not "
            "to scripted",
        ),
        ([*EXPERT, "--device", "cuda"], "--device cuda"),
        (
            [*EXPERT, "--policy-frames", "1"],
            "--policy-frames 1 belongs to --backend native, onnx or distributed",
        ),
        (["rollout", "--backend", "service", "--guidance-scale", "3"], "--guidance-scale 3"),
        (
            ["rollout", "--backend", "diffusers", "--model", "x", "--policy-frames", "1"],
            "--policy-frames 1",
        ),
        (
            [*EXPERT, "--cuda-graphs"],
            "--cuda-graphs True belongs to --backend native or distributed, not to scripted",
        ),
        (["rollout", "--cuda-graphs", "--device", "cpu"], "cuda_graphs needs a CUDA device"),
        ([*EXPERT, "--model", "x"], "--model x belongs to"),
        (["rollout", "--backend", "diffusers"], "--backend diffusers needs --model"),
        (
            [*EXPERT, "--json", "a.json", "--dataset", "a.json"],
            "--json 'a.json' and --dataset 'a.json' name the same path",
        ),
        (
            [*EXPERT, "--dataset", "ds", "--json", "ds/meta/info.json"],
            "--json 'ds/meta/info.json' and --dataset 'ds' lie one",
        ),
        ([*EXPERT, "--json", "a.json", "--npz", "x/../a.json/b.npz"], "--json 'a.json' and --npz"),
        (
            ["view", *EXPERT[1:], "--video", "ds/a.mp4", "--dataset", "ds"],
            "--video 'ds/a.mp4' and --dataset 'ds'",
        ),
        (
            ["rollout", "--backend", "replay", "--trajectory", "a.npz", "--npz", "a.npz"],
            "--npz would overwrite 'a.npz', which --trajectory reads",
        ),
        (
            ["infer", "--video", "a.mp4", "--out", "a", "--decode-video"],
            "--out would overwrite 'a.mp4', which --video reads",
        ),
        (
            ["infer", "--action-file", "a_action.json", "--out", "a", "--mode", "forward_dynamics"],
            "--out would overwrite 'a_action.json', which --action-file reads",
        ),
        (["checkpoint", "inspect", "x", "--quantize", "int8"], "--quantize belongs to convert"),
        (["checkpoint", "contract", "x", "--dtype", "float32"], "--dtype belongs to convert"),
        (["checkpoint", "inspect", "x", "--quantize-text"], "--quantize-text belongs to convert"),
        (["checkpoint", "contract", "x", "--to", "lerobot"], "--to belongs to convert"),
        (["checkpoint", "convert", "x", "--json", "a.json"], "--json belongs to inspect"),
        (["checkpoint", "inspect", "x", "--out", "y"], "--out belongs to convert and contract"),
        (["robot", "inspect", "panda"], "MuJoCo's .xml file of its model, got 'panda'"),
        (["robot", "inspect", "nowhere.xml"], "got 'nowhere.xml'"),
        (["robot", "inspect", "arm.urdf"], "got 'arm.urdf'"),
        (
            ["rollout", "--backend", "replay", "--trajectory", __file__],
            "is no recording: it is neither .json nor .npz",
        ),
    ],
)
def test_bad_usage_is_status_two_and_one_line(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert not any(tmp_path.iterdir())  # nothing was written
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["--nonsense"], ["rollout", "--nonsense"]])
def test_unknown_words_are_status_two(arguments: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--task", "fly"], "unknown task 'fly'. Valid: "),
        (["--world", "moon"], "unknown world 'moon'"),
        (["--world", "json:loads"], "json:loads"),
    ],
)
def test_unknown_tasks_and_worlds_are_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["rollout", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]):
    kind = getattr(import_module(f"strands_cosmos3.commands.{command}"), COMMANDS[command])
    summary = inspect.getdoc(kind).partition("\n")[0]
    assert summary.endswith(".")
    assert len(summary) <= 72
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    # where to; where to, from what and on what; where to and from what; what and which; what
    needed = {"ask": 1, "demos": 1, "train": 3, "rl": 2, "checkpoint": 2, "robot": 1}
    assert printed.count("(required)") == needed.get(command, 0)
    for option in options_of(kind).values():
        if option.hidden:
            continue
        owner = kind
        for section in option.path[:-1]:
            owner = {field.name: field for field in fields(owner)}[section].default_factory
        assert help_texts(owner)[option.path[-1]], f"{option.name} has no help text"
        assert f"--{option.name.replace('_', '-')}" in printed or option.name in POSITIONAL


OF_OTHER_PROGRAMS = (
    *("help", "version", "flag", "no-flag", "head", "logdir", "repo-type"),
    *("nproc-per-node", "nnodes", "master-addr", "master-port"),  # torchrun's
    *("line", "track", "mark"),  # colours of a page
    "tyro-print-completion",  # tyro's, of every program
    *("repo-id", "root", "push-to-hub"),  # LeRobot's converter
    *("no-deps", "hash", "require-hashes", "disable-pip-version-check", "dest", "requirement"),
    *("no-binary", "only-binary", "implementation", "abi", "python-version", "platform"),  # pip's
)


def test_every_flag_that_a_message_names_exists():
    package = Path(inspect.getfile(main)).parent
    flags = {
        option.name.replace("_", "-")
        for command in COMMANDS
        for kind in vars(import_module(f"strands_cosmos3.commands.{command}")).values()
        if inspect.isclass(kind) and is_dataclass(kind)
        for option in options_of(kind).values()
        if not option.hidden
    }
    for path in package.rglob("*.py"):
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]*)", path.read_text()))
        unknown = {name for name in named if name.removeprefix("no-") not in flags}
        unknown -= {*OF_OTHER_PROGRAMS}
        assert not unknown, (path.name, unknown)


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """But for command lines, which are to be copied."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert "`" not in printed
    wide = [line for line in printed.splitlines() if len(line) > width]
    assert all(re.match(r" *(usage: )?(strands-cosmos3|torchrun) ", line) for line in wide), wide


def test_the_usage_names_what_is_required(capsys: pytest.CaptureFixture[str]):
    for command, options in (("train", "--out PATH --model STR --dataset STR "), ("view", "")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"usage: strands-cosmos3 {command} {options}[-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rolout"], "rollout"),
        (["help", "evalute"], "evaluate"),
        (["trian", "--out", "x"], "train"),
    ],
)
def test_a_mistyped_command_has_a_suggestion(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Did you mean '{hint}'?" in line


def test_help_of_a_command_is_its_help(capsys: pytest.CaptureFixture[str]):
    for arguments, says in ((["help", "rollout"], "--task"), (["help"], "Exit status")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert says in capsys.readouterr().out


def test_doctor_finds_this_machine_fit(tmp_path: Path):
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    findings = {f["what"]: f for f in json.loads((tmp_path / "d.json").read_text())["findings"]}
    assert findings["rendering"]["state"] == "ok"
    limits = findings["robots' limits"]["detail"]
    assert limits.startswith(
        "all published for dual_panda, fr3, panda; assumed: ur5e (acceleration, jerk)"
    )
    assert all(f["remedy"] for f in findings.values() if f["state"] == "absent")


def test_doctor_promises_no_checkpoint_where_no_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Extra, "absent", ("onnxruntime", "torch"))
    monkeypatch.setattr(
        doctor,
        "_CHECKS",
        tuple(c for c in doctor._CHECKS if c[0] in ("python", "embedded policy", "viser")),
    )
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "viser" in said
    assert (
        "can run without a checkpoint: strands-cosmos3 rollout --backend scripted (absent: "
        "embedded policy)" in said
    )
    assert "nothing that runs it is installed; pip install" in said


@pytest.mark.parametrize(("installed", "said"), [("onnx", "onnxruntime"), ("engine", "torch")])
def test_doctor_says_which_engine_runs_the_bundled_policy(monkeypatch, installed, said):
    monkeypatch.setattr(
        Extra, "absent", property(lambda extra: () if extra is EXTRAS[installed] else ("x",))
    )
    monkeypatch.setattr(doctor, "version", lambda name: f"{name} 1.2")
    backend = {"onnx": "onnx", "engine": "native"}[installed]
    assert f"backend {backend} runs it ({said} {said} 1.2)" in doctor._bundled()


def test_doctor_names_what_is_broken_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 1
    findings = {f["what"]: f for f in json.loads((tmp_path / "d.json").read_text())["findings"]}
    assert findings["rendering"]["state"] == "broken"
    assert "libegl1" in findings["rendering"]["remedy"]


def test_view_without_a_display_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main([*EXPERT, "--view"]) == 1
    assert "--video" in capsys.readouterr().err
