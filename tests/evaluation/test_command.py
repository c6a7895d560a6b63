"""The command as users run it: killed, interrupted, resumed; and nothing left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import psutil
import pytest
import ray

from helpers import small_world
from strands_cosmos3.cli import main
from strands_cosmos3.errors import ContractError
from strands_cosmos3.evaluation import evaluate as module
from strands_cosmos3.evaluation.evaluate import evaluate
from strands_cosmos3.evaluation.folder import without_times
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.fleet import cluster
from strands_cosmos3.fleet.cluster import _auth_token
from strands_cosmos3.resources import resource

OPTIONS = [
    *("--world", f"{small_world.__file__}:SmallWorld", "--backend", "scripted"),
    *("--tasks", "wait", "--seeds", "12", "--conditions", "plain,swapped"),
    *("--films", "0", "--workers", "2"),
]


@pytest.fixture
def start():
    """Starts the command; what still runs at the end of a test is ended with it."""
    started = []

    def go(out, *more):
        command = [
            sys.executable,
            "-m",
            "strands_cosmos3.cli",
            "evaluate",
            *OPTIONS,
            "--out",
            str(out),
            *more,
        ]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield go
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def stored(out):
    """Records of finished episodes; a killed writer's hidden temporary file is not one."""
    return sorted(
        path for path in Path(out).glob("episodes/*/*/*.json") if not path.name.startswith(".")
    )


def wait_for(process, condition, within_s=90.0):
    deadline = time.monotonic() + within_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.05)


def rays_of(pid):
    """Processes of the Ray that a driver started, wherever they hang in the tree, and its
    folder.
    """
    mark = f"sc3-ray-{pid}-"
    found = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(mark in word for word in p.info["cmdline"] or [])
    ]
    return found, list(Path("/tmp").glob(f"{mark}*"))


def workers_of(pid):
    """Its simulators: Ray names a process after the class or the method that it runs."""
    family = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found = psutil.process_iter(["pid", "cmdline"])
    return [
        p.info["pid"]
        for p in found
        if p.info["pid"] in family and "ray::WorkerActor" in " ".join(p.info["cmdline"] or [])
    ]


def settle(pid, within_s=30.0):
    deadline = time.monotonic() + within_s
    while rays_of(pid)[0]:
        assert time.monotonic() < deadline, rays_of(pid)[0]
        time.sleep(0.1)


def test_kill_9_of_the_driver_resume_and_ctrl_c(local_ray, tmp_path, start, monkeypatch, capsys):
    """Killed; resumed, interrupted, and finished by this process, in the Ray that it has."""
    out = tmp_path / "run"
    process = start(out, "--workers", "1")
    wait_for(process, lambda: len(stored(out)) >= 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    settle(process.pid)
    before = {path: path.read_bytes() for path in stored(out)}
    assert 3 <= len(before) < 21
    cluster._remove_stale_folders(cluster._short_folder())
    assert not any(rays_of(process.pid)), "what the killed one left is removed"

    monkeypatch.setattr(module, "cluster", lambda address, cpus: nullcontext(local_ray))
    resume = ["evaluate", *OPTIONS, "--workers", "1", "--out", str(out), "--resume"]
    interrupt = Thread(target=ctrl_c_after, args=(out, len(before) + 3), daemon=True)
    interrupt.start()
    assert main(resume) == 130
    interrupt.join()
    assert "--resume to continue" in "".join(capsys.readouterr())
    report = json.loads((out / "report.json").read_text())
    assert report["complete"] is False
    assert report["episodes"] == len(stored(out)) >= len(before) + 3
    assert report["run"]["new_episodes"] == len(stored(out)) - len(before)
    assert "Not finished" in (out / "report.html").read_text()
    assert not list(out.rglob(".*"))

    kept = {path: path.read_bytes() for path in stored(out)}
    assert main(resume) == 0
    report = json.loads((out / "report.json").read_text())
    assert (report["complete"], report["run"]["new_episodes"]) == (True, 24 - len(kept))
    assert len(stored(out)) == 24
    assert {path: path.read_bytes() for path in kept} == kept, "what was finished was not run again"


def ctrl_c_after(out, episodes):
    """As a terminal does to this process, once so many are stored."""
    while len(stored(out)) < episodes:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_everybody_in_the_foreground_hears_ctrl_c(tmp_path, start):
    out = tmp_path / "run"
    process = start(out)
    wait_for(process, lambda: len(stored(out)) >= 3)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "--resume to continue" in said
    assert not any(rays_of(process.pid))
    report = json.loads((out / "report.json").read_text())
    assert report["episodes"] == len(stored(out)) >= 3
    assert not list(out.rglob(".*"))


@pytest.mark.slow
def test_a_ray_that_dies_is_told_and_not_waited_for(tmp_path, start):
    out = tmp_path / "run"
    process = start(out)

    def raylets():
        return [
            child for child in psutil.Process(process.pid).children() if child.name() == "raylet"
        ]

    wait_for(process, raylets)
    time.sleep(1.5)  # workers are not there yet; later ones would finish their episodes without it
    raylets()[0].kill()
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1, said
    assert "Ray" in said
    settle(process.pid)
    again = start(out, "--resume")
    assert again.communicate(timeout=120) is not None
    assert again.returncode == 0
    assert len(stored(out)) == 24


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_random_points(tmp_path, start, seed):
    """Driver and workers, at any moment from the start on, until it is through: every episode
    once, and the right ones.
    """
    out, rng = tmp_path / "run", random.Random(seed)
    finished = {}
    process = start(out)
    for _ in range(6):
        time.sleep(rng.uniform(0, 12))
        if process.poll() is not None:
            break
        victim = rng.choice([process.pid, *workers_of(process.pid)])
        os.kill(victim, signal.SIGKILL)
        if victim == process.pid:
            process.communicate()
            settle(process.pid)
            finished |= {path: path.read_bytes() for path in stored(out)}
            process = start(out, "--resume")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert {path: path.read_bytes() for path in finished} == finished, (
        "what was finished was not run again"
    )
    assert json.loads((out / "report.json").read_text())["complete"] is True
    records = [json.loads(path.read_text()) for path in stored(out)]
    keys = Counter((r["condition"], r["task"], r["index"]) for r in records)
    assert len(keys) == 24
    assert set(keys.values()) == {1}
    assert len({r["digest"] for r in records}) == 24
    assert all(r["success"] == (r["condition"] == "plain" and r["index"] % 2 == 0) for r in records)


SUCCEEDING = [
    *("--world", "table", "--backend", "scripted", "--tasks", "reach,pick", "--seeds", "60"),
    *("--conditions", "plain", "--films", "0", "--workers", "2"),
]
KILLS = 10


@pytest.mark.slow
def test_kill_9_of_everybody_ten_times_while_episodes_succeed(tmp_path, start):
    """Driver, Ray and both workers are killed, each time after either worker has stored an episode.
    All records are bit-equal to those of an undisturbed run: seeds, outcomes, and the figures of
    every physics step.
    """
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    process = start(undisturbed, *SUCCEEDING)
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said
    kept = {}
    for kill in range(KILLS):
        process = start(out, *SUCCEEDING, *(["--resume"] if kill else []))
        wait_for(process, partial(both_store, out, kept), within_s=300.0)
        ray_of_it = rays_of(process.pid)[0]
        os.killpg(process.pid, signal.SIGKILL)
        for one in ray_of_it:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
        settle(process.pid)
        assert {path: path.read_bytes() for path in kept} == kept, "no episode is run again"
        kept = {path: path.read_bytes() for path in stored(out)}
    process = start(out, *SUCCEEDING, "--resume")
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 0, said
    found, expected = records_of(out), records_of(undisturbed)
    assert len(expected) == 120
    assert all(record["success"] for record in expected.values())
    assert found == expected


def both_store(out, kept):
    """Whether either worker has stored an episode beside those that were kept."""
    new = (json.loads(path.read_text()) for path in stored(out) if path not in kept)
    return {record["times"]["worker"] for record in new} == {0, 1}


def records_of(out):
    """Records by their place, without what differs from run to run."""
    return {
        str(path.relative_to(out)): without_times(json.loads(path.read_text()))
        for path in stored(out)
    }


def test_a_full_folder_is_refused(tmp_path, capsys):
    (tmp_path / "episodes/plain/wait").mkdir(parents=True)
    (tmp_path / "episodes/plain/wait/00000.json").write_text("{}")
    assert main(["evaluate", *OPTIONS, "--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("resume = true", [], "another version"),
        ("resume = false", ["--resume"], "another version"),
        ("resume = true", ["--seeds", "2"], "another version"),
        ("resume = false", [], "--resume"),
    ],
)
def test_a_file_may_resume(tmp_path, capsys, text, flags, says):
    """The folder is of another version, which is seen after it may be continued."""
    (tmp_path / "episodes/plain/wait").mkdir(parents=True)
    (tmp_path / "episodes/plain/wait/00000.json").write_text("{}")
    (tmp_path / "run.json").write_text('{"format": -1}')
    file = tmp_path / "e.toml"
    file.write_text(f"out = '{tmp_path}'\n{text}\n")
    assert main(["evaluate", *OPTIONS, "--config", str(file), *flags]) == 2
    assert says in capsys.readouterr().err


def test_bad_usage_is_told_before_ray_starts(tmp_path, capsys):
    for options in (
        ["--num-gpus", "7", "--tp", "2", "--model", "c"],
        ["--tasks", "juggle"],
        ["--conditions", "blind"],
        ["--tasks", "reach,stack"],  # the embedded checkpoint knows no stack
    ):
        assert main(["evaluate", "--out", str(tmp_path / "run"), *options]) == 2
    assert "knows task 'reach' or 'pick'" in capsys.readouterr().err
    assert main(["evaluate", "--tasks", "reach"]) == 2
    assert "--out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tasks_that_are_no_names_are_told(tmp_path, capsys):
    file = tmp_path / "e.toml"
    file.write_text(f"tasks = 3\nout = '{tmp_path}/run'\n")
    assert main(["evaluate", "--config", str(file)]) == 2
    assert "tasks are names" in capsys.readouterr().err


def test_a_file_and_the_command_line_together(tmp_path, capsys):
    file = tmp_path / "e.toml"
    file.write_text(
        f'num_gpus = 8\nout = "{tmp_path / "run"}"\n[model]\npath = "nowhere"\ntp = 2\n'
    )
    assert main(["evaluate", "--config", str(file), "--total-shard", "3"]) == 2
    assert "total_shard=3 contradicts num_gpus=8" in capsys.readouterr().err
    assert main(["evaluate", "--config", str(file), "--tp", "3"]) == 2, "the command line wins"
    assert "tp=3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("auto", [False, True])
def test_a_running_cluster_is_joined_and_left_running(
    local_ray, tmp_path, start, monkeypatch, auto
):
    for name, value in _auth_token().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    address = ray.get_runtime_context().gcs_address
    if auto:
        monkeypatch.setenv("RAY_ADDRESS", address)
    process = start(tmp_path / "run", "--address", "auto" if auto else address)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert len(stored(tmp_path / "run")) == 24
    assert not any(rays_of(process.pid))
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ran_on"].endswith(address)
    assert ray.cluster_resources()["CPU"] == 8


def test_no_cluster_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have started
    monkeypatch.setattr(cluster, "_joined", None)  # Ray would wait for it for minutes
    arguments = [*OPTIONS, "--out", str(tmp_path / "run"), "--address", "127.0.0.1:1"]
    assert main(["evaluate", *arguments]) == 1
    assert "no cluster of Ray answers at --address 127.0.0.1:1" in capsys.readouterr().err
    assert stored(tmp_path / "run") == []


def test_another_robot_needs_a_model_or_a_borrowed_domain(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--tasks", "reach", "--seeds", "1", "--out", str(out)]
    assert main(["evaluate", "--robot", "ur5e", *options]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["evaluate", "--robot", "xarm7", "--model", "c", *options]) == 2
    assert "--borrow-domain" in capsys.readouterr().err
    assert main(["evaluate", "--robot", "ur5e", "--model", "c", "--clips", "2", *options]) == 2
    assert "on the table with a Panda" in capsys.readouterr().err
    assert not out.exists()


def test_a_checkpoint_of_another_domain_is_refused_before_anything_is_written(tmp_path):
    options = {"model": str(resource("assets/table_policy")), "robot": "ur5e", "tasks": "reach"}
    with pytest.raises(
        ContractError,
        match="its domain is 'droid_lerobot', not 'robomind-ur'; choose its robot, or post-train",
    ):
        evaluate(make_settings({**options, "seeds": 1}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
