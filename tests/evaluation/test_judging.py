"""A judge is asked about each episode's film, and its answers stand beside the simulator's."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("mujoco")

from helpers import small_world
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.cli import main
from strands_cosmos3.errors import ConfigError, EvaluationError
from strands_cosmos3.evaluation import judging
from strands_cosmos3.evaluation.driver import Driver, failures_to_film
from strands_cosmos3.evaluation.evaluate import evaluate
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.judging import judge_identity, open_judge, said_of
from strands_cosmos3.evaluation.report import make_report, write_report
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.evaluation.statistics import wilson

SOURCE = """
ASKED = []

class Film:
    "Says yes, but no to the second film, and does not know of the fifth."
    def __call__(self, question, frames, fps):
        ASKED.append((question, frames, fps))
        index = int(frames[-1].max())
        return {1: "no", 4: "Perhaps."}.get(index, "Yes, it did.")

class Raises:
    def __call__(self, question, frames, fps):
        raise KeyError("the film")
"""


@pytest.fixture
def judges(tmp_path, monkeypatch):
    """A module with judges, as a user's."""
    (tmp_path / "film_judges.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "film_judges", raising=False)
    judging._sha256.cache_clear()
    import film_judges  # pyright: ignore[reportMissingImports]

    return film_judges


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A checkpoint with eyes, of random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("seeing") / "checkpoint", eyes=True)


def small(**more):
    """Six episodes, of which those with an even index succeed."""
    world = f"{small_world.__file__}:SmallWorld"
    return make_settings({"world": world, "tasks": "wait", "seeds": 6, **more})


def run(folder):
    """Run and store every episode; return the records, as stored, but for an answer's time, without
    which an episode is not filmed.
    """
    runner = AssignmentRunner(folder.settings)
    records = {a.key: folder.write(a, runner.run(a)) for a in folder.settings.plan()}
    for record in records.values():
        record["times"]["answer_ms"] = [1.0]
    return records


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("yes", "yes"),
        ("No.", "no"),
        ("**Yes** - there is no cube left on the table", "yes"),
        ("The answer is: no", "no"),
        ("It is neither yes nor no", "unclear"),
        ("nothing is there", "unclear"),
        ("yesterday", "unclear"),
        ("", "unclear"),
    ],
)
def test_an_answer_is_yes_or_no_or_unclear(answer, said):
    assert said_of(answer) == said


def test_agreement_and_confusion_are_in_the_report_and_on_the_page(judges, tmp_path):
    settings = small(judge="film_judges:Film", films=4)
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        records = run(folder)
        report = make_report(folder, records, {}, [])
        write_report(folder, report)
    judged = report["rows"][0]["judged"]
    assert judged["table"] == {
        "yes": {"failure": 2, "success": 2},
        "no": {"failure": 1, "success": 0},
        "unclear": {"failure": 0, "success": 1},
    }
    low, high = wilson(3, 6)
    assert judged["agreement"] == {"successes": 3, "of": 6, "rate": 0.5, "low": low, "high": high}
    assert judged["likelier"] == 0.5
    assert report["settings"]["judge"] == "film_judges:Film"
    page = (tmp_path / "run/report.html").read_text()
    assert "The judge&#x27;s answers" in page
    cells = "".join(f"<td>{cell}</td>" for cell in ("50.0", "2, 2", "1, 0", "0, 1"))
    assert cells in page, "of one who always says the likelier; then failures, successes"
    assert f"{100 * low:.1f} .. {100 * high:.1f}" in page
    assert "“Yes, it did.” (wrong)" in page
    assert json.loads((tmp_path / "run/report.json").read_text())["rows"] == report["rows"]


def test_films_of_episodes_that_the_judge_took_for_others_come_first(judges, tmp_path):
    """With an unclear one, although the simulator saw it succeed; then other failures."""
    settings = small(judge="film_judges:Film")
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        records = run(folder)
        wanted = failures_to_film(settings.plan(), records, 6)
        shown = make_report(folder, records, {}, [])["failures"]
    assert [a.index for a in wanted] == [3, 4, 5, 1]
    assert [failure["index"] for failure in shown] == [3, 4, 5]
    assert all(failure["disagrees"] for failure in shown)


def test_the_judge_is_asked_for_the_goal_and_sees_the_episode(judges, tmp_path):
    settings = make_settings(
        {
            "tasks": "reach",
            "seeds": 1,
            "duration": 6.0,
            "judge": "film_judges:Film",
            "judge_question": "Is this it: {instruction}, {}?",
            "conditions": "swapped",
        }
    )
    (assignment,) = settings.plan()
    runner = AssignmentRunner(settings)
    record = runner.run(assignment)
    _, again = judges.ASKED.append(None), runner.run(assignment)
    (question, frames, fps), _, (_, frames_again, _) = judges.ASKED
    assert question == f"Is this it: {assignment.goal_instruction}, {{}}?"
    assert assignment.policy_instruction not in question
    assert record["judged"] == again["judged"]
    assert record["judged"]["question"] == question
    assert frames.shape == (int(record["duration_s"] * fps) + 2, 540, 640, 3)
    assert np.array_equal(frames, frames_again), "the second episode begins anew"
    difference = np.abs(frames[-1].astype(int) - frames[0])
    assert difference.max() > 100, "the arm has moved"


def test_a_judge_changes_nothing_else_of_a_record(judges):
    options = {"tasks": "reach", "seeds": 1, "duration": 1.0}
    records = []
    for more in ({}, {"judge": "film_judges:Film"}):
        settings = make_settings({**options, **more})
        record = AssignmentRunner(settings).run(settings.plan()[0])
        records.append({k: v for k, v in record.items() if k not in ("times", "judged")})
    assert records[0] == records[1]


def test_a_resumed_evaluation_asks_nothing_again(judges, tmp_path):
    settings = small(judge="film_judges:Film", films=0)
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        folder.write_start({})
        run(folder)
    assert len(judges.ASKED) == 6
    with RunFolder(tmp_path / "run", settings, resume=True) as folder:
        assert Driver(folder, 1).missing == 0
    report, progress = evaluate(settings, tmp_path / "run", resume=True)
    assert (progress.new, report["rows"][0]["judged"]["agreement"]["of"]) == (0, 6)
    assert len(judges.ASKED) == 6


def test_a_film_that_is_recorded_again_is_not_judged(judges):
    settings = small(judge="film_judges:Film")
    record, _ = AssignmentRunner(settings).film(settings.plan()[0])
    assert "judged" not in record
    assert judges.ASKED == []


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"judge": "film_judges:Film", "judge_question": "{instruction}: done?"},
        {"judge": "film_judges:Raises"},
    ],
)
def test_episodes_of_another_judge_or_question_are_refused(judges, tmp_path, other):
    with RunFolder(tmp_path, small(judge="film_judges:Film"), resume=False) as folder:
        folder.write_start({})
        run(folder)
    with (
        RunFolder(tmp_path, small(**other), resume=True) as folder,
        pytest.raises(ConfigError, match="judge"),
    ):
        folder.read_all(folder.settings.plan())


def test_an_edited_judge_is_another_one(judges, tmp_path):
    settings = small(judge="film_judges:Film")
    before = judge_identity(settings)
    (tmp_path / "film_judges.py").write_text(SOURCE.replace("Perhaps", "Maybe"))
    judging._sha256.cache_clear()
    assert judge_identity(settings) != before


def test_an_error_of_a_judge_names_it(judges):
    settings = small(judge="film_judges:Raises")
    with pytest.raises(EvaluationError, match=r"film_judges:Raises raised KeyError\('the film'\)"):
        AssignmentRunner(settings).run(settings.plan()[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"judge_model": "folder"}, "judge_model belongs to judge 'reasoner'"),
        ({"judge": "a:b", "judge_model": "folder"}, "judge_model belongs to judge 'reasoner'"),
        ({"judge_question": "{instruction}?"}, "judge_question to any judge"),
        ({"judge": "reasoner"}, "no checkpoint that could judge"),
        ({"judge": "a:b", "judge_question": "Done?"}, "names no goal"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        small(**options)


@pytest.mark.parametrize("name", ["no_such_module:Judge", "film_judges:Nobody", "film_judges"])
def test_a_judge_that_cannot_be_made_is_refused_before_anything_runs(judges, tmp_path, name):
    with pytest.raises(ConfigError, match=f"judge '{name}' cannot be made"):
        evaluate(small(judge=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_eyes_is_refused_before_anything_runs(tmp_path, capsys):
    """The checkpoint that is evaluated is the judge unless another is named."""
    blind, out = write_checkpoint(tmp_path / "blind"), tmp_path / "run"
    arguments = ["--tasks", "reach", "--seeds", "1", "--model", str(blind)]
    assert main(["evaluate", *arguments, "--judge", "reasoner", "--out", str(out)]) == 1
    assert "lacks the vision encoder (vision_encoder/)" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_reasoner_judges_and_random_weights_are_labelled(seeing, tmp_path):
    settings = small(seeds=1, judge="reasoner", judge_model=str(seeing))
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        records = run(folder)
        report = make_report(folder, records, {}, [])
        write_report(folder, report)
    (record,) = records.values()
    assert record["judged"]["question"] == "Task: wait. Did the robot succeed? Answer yes or no."
    assert record["judged"]["said"] in ("yes", "no", "unclear")
    assert record["judged"]["answer"]
    assert record["identity"]["judge"]["sha256"] == judge_identity(settings)["judge"]["sha256"]
    assert report["judge_label"].startswith("random weights")
    assert "judge&#x27;s checkpoint: random weights" in (tmp_path / "run/report.html").read_text()


def test_the_vision_encoder_belongs_to_the_judge_s_identity(seeing, tmp_path):
    settings = small(judge="reasoner", judge_model=str(seeing))
    before = judge_identity(settings)
    weights = seeing / "vision_encoder/model.safetensors"
    stored = weights.read_bytes()
    try:
        weights.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        judging._sha256.cache_clear()
        assert judge_identity(settings) != before
    finally:
        weights.write_bytes(stored)
        judging._sha256.cache_clear()
    assert judge_identity(settings) == before


def test_nobody_is_asked_without_a_judge():
    assert open_judge(small()) is None
    assert judge_identity(small()) == {}
