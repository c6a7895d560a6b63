"""The HTML page: everything in it, nothing from elsewhere, nothing unescaped."""

import json
import re
import shlex
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.evaluation.folder import RunFolder
from strands_cosmos3.evaluation.page import page
from strands_cosmos3.evaluation.plan import Condition, PolicyVariation
from strands_cosmos3.evaluation.report import ended, make_report, repeat_command, write_report
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings
from strands_cosmos3.evaluation.statistics import wilson
from strands_cosmos3.worlds import varied

VOID = {"meta", "line", "circle", "rect", "link", "br", "img"}


class Balance(HTMLParser):
    """Counts tags, and remembers what would be loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def made(tmp_path, instruction="reach the {a} cube"):
    settings = make_settings(
        {
            "tasks": "reach",
            "seeds": 4,
            "conditions": "plain,swapped",
            "instruction": instruction,
            "films": 1,
        }
    )
    plan = settings.plan()
    with RunFolder(tmp_path, settings, resume=False) as folder:
        records = {}
        for a in plan[:-1]:
            good = a.condition.name == "plain" and a.index > 0
            tracking = {"mean_mm": 0.1, "max_mm": 1.0}
            times = {"answer_ms": [5.0, 6.0], "cpu_s": 0.2}
            outcome = "success" if good else "timeout"
            figures = {
                "seed": a.seed,
                "duration_s": 3.0,
                "tracking": tracking,
                "outcome": outcome,
                "times": times,
            }
            figures |= {"success": good} | ({"followed": True} if a.goals_differ else {})
            records[a.key] = folder.write(a, figures)
        folder.write_film(plan[0], b"\0\0\0\x18ftypmp42", equal=True)
        report = make_report(
            folder, records, {"versions": {"a": "<1>"}, "command": "x --out <run>"}, []
        )
        write_report(folder, report)
    return report, (tmp_path / "report.html").read_text()


def test_the_page_stands_alone_and_is_whole(tmp_path):
    report, page = made(tmp_path)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.loads) == 1
    assert parser.loads[0].startswith("data:video/mp4;base64,")
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert report["complete"] is False
    assert "1 episode missing" in page


def test_the_page_and_the_json_say_the_same(tmp_path):
    report, page = made(tmp_path)
    low, high = wilson(3, 4)
    assert report["rows"][0]["success"] == {
        "successes": 3,
        "of": 4,
        "rate": 0.75,
        "low": low,
        "high": high,
    }
    assert f"{100 * low:.1f} .. {100 * high:.1f}" in page
    assert "3 / 4" in page
    assert re.search(r"0 / 3", page), "swapped: judged by the goal"
    assert "3 / 3" in page, "and followed"
    assert "-66.7" in page


def test_failures_are_named_with_the_command_that_repeats_them(tmp_path):
    report, page = made(tmp_path)
    (failure,) = report["failures"]
    assert (failure["condition"], failure["index"]) == ("plain", 0), (
        "following the instruction is no failure"
    )
    assert failure["film"] == "films/plain/reach-00000.mp4"
    assert f"--seed {failure['seed']}" in failure["repeat"]
    assert failure["repeat"] in page.replace("&#x27;", "'").replace("&quot;", '"')


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"counters": {"collision_stopped": 19}}, "stopped for a collision 19 times"),
        ({"counters": {"collision_stopped": 1, "holds": 2}}, "stopped for a collision once"),
        ({"counters": {"collision_avoided": 3}}, "timeout"),
        (
            {"counters": {"collision_stopped": 2}, "held": "no chunk came"},
            "stopped for a collision 2 times; in the end no chunk came",
        ),
        ({}, "timeout"),
    ],
)
def test_a_failure_says_what_kept_the_arm_from_its_goal(record, says):
    assert ended({"outcome": "timeout", **record}) == says


def test_the_command_repeats_the_very_episode(tmp_path):
    settings = make_settings({"tasks": "pick", "seeds": 2, "duration": 0.8, "replan_rows": 8})
    assignment = settings.plan()[1]
    record = AssignmentRunner(settings).run(assignment)
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        stored = folder.write(assignment, record)
        (failure,) = make_report(folder, {assignment.key: stored}, {}, [])["failures"]
    program, *options = shlex.split(failure["repeat"])
    at = options.index("--video")
    assert program == "strands-cosmos3"
    assert main([*options[:at], *options[at + 2 :], "--json", str(tmp_path / "again.json")]) == 1
    (again,) = json.loads((tmp_path / "again.json").read_text())["episodes"]
    for name in (
        "seed",
        "task",
        "outcome",
        "duration_s",
        "ik",
        "path",
        "tracking",
        "steps",
        "counters",
    ):
        assert again[name] == record[name], name


def test_a_command_is_only_given_where_it_repeats_the_episode():
    def command(**more):
        settings = make_settings({"tasks": "reach", "seeds": 1, "model": "c", **more})
        return repeat_command(settings, settings.plan()[0])

    assert "--device" not in command()
    assert "--backend distributed --model c --tp 2" in command(tp=2)
    assert "--device cpu" in command(tp=2), (
        "on a machine with a GPU it would run there, in other numbers"
    )
    assert "--device" not in command(tp=2, num_gpus=2)
    assert "--device cuda:1" in command(device="cuda:1")
    assert "--latency 0.2" in command(conditions="latency=0.2")
    assert command(dtype="bfloat16") is None, "rollout cannot set it"
    for condition in ("blank", "swapped", "light=2"):
        assert command(conditions=condition) is None


def test_no_command_is_given_under_a_condition_that_rollout_does_not_know():
    @dataclass(frozen=True)
    class Lossy(PolicyVariation):
        lost_frames: int | None = varied(1, 9)

    settings = make_settings({"tasks": "reach", "seeds": 1, "model": "c"})
    (assignment,) = settings.plan()
    lossy = Condition("lossy", Lossy(lost_frames=1))
    assert repeat_command(settings, assignment) is not None
    assert repeat_command(settings, replace(assignment, condition=lossy)) is None


def test_dynamics_stand_beside_what_they_are_measured_against(tmp_path):
    report, without = made(tmp_path)
    assert "Dynamics" not in without
    figures = {"clips": 7, "forward_db": 21.5, "copy_frame_psnr": 20.0, "vae_psnr": 24.0}
    figures["moving"] = {"forward_db": 13.5, "copy_frame_psnr": 10.0, "vae_psnr": 18.6}
    figures["controls"] = {"shuffled": 1.31, "opposite": 1.4, "zero": 1.5, "foreign": 1.01}
    figures |= {"inverse_mm": 33.0, "moved_mm": 120.0, "steps": 4}
    shown = page({**report, "dynamics": figures}, {})
    for text in (
        "7 chunks",
        "4 denoising steps",
        "21.50 dB",
        "+1.50 dB",
        "20.00 dB",
        "24.00 dB",
        "33.0 mm",
        "120.0 mm",
    ):
        assert text in shown
    Balance().feed(shown)


def test_the_page_names_the_robot_and_what_it_borrows(tmp_path):
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
    figures = {"success": False, "outcome": "timeout", "duration_s": 3.0}
    figures["times"] = {"answer_ms": [5.0]}
    notes = {"assumed": True, "borrowed_domain": "droid"}
    with RunFolder(tmp_path / "run", settings, resume=False) as folder:
        records = {
            a.key: folder.write(a, {**figures, "seed": a.seed, **notes}) for a in settings.plan()
        }
        report = make_report(folder, records, {}, [])
    html = page(report, {})
    assert (
        "xarm7; some of its limits are assumed; driven by the rows of droid, another robot" in html
    )
    assert "Success by colour of the goal" in html
    assert " --robot xarm7 " in report["failures"][0]["repeat"]
    assert " --borrow-domain " in report["failures"][0]["repeat"]


def test_every_table_fits_a_terminal(tmp_path, capsys):
    from rich.console import Console

    from strands_cosmos3.commands.evaluate import _print_report

    report, _ = made(tmp_path)
    report["run"] = {
        "new_episodes": 7,
        "wall_s": 61.0,
        "episodes_a_minute": None,
        "worker_failures": 0,
        "workers_hung": 0,
        "requeued": 1,
    }
    _print_report(Console(width=80), report, tmp_path)
    printed = capsys.readouterr().out
    for text in ("Success", "Following", "instruction", "change", "3 / 3", "Motion"):
        assert text in printed
    assert "1 episode missing" in printed
    assert "7 new episodes in 0:01:01, 1 episodes were queued again" in printed
    assert "…" not in printed, "nothing is cut off"
