"""Benchmarks run as scripts, and compare like with like; how fast anything is is nobody's promise
here.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import admission
import engine
import loop
import pictures
import service
import table_policy
import tracking
from motions import BRISK_DEG, BRISK_M, recording_of_motion
from recipes.random_checkpoint import FactorySizes
from strands_cosmos3.actions.decode import decode_chunk
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.served import Message, Session
from strands_cosmos3.serving.wire import SERVED_MODEL
from strands_cosmos3.types import Request

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """script(name, *arguments): runs a benchmark as Python runs a script."""

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")

    return run


def test_a_script_prints_its_figures_and_the_machine(script, capsys):
    script("ik", "--chunks", "2")
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert figures["auto"]["position_max_mm"] < 1e-3
    assert figures["auto"]["rotation_max_deg"] < 1e-4
    assert figures["auto"]["hard_velocity_ratio_max"] <= 1.001
    assert figures["mink_equal_tolerance_ms"] > 0
    assert figures["two_arms"]["position_max_mm"] < 1e-3
    assert {"platform", "python"} == figures["machine"].keys()
    assert "straight elbows" in said.err


def test_the_monitors_are_timed(script, capsys):
    script("monitors", "--calls", "10")
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["look_ms"]["p50"] <= figures["look_ms"]["p95"]


def test_a_script_says_what_is_wrong_in_one_line(script):
    with pytest.raises(SystemExit, match="no recording at '/nope"):  # Python prints it: 1
        script("tracking", "--episode", "/nope.json")


def test_the_wire_is_compared_with_a_bare_exchange_of_the_same_bytes(monkeypatch):
    monkeypatch.setattr(service, "_WARM_UP", 2)
    figures = service.run(exchanges=5)
    assert figures["composite"]["request_bytes"] == pytest.approx(540 * 640 * 3, rel=1e-3)
    assert figures["composite"]["ratio_to_echo"] > 0
    assert figures["three_views"]["bare_ms"]["p50"] > 0


def test_pictures_are_timed_over_a_slow_link_and_judged_by_the_actions():
    figures = pictures.run(exchanges=1, mbit=200.0, scenes=1, seeds=2)
    link = figures["link"]
    assert link["letterboxed"]["request_bytes"] == pytest.approx(3 * 360 * 640 * 3, rel=1e-3)
    assert link["raw"]["request_bytes"] <= 530_000
    assert link["jpeg"]["request_bytes"] <= 90_000
    # nothing is passed on faster than the link's rate: 2,074 kB at 25 MB/s take 83 ms
    assert link["letterboxed"]["p50"] > 70
    assert 0 < figures["actions"]["share"] < 0.01


def test_a_realtime_client_is_timed_alone_and_beside_bulk_ones(monkeypatch):
    monkeypatch.setattr(admission, "_HOPELESS", 3)
    figures = admission.run(bulk=2, inference_ms=5.0, seconds=2.5, rounds=1)
    assert figures["client_ms"].keys() == {"alone", "one class", "two classes"}
    assert all(part["p99"] >= 5.0 for part in figures["client_ms"].values())
    assert figures["bulk_chunks_per_s"]["two classes"] > 0
    assert figures["refused_ms"]["requests"] == 3


@pytest.mark.parametrize("spoilt", ["nothing", "row", "checkpoint", "refusal", "text", "words"])
def test_clients_of_a_fleet_notice_what_is_wrong(spoilt):
    # not imported: there is a package of tests of that name
    fleet = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "fleet.py")))
    frame, seen = fleet._frame(np.random.default_rng(1)), fleet._Outcomes()
    policy = fleet._ORACLES["second"]
    (answer,) = policy.answer([Message(frame, Session(), 0.0)])
    reply = decode(answer.frame)
    match spoilt:
        case "row":
            reply["action"] = reply["action"] + np.float32(1e-6)
        case "checkpoint":
            reply[SERVED_MODEL] = fleet._ORACLES["first"].backend.model_sha256
        case "refusal":
            reply = {"type": "error", "message": "full", "retry_after_ms": 5}
        case "words":
            reply = {"type": "error", "message": "full"}
    fleet._check(frame, "BackendError: late" if spoilt == "text" else encode(reply), seen)
    assert seen.answers["second"] == (spoilt == "nothing")
    assert seen.wrong == (spoilt in ("row", "checkpoint"))
    assert sum(seen.refused.values()) == (spoilt in ("refusal", "text"))
    assert len(seen.untyped) == (spoilt == "words")


@pytest.mark.filterwarnings("ignore::strands_cosmos3.robots.limits.LimitsAssumedWarning")
@pytest.mark.parametrize(
    ("robot", "joints", "grippers"), [("ur5e", 6, ()), ("dual_panda", 14, (2,))]
)
def test_the_loop_of_another_robot_is_timed(robot, joints, grippers):
    limits, home, opening = loop._of(robot)
    assert (limits.velocity.shape, home.shape) == ((joints,), (joints,))
    assert getattr(opening, "shape", ()) == grippers
    assert (home == get_robot(robot).home_rad).all()
    figures = loop.run(2, 0, robot)
    assert (figures["robot"], figures["chunks"], figures["counters"]["rejected"]) == (robot, 2, 0)
    assert "robot" not in loop.run(1)


@pytest.mark.slow
def test_the_bench_runs_and_both_sides_agree():
    figures = engine.measure("256", steps=2, repeats=1, sizes=FactorySizes())
    assert figures["generation_tokens"] == 266
    assert figures["largest_action_difference"] < 2e-4
    assert set(figures["cpu_s"]) == {"native", "pipeline_latent", "pipeline_decoded"}
    assert figures["cpu_s"]["pipeline_latent"] < figures["cpu_s"]["pipeline_decoded"]
    assert figures["ratio"]["native"] == 1


@pytest.mark.slow
def test_the_part_about_the_bundled_policy():
    figures = table_policy.run(repeats=1)
    assert figures["film"]["frames"] == 9, "the given frame and one for each of eight rows"
    assert set(figures["film"]["chunk_cpu_ms"]) == {"without", "shown", "all"}
    assert set(figures["batch"]["cpu_ms"]) == {"one", "one_by_one", "together", "candidates"}


def test_both_dtypes_answer_the_same_request():
    figures = engine.measure("256", "bfloat16", steps=2, repeats=2, sizes=FactorySizes())
    assert set(figures["cpu_s"]) == {"native", "bfloat16"}
    assert len(figures["ratio_each"]["bfloat16"]) == 2
    assert 0 < figures["largest_action_difference"] < figures["actions_rms"]


def test_a_payload_shows_and_its_compensation_takes_it_out(monkeypatch):
    monkeypatch.setattr(tracking, "HOLD_S", 3.0)
    monkeypatch.setattr(tracking, "SPEEDS", {"slow": tracking.SPEEDS["slow"]})
    configs = [
        (name, config)
        for name, config in tracking.cases(plants=True)
        if name in ("none", "payload 1 kg") and config.feed_forward == "velocity"
    ]
    monkeypatch.setattr(tracking, "cases", lambda plants: configs)
    out = tracking.run(chunks=1, plants=True)
    none, payload, carried = out["cases"]
    assert [case["compensated"] for case in out["cases"]] == [False, False, True]
    assert none["hold"]["max_mm"] < 0.01
    assert payload["hold"]["last_second_mm"] > 0.8
    assert carried["hold"]["last_second_mm"] < 0.1
    assert payload["slow"]["tracking_mean_mm"] > 0.5
    assert carried["slow"]["tracking_mean_mm"] < 0.2


def test_the_deltas_do_not_depend_on_where_the_arm_is():
    """A model that does not see the hand's error cannot correct it; a replay would."""
    motion = recording_of_motion(np.random.default_rng(0), BRISK_M, BRISK_DEG)
    droid, backend = get_embodiment("droid"), tracking.DeltaBackend(motion)
    T = dh_forward(HOME_Q) @ droid.tool_frame.T_parent_cosmos
    away = T.copy()
    away[2, 3] -= 0.01
    here, there = (
        backend.infer(
            Request(
                droid,
                droid.action_space("midtrain"),
                "turn",
                16,
                HOME_Q,
                1.0,
                limb_poses={"arm": pose},
                t_motion_s=0.5,
            )
        )
        for pose in (T, away)
    )
    np.testing.assert_array_equal(here.action, there.action)
    poses = decode_chunk(here, motion.at(np.array([0.5]))[0][0]).T_base_frame
    np.testing.assert_allclose(poses, motion.at(0.5 + np.arange(1, 17) / 15)[0], atol=1e-6)
