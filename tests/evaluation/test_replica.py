"""A model split over two processes (random weights), asked by simulators through Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from threading import Timer

import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

import ray  # noqa: E402

from helpers.workers import busy  # noqa: E402
from recipes.random_checkpoint import FactorySizes, write_checkpoint  # noqa: E402
from strands_cosmos3.errors import CheckpointError, ConfigError  # noqa: E402
from strands_cosmos3.evaluation import evaluate as module  # noqa: E402
from strands_cosmos3.evaluation.driver import Driver  # noqa: E402
from strands_cosmos3.evaluation.evaluate import check_model, evaluate  # noqa: E402
from strands_cosmos3.evaluation.folder import RunFolder, without_times  # noqa: E402
from strands_cosmos3.evaluation.runner import AssignmentRunner  # noqa: E402
from strands_cosmos3.evaluation.settings import make_settings  # noqa: E402
from strands_cosmos3.fleet.replicas import ReplicaPool  # noqa: E402

OPTIONS = {
    "tasks": "reach",
    "seeds": 2,
    "num_steps": 1,
    "duration": 1.5,
    "replan_rows": 8,
    "films": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small checkpoint of random weights that two ranks can split, saying that it was trained
    on small pictures.
    """
    sizes = FactorySizes(64, 2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
    folder = write_checkpoint(tmp_path_factory.mktemp("ranks") / "random", sizes=sizes)
    about = json.loads((folder / "checkpoint.json").read_text())
    about["strands_cosmos3"]["resolution_tier"] = 256
    (folder / "checkpoint.json").write_text(json.dumps(about))
    return str(folder)


@pytest.fixture(scope="module")
def replicas_of_two(local_ray, model):
    settings = make_settings({**OPTIONS, "model": model, "tp": 2})
    replicas = ReplicaPool(model, settings.topology, settings.policy.engine)
    yield settings, replicas
    replicas.close()


def run(path, replicas_of_two, each=lambda driver: None):
    settings, replicas = replicas_of_two
    with RunFolder(path, settings, resume=False) as folder:
        driver = Driver(folder, 1, report=lambda progress: each(driver))
        driver.replicas = replicas
        try:
            driver.run()
        finally:
            driver.close()
        return driver.progress, {
            key: without_times(record) for key, record in folder.read_all(driver.plan).items()
        }


def test_an_evaluation_outlives_one_of_its_ranks(local_ray, model, tmp_path, monkeypatch):
    """In the Ray that is there: as `evaluate --tp 2`, a rank of which is killed while it is asked."""
    monkeypatch.setattr(module, "cluster", lambda address, cpus: nullcontext(local_ray))
    ranks = set()

    def kill_a_rank(progress):
        running = ranks_below(os.getpid()) if progress.new else []
        if running and not ranks:
            assert len(running) == 2
            running[1].suspend()  # so that it does not answer before it is killed
            Timer(2.0, running[1].kill).start()
        ranks.update(running)

    out = tmp_path / "run"
    settings = make_settings({**OPTIONS, "model": model, "tp": 2, "replan_rows": 16, "workers": 1})
    evaluate(settings, out, progress=kill_a_rank)
    report = json.loads((out / "report.json").read_text())
    assert (report["complete"], report["episodes"]) == (True, 2)
    ran = report["run"]
    assert (ran["replica_restarts"], ran["worker_failures"], ran["requeued"]) == (1, 0, 0)
    assert len(ranks) == 4, "both were started again"
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


@pytest.mark.slow  # an evaluation, above, loses a rank in every run of the suite
def test_a_dead_rank_restarts_its_ranks_and_changes_nothing(replicas_of_two, model, tmp_path):
    killed = []

    def kill_a_rank(driver):
        if not killed and busy(driver):
            ranks = ranks_below(os.getpid())
            assert len(ranks) == 2
            ranks[1].send_signal(signal.SIGKILL)
            killed.extend(ranks)

    progress, found = run(tmp_path / "killed", replicas_of_two, kill_a_rank)
    assert len(found) == 2
    ranks = ranks_below(os.getpid())
    assert not set(ranks) & set(killed), "all ranks are new"
    assert ray.get(replicas_of_two[1].of_worker(0).restarts.remote()) == 1
    assert (progress.worker_failures, progress.requeued) == (0, 0), (
        "simulators see nothing but a long wait"
    )

    _, again = run(tmp_path / "again", replicas_of_two)
    assert again == found

    alone = AssignmentRunner(make_settings({**OPTIONS, "model": model, "device": "cpu"}))
    for assignment in replicas_of_two[0].plan():
        one, two = alone.run(assignment), found[assignment.key]
        assert one["model_sha256"] == two["model_sha256"]
        assert (one["outcome"], one["steps"]["total"]) == (two["outcome"], two["steps"]["total"])
        assert one["path"]["max_mm"] == pytest.approx(two["path"]["max_mm"], rel=1e-2), (
            "the same motion, to rounding"
        )


def ranks_below(pid):
    """Processes of the ranks that a process has started through Ray."""
    ranks = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it ends while one looks
            if "strands_cosmos3.parallel.rank" in child.cmdline():
                ranks.append(child)
    return ranks


@pytest.mark.slow
def test_the_command_outlives_one_of_its_ranks(model, tmp_path):
    """`evaluate --tp 2` as users run it; a rank is killed between two questions or in one."""
    out = tmp_path / "run"
    options = {
        "model": model,
        "tp": 2,
        "tasks": "reach",
        "seeds": 2,
        "num-steps": 1,
        "duration": 1.5,
        "replan-rows": 16,
    }
    command = [
        sys.executable,
        "-m",
        "strands_cosmos3",
        "evaluate",
        "--out",
        str(out),
        "--films",
        "0",
        "--workers",
        "1",
    ]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 300
            while not list(out.glob("episodes/*/*/*.json")):
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.02)
            ranks = ranks_below(process.pid)
            assert len(ranks) == 2
            ranks[1].send_signal(signal.SIGKILL)
            said = process.communicate(timeout=300)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    report = json.loads((out / "report.json").read_text())
    assert (report["complete"], report["episodes"], report["run"]["replica_restarts"]) == (
        True,
        2,
        1,
    )
    assert (report["run"]["worker_failures"], report["run"]["requeued"]) == (0, 0)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


@pytest.mark.slow
def test_a_replica_whose_front_is_gone_is_replaced_and_its_episode_runs_again(
    replicas_of_two, tmp_path
):
    before, wanted = run(tmp_path / "plain", replicas_of_two)
    killed = []

    def kill_the_front(driver):
        if not killed and busy(driver):
            killed.append(ray.kill(replicas_of_two[1]._leaders[0].actor, no_restart=True))

    progress, found = run(tmp_path / "killed", replicas_of_two, kill_the_front)
    assert found == wanted
    assert progress.requeued == 1
    assert progress.worker_failures == 0
    assert progress.replica_restarts == before.replica_restarts + 1


def test_a_model_that_cannot_be_split_is_refused_before_anything_starts(model, tmp_path):
    with pytest.raises(ConfigError, match="3"):
        check_model(make_settings({**OPTIONS, "model": model, "tp": 3}))
    with pytest.raises(CheckpointError):
        check_model(make_settings({**OPTIONS, "model": str(tmp_path), "tp": 2}))
