"""Evaluation of other robots: what each can be asked, what its episodes depend on, and what is
reported.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco")

from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ConfigError, ContractError, UnknownNameError
from strands_cosmos3.evaluation.evaluate import evaluate
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.page import page
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.perturbed_backend import PerturbedBackend
from strands_cosmos3.evaluation.plan import make_plan
from strands_cosmos3.evaluation.report import _repeat, _robot, make_report
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.evaluation.simulator import AS_TOLD, Simulator
from strands_cosmos3.evaluation.stages import CLOSE_M, Stages
from strands_cosmos3.evaluation.statistics import summarise
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.spec import Workspace
from strands_cosmos3.worlds.table.grammar import TEMPLATES, Verb

LIFT_THE_BAR = TEMPLATES[Verb.LIFT]
HAND_OVER_THE_BAR = TEMPLATES[Verb.HAND_OVER]

UR5E = get_robot("ur5e")

pytestmark = pytest.mark.filterwarnings(
    "ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning"
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A robot in a file: a UR5e whose cubes lie in a smaller field."""
    file = tmp_path / "mine.toml"
    robot = replace(UR5E, name="mine", workspace=Workspace((0.42, 0.58), (-0.13, 0.13)))
    file.write_text(write_robot(robot))
    return file


def test_a_pandas_episodes_are_identified_as_before():
    """Digests of version 0.1's folders, which can be resumed."""
    settings = make_settings({"tasks": "reach", "conditions": "plain,swapped"})
    assert [settings.digest(a) for a in settings.plan()[::100]] == [
        "019819c6c62ca85a",
        "b3ce83243a36959f",
    ]
    first = settings.plan()[0]
    assert make_settings({"tasks": "reach", "robot": "franka"}).digest(first) == settings.digest(
        first
    )


def test_another_robots_episodes_are_others(own: Path):
    panda, ur5e, mine = (
        make_settings({"tasks": "reach", "robot": name}) for name in ("panda", "ur5e", str(own))
    )
    first = panda.plan()[0]
    digests = {settings.digest(first) for settings in (panda, ur5e, mine)}
    assert len(digests) == 3
    other = own.with_name("other.toml")
    other.write_text(own.read_text().replace("0.58", "0.57"))
    assert make_settings({"tasks": "reach", "robot": str(other)}).digest(first) not in digests
    borrowed = make_settings({"tasks": "reach", "robot": "xarm7", "borrow_domain": True})
    assert borrowed.digest(first) != make_settings({"tasks": "reach", "robot": "xarm7"}).digest(
        first
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"robot": "ur5e", "conditions": "plain,light=2+camera=2"},
            r"'light=2\+camera=2' moves the wrist.*camera_top",
        ),
        (
            {"robot": "dual_panda", "conditions": "camera=2"},
            "'camera=2' moves the wrist camera.*front, left, right",
        ),
        ({"robot": "dual_panda", "conditions": "cubes=30"}, "'cubes=30' changes cubes"),
        ({"robot": "dual_panda", "conditions": "close"}, "'close' changes cubes"),
        ({"robot": "dual_panda", "conditions": "crowded"}, "'crowded' changes cubes"),
        ({"robot": "dual_panda", "conditions": "swapped"}, "'swapped' names another colour"),
        (
            {"robot": "dual_panda", "conditions": "paraphrased"},
            "'paraphrased' names another colour or wording",
        ),
        ({"robot": "dual_panda", "tasks": "reach"}, "'reach'.*lift_bar"),
        ({"robot": "ur5e", "tasks": "lift_bar"}, "lift_bar.*stack"),
        ({"robot": "ur6"}, "'ur6'.*ur5e"),
        ({"robot": "openarm"}, "robot 'openarm' is not simulated.*openarm_left"),
        ({"robot": "ur5e", "model": "c", "clips": 4}, "clips has the Panda, not 'ur5e'"),
        ({"robot": "ur5e", "suite": "libero_object", "model": "c"}, "libero_object has the Panda"),
        ({"robot": "xarm7", "model": "c"}, "no domain for robot 'xarm7'.*--borrow-domain"),
        ({"robot": 5}, "robot must be"),
    ],
)
def test_what_a_robot_cannot_do_is_refused_by_name(options, says):
    with pytest.raises((ConfigError, UnknownNameError, ValueError), match=says):
        make_settings(options)


def test_a_robot_with_a_wrist_camera_can_have_it_displaced():
    settings = make_settings(
        {"robot": "fr3", "tasks": "reach", "seeds": 1, "conditions": "plain,camera=2"}
    )
    plain, moved = (
        Stages("fr3").prepare(a)[0].model.cam("wrist").pos.copy() for a in settings.plan()
    )
    assert np.linalg.norm(moved - plain) == pytest.approx(0.02)


def test_a_ur5e_is_judged_like_a_panda():
    settings = make_settings(
        {
            "robot": "ur5e",
            "tasks": "reach",
            "seeds": 2,
            "conditions": "plain,swapped,table=dark+light=0.5",
            "duration": 10,
        }
    )
    simulator = Simulator(settings)
    records = {a.key: simulator.run(a) for a in settings.plan()}
    assert all(
        records[name, "reach", i]["success"]
        for name in ("plain", "table=dark+light=0.5")
        for i in (0, 1)
    )
    told = records["swapped", "reach", 1]
    assert (told["success"], told["success_told"], told["outcome"]) == (False, True, AS_TOLD)
    report = _robot(settings, records.values())
    assert report == {
        "name": "ur5e",
        "views": ["camera_top"],
        "assumed": True,
        "borrowed_domain": None,
    }
    assert " --robot ur5e" in str(_repeat(settings, settings.plan()[0]))
    rows = summarise(settings.plan(), records)
    assert [row["by_colour"]["red"]["successes"] for row in rows] == [1, 0, 1]


def test_a_close_cube_lies_in_the_robots_own_field(own: Path):
    stages = Stages(str(own))
    for assignment in make_plan(["pick"], 8, 0, [Perturbation.parse("close")]):
        robot, layout = stages.prepare(assignment)
        assert robot.scene.robot.name == "mine"
        assert layout is not None
        at = layout.names.index(assignment.goals[0].cube)
        away = np.linalg.norm(np.delete(layout.xy_m, at, axis=0) - layout.xy_m[at], axis=1)
        assert away.min() == pytest.approx(CLOSE_M)
        for axis, (low, high) in enumerate(((0.42, 0.58), (-0.13, 0.13))):
            assert (layout.xy_m[:, axis] >= low).all()
            assert (layout.xy_m[:, axis] <= high).all()


def test_two_arms_lift_a_bar_and_hand_one_over():
    settings = make_settings({"robot": "dual_panda", "seeds": 1, "conditions": "plain,light=2"})
    plan, simulator = settings.plan(), Simulator(settings)
    asked = {"lift_bar": LIFT_THE_BAR, "hand_over": HAND_OVER_THE_BAR}
    assert sorted((a.task, a.policy_instruction) for a in plan) == sorted(2 * [*asked.items()])
    for task in asked:
        _, lit = (a for a in plan if a.task == task)
        record = simulator.run(lit)
        assert record["success"] is record["success_told"] is True
        assert not any("by_colour" in row for row in summarise(plan, {lit.key: record}))


def test_success_is_reported_by_the_goals_colour():
    """Red are 0 and 3, green 1 and 4, blue 2; of two cubes to stack the upper one counts."""
    plan = make_plan(["pick", "stack"], 5, 0, [Perturbation("swapped", text="swapped")])
    good = {("pick", 0), ("pick", 4), ("stack", 2)}
    records = {
        a.key: {
            "success": (a.task, a.index) in good,
            "success_told": False,
            "outcome": "",
            "duration_s": 1.0,
            "times": {},
        }
        for a in plan
    }
    pick, stack, both = (
        {colour: (rate["successes"], rate["of"]) for colour, rate in row["by_colour"].items()}
        for row in summarise(plan, records)
    )
    assert pick == {"red": (1, 2), "green": (1, 2), "blue": (0, 1)}
    assert stack == {"red": (0, 2), "green": (0, 2), "blue": (1, 1)}
    assert both == {"red": (1, 4), "green": (1, 4), "blue": (1, 2)}


class OfDroid(Backend):
    """Answers in another action space for each embodiment, as a policy server does."""

    info = BackendInfo(preferred_space="joint_pos")

    def infer(self, request):
        pytest.fail(f"only the action space is asked for, not {request.n_rows} rows")


def test_the_action_space_is_the_backends_own_for_the_embodiment():
    backend = PerturbedBackend(OfDroid(), Perturbation(), "reach the red cube")
    assert backend.info.action_space_for(get_embodiment("droid")) == "joint_pos"
    assert backend.info.action_space_for(get_embodiment("robomind-ur")) is None


def test_without_a_model_another_robot_is_refused_before_anything_is_written(
    tmp_path: Path, capsys
):
    out = tmp_path / "run"
    assert (
        main(["evaluate", "--robot", "ur5e", "--tasks", "reach", "--seeds", "1", "--out", str(out)])
        == 2
    )
    assert "--model" in capsys.readouterr().err
    assert (
        main(
            [
                "evaluate",
                "--robot",
                "xarm7",
                "--model",
                "c",
                "--tasks",
                "reach",
                "--seeds",
                "1",
                "--out",
                str(out),
            ]
        )
        == 2
    )
    assert "--borrow-domain" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"robot": "ur5e", "tasks": "reach"}, "robomind-ur"),
        ({"suite": "libero_object", "backend": "native"}, "libero"),
    ],
)
def test_a_checkpoint_of_another_domain_is_refused_before_anything_is_written(
    tmp_path: Path, options, needed
):
    settings = make_settings({"model": str(resource("assets/table_policy")), "seeds": 1, **options})
    with pytest.raises(
        ContractError,
        match=f"its domain is 'droid_lerobot', not '{needed}'; choose its robot, or post-train",
    ):
        evaluate(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_page_says_which_robot_it_was(tmp_path: Path):
    settings = make_settings(
        {
            "robot": "xarm7",
            "borrow_domain": True,
            "model": "c",
            "tasks": "reach",
            "seeds": 3,
            "films": 1,
        }
    )
    figures = {"success": False, "success_told": False, "outcome": "timeout", "duration_s": 3.0}
    figures["times"] = {"answer_ms": [5.0]}
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        records = {
            a.key: folder.write(
                a, {**figures, "seed": a.seed, "assumed": True, "borrowed_domain": "droid"}
            )
            for a in settings.plan()
        }
        folder.write_film(settings.plan()[0], b"film", same=True)
        report = make_report(folder, records, {}, [])
    films = {report["failures"][0]["film"]: "data:"}
    html = page(report, films)
    assert (
        "xarm7; some of its limits are assumed; driven by the rows of droid, another robot" in html
    )
    assert "Success by colour" in html
    assert "aspect-ratio:48/9" not in html  # three views, as of a Panda
    assert report["failures"][0]["repeat"].endswith("--robot xarm7 --borrow-domain")
    report["robot"]["views"] = ["camera_top"]
    assert "aspect-ratio:16/9" in page(report, films)
