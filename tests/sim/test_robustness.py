"""``bench robustness``: an arm that differs from its model shows in the figures, and
compensation takes it out of them.
"""

import json

import numpy as np

from strands_cosmos3.actions.decode import decode_chunk
from strands_cosmos3.bench import robustness
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.types import Request


def test_a_payload_shows_and_its_compensation_takes_it_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(robustness, "HOLD_S", 3.0)
    monkeypatch.setattr(robustness, "LOOPS", 1)
    monkeypatch.setattr(robustness, "FEED_FORWARD", ("velocity",))
    monkeypatch.setattr(
        robustness, "PLANTS", {name: robustness.PLANTS[name] for name in ("none", "payload 1 kg")}
    )
    assert main(["bench", "robustness", "--chunks", "1", "--json", str(tmp_path / "r.json")]) == 0
    out = json.loads((tmp_path / "r.json").read_text())
    none, payload, carried = out["cases"]
    assert [case["compensated"] for case in out["cases"]] == [False, False, True]
    assert none["hold"]["max_mm"] < 0.01
    assert payload["hold"]["last_second_mm"] > 0.8
    assert carried["hold"]["last_second_mm"] < 0.1
    assert payload["slow"]["tracking_mean_mm"] > 0.5
    assert carried["slow"]["tracking_mean_mm"] < 0.2
    assert none["loops"]["end_mm"] < 0.5
    titles, *rows = robustness.table(out)
    assert len(rows) == 3
    assert {len(row) for row in rows} == {len(titles)}
    assert rows[2][:3] == ("payload 1 kg", "velocity", "yes")
    assert "payload" in capsys.readouterr().out


def test_the_deltas_do_not_depend_on_where_the_arm_is():
    """A model that does not see the hand's error cannot correct it; a replay would."""
    droid, backend = get_embodiment("droid"), robustness.DeltaBackend(robustness.circles(1))
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
                T_base_cosmos=pose,
                t_motion_s=0.5,
            )
        )
        for pose in (T, away)
    )
    np.testing.assert_array_equal(here.action, there.action)
    poses = decode_chunk(here, backend.recording.at(np.array([0.5]))[0][0]).T_base_frame
    np.testing.assert_allclose(
        poses, backend.recording.at(0.5 + np.arange(1, 17) / 15)[0], atol=1e-6
    )


def test_rollout_takes_errors_and_compensates_them(tmp_path):
    tracked = {}
    for how in ("none", "identified"):
        file = tmp_path / f"{how}.json"
        common = [
            "rollout",
            "--backend",
            "scripted",
            "--task",
            "reach",
            "--duration",
            "1",
            "--plant",
            "all-errors",
        ]
        main([*common, "--compensate", how, "--json", str(file)])
        tracked[how] = json.loads(file.read_text())["episodes"][0]["tracking"]["mean_mm"]
    assert tracked["identified"] < 0.6 * tracked["none"]
