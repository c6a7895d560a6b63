"""Who answers: stored episodes count only for the same, and what a policy object raises is its own
fault.
"""

import os

import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.errors import CheckpointError, ConfigError, RenderError
from strands_cosmos3.evaluation.driver import Driver, _Job
from strands_cosmos3.evaluation.evaluate import evaluate
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.policies import load_policy, source_sha256
from strands_cosmos3.evaluation.runner import AssignmentRunner, failed_record
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.fleet.cluster import Reply
from strands_cosmos3.fleet.worker_slots import WorkerSlot

SOURCE = """
import numpy as np

class Still:
    requires_images, actions_per_step, calls = False, 4, 0
    def get_actions_sync(self, observation, instruction):
        self.calls += 1
        return [{key: value for key, value in self.step.items()}] * 8
    def set_robot_state_keys(self, keys):
        self.keys = keys
        self.step = dict(zip(keys, (0, -0.785, 0, -2.356, 0, 1.571, 0.785, 0.04)))

class Raises(Still):
    def get_actions_sync(self, observation, instruction):
        raise KeyError("image")

class RaisesLater(Still):
    def get_actions_sync(self, observation, instruction):
        if self.calls:
            raise RuntimeError("two\\nlines")
        return super().get_actions_sync(observation, instruction)

class Exits(Still):
    def get_actions_sync(self, observation, instruction):
        raise SystemExit(3)

class RaisesInReset(Still):
    def reset(self, seed):
        raise ZeroDivisionError

class RaisesInSetUp(Still):
    def set_robot_state_keys(self, keys):
        raise LookupError(keys)

class ReturnsNothing(Still):
    def get_actions_sync(self, observation, instruction):
        return None

class ReturnsText(Still):
    def get_actions_sync(self, observation, instruction):
        return ["up"]

class Lacks(Still):
    def get_actions_sync(self, observation, instruction):
        return [{"x": 1.0}]

def interrupted():
    raise RuntimeError("no GPU")

def unread():
    open("/nowhere")

def ends():
    raise SystemExit(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a user's, by a name of its own for each test."""
    name = f"policy_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def settings_of(module, policy="Still", **options):
    return make_settings(
        {"tasks": "reach", "seeds": 2, "policy": f"{module}:{policy}", "backend": "python"}
        | {"duration": 1.0, "films": 0, **options}
    )


@pytest.mark.parametrize(
    ("policy", "said"),
    {
        "Raises": "KeyError('image')",
        "RaisesLater": r"RuntimeError('two\nlines')",
        "Exits": "SystemExit(3)",
        "RaisesInReset": "raised in reset ZeroDivisionError",
        "RaisesInSetUp": "raised in set_robot_state_keys LookupError",
        "ReturnsNothing": "TypeError",
        "ReturnsText": "malformed",
        "Lacks": "malformed",
    }.items(),
)
def test_what_a_policy_object_raises_is_that_episodes_fault(module, policy, said):
    settings = settings_of(module, policy)
    runner = AssignmentRunner(settings)
    try:
        record = runner.run(settings.plan()[0])
    finally:
        runner.close()
    assert (record["success"], record["outcome"]) == (False, "fault")
    assert said in record["fault"]
    assert record["model_sha256"] == source_sha256(f"{module}:{policy}")


@pytest.mark.parametrize("factory", ["interrupted", "unread", "ends", "absent", "Still.calls"])
def test_a_policy_that_cannot_be_made_is_named_in_one_line(module, factory):
    with pytest.raises(ConfigError, match=rf"{module}:{factory}.*cannot be made") as error:
        load_policy(f"{module}:{factory}")
    assert "\n" not in str(error.value)


def test_a_policy_that_cannot_be_imported_is_told_before_anything_starts(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        evaluate(settings_of(module), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def store(path, settings, model_sha256, episodes=None):
    """Store episodes as a run leaves them that was answered by a model."""
    with RunFolder(path, settings, resume=False) as folder:
        for assignment in settings.plan()[:episodes]:
            record = failed_record(assignment, "it raised") | {"model_sha256": model_sha256}
            folder.write(assignment, record)


def edit(folder, module):
    path = folder / f"{module}.py"
    path.write_text(path.read_text() + "\n# better\n")
    os.utime(path, (1, 1))


def define_elsewhere(folder, module):
    """The named module only passes it on; the file that defines it is edited."""
    (folder / f"{module}.py").rename(folder / f"{module}_inner.py")
    (folder / f"{module}.py").write_text(f"from {module}_inner import Still")


def test_an_edited_policy_does_not_continue_the_old_ones_episodes(module, tmp_path):
    settings = settings_of(module)
    store(tmp_path / "all", settings, source_sha256(f"{module}:Still"))
    assert evaluate(settings, tmp_path / "all", resume=True)[0]["complete"]
    edit(tmp_path, module)
    with pytest.raises(ConfigError, match=r"another checkpoint or policy.*another --out"):
        evaluate(settings, tmp_path / "all", resume=True)


def test_the_file_that_defines_a_policy_counts(module, tmp_path):
    define_elsewhere(tmp_path, module)
    before = source_sha256(f"{module}:Still")
    edit(tmp_path, f"{module}_inner")
    assert source_sha256(f"{module}:Still") != before


@pytest.mark.parametrize(
    ("stored", "now"), [("a" * 64, "b" * 64), ("a" * 64, None), (None, "b" * 64)]
)
def test_a_service_with_another_model_does_not_continue(tmp_path, stored, now):
    settings = make_settings({"tasks": "reach", "seeds": 2, "backend": "service", "films": 0})
    store(tmp_path, settings, stored, episodes=1)
    with RunFolder(tmp_path, settings, resume=True) as folder:
        driver = Driver(folder, 1)
        driver.require_same(stored)
        with pytest.raises(ConfigError, match="another checkpoint or policy"):
            driver.require_same(now)


@pytest.fixture
def replied(tmp_path):
    """replied(reply, job): what a driver does with a worker's reply, where one episode is stored."""
    settings = make_settings({"tasks": "reach", "seeds": 3, "backend": "service", "films": 0})
    store(tmp_path, settings, "a" * 64, episodes=1)

    def process(reply, job=None):
        with RunFolder(tmp_path, settings, resume=True) as folder:
            driver = Driver(folder, 1)
            driver.on_reply(WorkerSlot(0), job, reply)
            return driver.records

    process.assignment = settings.plan()[1]
    return process


@pytest.mark.parametrize("film", [False, True])
@pytest.mark.parametrize("digest", ["b" * 64, None])
def test_what_answered_is_compared_with_each_episode(replied, film, digest):
    def reply(digest):
        record = failed_record(replied.assignment, "") | {"model_sha256": digest}
        return Reply("done", (record, b"") if film else record)

    with pytest.raises(ConfigError, match="another checkpoint or policy"):
        replied(reply(digest), _Job(replied.assignment, film))
    if not film:
        stored = replied(reply("a" * 64), _Job(replied.assignment))
        assert stored[replied.assignment.key]["model_sha256"] == "a" * 64


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, RenderError])
def test_why_a_worker_cannot_start_keeps_its_type(replied, kind):
    with pytest.raises(kind, match=r"^no policy$"):
        replied(Reply("error", error=(kind.__name__, "no policy")))
