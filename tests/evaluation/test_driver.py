"""The queue under bad luck: whatever dies, every episode is there once, and the same."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import ray

from helpers import small_world
from helpers.workers import busy
from strands_cosmos3.errors import EvaluationError, InputError
from strands_cosmos3.evaluation import driver as module
from strands_cosmos3.evaluation.driver import Driver
from strands_cosmos3.evaluation.evaluate import evaluate
from strands_cosmos3.evaluation.folder import RunFolder, without_times
from strands_cosmos3.evaluation.report import make_report
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.fleet import worker_slots
from strands_cosmos3.fleet.worker_slots import MAX_ATTEMPTS, WorkerActor

TABLE = make_settings(
    {"tasks": "reach", "seeds": 3, "conditions": "plain,swapped", "duration": 6.0, "films": 0}
)
SMALL = {"world": f"{small_world.__file__}:SmallWorld", "tasks": "wait", "seeds": 3}
SETTINGS = make_settings({**SMALL, "conditions": "plain,swapped", "films": 0})


def run(path, workers, settings=SETTINGS, resume=False, each=lambda driver: None):
    """Run what is missing, calling ``each`` several times a second; returns the driver and what
    is stored.
    """
    with RunFolder(path, settings, resume) as folder:
        driver = Driver(folder, workers, report=lambda progress: each(driver))
        try:
            driver.run()
        finally:
            driver.close()
        return driver, {
            key: without_times(record) for key, record in folder.read_all(driver.plan).items()
        }


@pytest.fixture(scope="module")
def reference(local_ray, tmp_path_factory):
    """Every episode of the small world, by one worker."""
    return run(tmp_path_factory.mktemp("reference"), 1)[1]


def test_the_number_of_workers_changes_nothing(local_ray, tmp_path):
    """On the table: real dynamics. Episodes are given out slowly until both workers have begun."""

    def wait_for_both(driver):
        time.sleep(3 * (driver.progress.workers < 2))

    driver, found = run(tmp_path / "2", 2, TABLE, each=wait_for_both)
    assert driver.progress.workers == 2
    assert run(tmp_path / "1", 1, TABLE)[1] == found
    assert len(found) == len(driver.plan) == 6


def test_a_killed_workers_episode_is_given_out_again(reference, tmp_path):
    killed = []

    def kill_once(driver):
        if not killed and driver.progress.new >= 2 and busy(driver):
            pid, assignment = next(iter(busy(driver).items()))
            os.kill(pid, signal.SIGKILL)
            killed.append(assignment.key)

    driver, found = run(tmp_path, 1, each=kill_once)
    assert found == reference
    assert (driver.progress.worker_failures, driver.progress.requeued) == (1, 1)
    assert killed[0] in found
    assert driver.progress.new == 6, "each was stored once"


def test_resume_runs_what_is_missing_and_nothing_else(reference, tmp_path):
    """By identity: the third of six is missing, not the last of five."""
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        plan = SETTINGS.plan()
        for a in plan:
            if a != plan[2]:
                folder.write(a, {**reference[a.key], "times": {}})
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    driver, found = run(tmp_path, 2, resume=True)
    assert found == reference
    assert (driver.progress.resumed, driver.progress.new) == (5, 1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert run(tmp_path, 2, resume=True)[0].progress.workers == 0, (
        "nothing is missing, so nobody is started"
    )


def test_ctrl_c_keeps_what_is_finished(reference, tmp_path):
    def interrupt(driver):
        if driver.progress.new >= 3 and not driver.progress.interrupted:
            signal.raise_signal(signal.SIGINT)

    driver, found = run(tmp_path, 1, each=interrupt)
    assert driver.progress.interrupted
    assert 3 <= len(found) < 6
    assert found.items() <= reference.items()
    _, found = run(tmp_path, 1, resume=True)
    assert found == reference


@pytest.mark.slow
def test_an_episode_that_kills_its_worker_again_and_again_is_named(reference, tmp_path):
    poison = SETTINGS.plan()[1].key

    def kill(driver):
        for pid, assignment in busy(driver).items():
            if assignment.key == poison:
                os.kill(pid, signal.SIGKILL)

    driver, found = run(tmp_path, 2, each=kill)
    assert driver.progress.given_up == ["plain/wait/1"]
    assert driver.progress.worker_failures == MAX_ATTEMPTS
    assert set(reference) - set(found) == {poison}
    assert run(tmp_path, 1, resume=True)[1] == reference


@pytest.fixture
def clock(monkeypatch):
    """The clock of the driver and of its slots, which a test can put forward."""

    class Clock:
        ahead_s = 0.0
        sleep = staticmethod(time.sleep)

        def monotonic(self):
            return time.monotonic() + self.ahead_s

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(worker_slots, "time", made)
    return made


def test_a_stopped_simulator_is_killed_and_its_episode_given_to_another(reference, tmp_path, clock):
    stopped = []

    def stop_once(driver):
        if not stopped and driver.progress.new >= 2 and busy(driver):
            stopped.extend(busy(driver))
            os.kill(stopped[0], signal.SIGSTOP)
        if stopped and stopped[0] in busy(driver):
            clock.ahead_s += SETTINGS.episode_timeout

    driver, found = run(tmp_path, 1, each=stop_once)
    assert found == reference
    assert (driver.progress.hangs, driver.progress.requeued, driver.progress.worker_failures) == (
        1,
        1,
        0,
    )
    deadline = time.monotonic() + 60
    while Path(f"/proc/{stopped[0]}").exists():  # Ray has to collect it
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_episode_that_never_ends_is_tried_twice_and_counts_as_a_failure(
    reference, tmp_path, clock, monkeypatch
):
    class Hanging(WorkerActor):
        def do(self, method, arguments):
            if arguments[0].index == 1:
                threading.Event().wait()
            return super().do(method, arguments)

    remote = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Hanging)
    monkeypatch.setattr(worker_slots, "RemoteWorker", remote)
    settings = make_settings({**SMALL, "films": 1})

    def wait_long(driver):
        if any(assignment.index == 1 for assignment in busy(driver).values()):
            clock.ahead_s += settings.episode_timeout

    driver, found = run(tmp_path, 1, settings, each=wait_long)
    assert (driver.progress.hangs, driver.progress.requeued, driver.progress.new) == (2, 1, 3)
    hung = found.pop(("plain", "wait", 1))
    assert (hung["success"], hung["outcome"]) == (False, "fault")
    assert (
        hung["fault"]
        == "did not end within 1800 s of wall-clock time, 2 times; its simulator was killed"
    )
    assert hung["goal_instruction"] == driver.plan[1].goal_instruction
    assert found == {key: reference[key] for key in found}
    assert len(found) == 2
    report = make_report(driver.folder, driver.records, {}, driver.progress.given_up)
    assert report["complete"] is True
    assert report["hung"] == ["plain/wait/1"]
    assert (report["rows"][0]["success"]["successes"], report["rows"][0]["outcomes"]["fault"]) == (
        2,
        1,
    )
    assert run(tmp_path, 1, settings, resume=True)[0].progress.workers == 0, (
        "it is not tried a third time"
    )


def test_a_worker_that_cannot_start_says_why(local_ray, tmp_path):
    settings = make_settings(
        {"tasks": "reach", "seeds": 1, "backend": "service", "dialect": "klingon"}
    )
    with pytest.raises(InputError, match="klingon"):
        run(tmp_path / "run", 1, settings)


def test_failures_are_filmed_and_the_report_shows_them(local_ray, tmp_path):
    """Too short a time to get there: every episode fails, and the first by index is filmed."""
    settings = make_settings({"tasks": "reach", "seeds": 3, "duration": 0.4, "films": 1})
    driver, found = run(tmp_path, 1, settings)
    assert not any(record["success"] for record in found.values())
    assert [path.name for path in tmp_path.rglob("*.mp4")] == ["reach-00000.mp4"]
    assert (driver.progress.films, driver.progress.films_total) == (1, 1)
    (shown,) = make_report(driver.folder, driver.records, {}, driver.progress.given_up)["failures"]
    assert shown["index"] == 0
    assert (tmp_path / shown["film"]).stat().st_size > 1000
    assert run(tmp_path, 1, settings, resume=True)[0].progress.workers == 0


def test_a_second_ray_in_one_process_is_refused(local_ray, tmp_path):
    with pytest.raises(EvaluationError, match="already in use"):
        evaluate(SETTINGS, tmp_path)
