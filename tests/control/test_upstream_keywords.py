"""The keywords of strands-robots' ``cosmos3`` (its ``sim_ik.py``, 0.5.3): each is accepted and
does what it says there.
"""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.actions.stats import load_action_stats
from strands_cosmos3.control.ik import MinkIKBridge
from strands_cosmos3.control.targets import decode_cosmos_chunk_to_targets
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ShapeError, StatisticsError, UnknownNameError
from strands_cosmos3.robots.model import load_panda
from strands_cosmos3.robots.panda import HOME_Q, dh_forward

DROID = get_embodiment("droid")
MODEL: mujoco.MjModel = load_panda()
BRIDGE = MinkIKBridge(MODEL, ee_frame_name="hand", ee_frame_type="body", solver="daqp")
Q0 = np.concatenate((HOME_Q, [0.04, 0.04]))
STATS = load_action_stats("droid_lerobot")


def rows(reach: float = 0.2) -> np.ndarray:
    """[8, 10] normalised rows of a motion of the first and fourth joint by ``reach``."""
    share = np.linspace(0, 1, 9)[:, None]
    T_hand = dh_forward(HOME_Q + share * reach * np.array([1.0, 0, 0, 0.5, 0, 0, 0]))
    return encode_chunk(T_hand @ DROID.tool_frame.T_parent_cosmos, np.ones(8), DROID)


def test_a_chunk_by_the_names_of_strands_robots():
    ours = decode_cosmos_chunk_to_targets(rows(), DROID, BRIDGE, Q0)
    given = {"q01": STATS.q01.tolist(), "q99": STATS.q99.tolist()}
    for reanchor in (False, True):
        theirs = decode_cosmos_chunk_to_targets(
            action_chunk=rows(),
            embodiment="droid",
            ik_bridge=BRIDGE,
            q_init=Q0,
            stats=given,
            stats_domain="droid_lerobot",
            reanchor=reanchor,
        )
        assert {"qpos", "gripper", "poses", "tracking_error"} <= theirs.keys() == ours.keys()
        np.testing.assert_allclose(theirs["qpos"], ours["qpos"], atol=1e-4)
        np.testing.assert_allclose(theirs["poses"], ours["poses"], atol=1e-5)
        np.testing.assert_allclose(theirs["t_s"], ours["t_s"])
        np.testing.assert_allclose(theirs["gripper"], 1.0, atol=1e-9)
        assert theirs["collision"].outcome == ours["collision"].outcome


def test_reanchoring_composes_on_what_was_reached():
    """Rows that are too fast fall behind; re-anchored, the targets stay one delta ahead of the
    arm.
    """
    fast = {
        "action_chunk": rows(0.6),
        "embodiment": DROID,
        "ik_bridge": BRIDGE,
        "q_init": Q0,
        "fps": 100.0,
    }
    ahead, behind = (
        decode_cosmos_chunk_to_targets(**fast, reanchor=reanchor) for reanchor in (False, True)
    )
    step_mm = np.linalg.norm(np.diff(ahead["poses"][:, :3, 3], axis=0), axis=1).max() * 1e3
    assert ahead["tracking_error"]["max_mm"] > 2 * step_mm
    assert behind["tracking_error"]["max_mm"] < step_mm
    reached = dh_forward(behind["qpos"][:-1, :7]) @ DROID.tool_frame.T_parent_cosmos
    deltas = np.linalg.inv(ahead["poses"][:-1]) @ ahead["poses"][1:]
    np.testing.assert_allclose(behind["poses"][1:], reached @ deltas, atol=1e-9)


def test_reanchored_rows_meet_nothing():
    """The hand on its way into the arm itself: both ways no row is in collision, and the report
    counts rows of the chunk.
    """
    inwards = np.tile(dh_forward(HOME_Q), (41, 1, 1))
    inwards[:, 0, 3] -= np.linspace(0, 0.55, 41)
    inwards[:, 2, 3] -= np.linspace(0, 0.4, 41)
    chunk = encode_chunk(inwards @ DROID.tool_frame.T_parent_cosmos, np.ones(40), DROID)
    for reanchor in (False, True):
        out = decode_cosmos_chunk_to_targets(chunk, DROID, BRIDGE, Q0, fps=2.0, reanchor=reanchor)
        assert out["collision"].outcome in ("avoided", "stopped")
        assert 8 < out["collision"].row < 40
        assert BRIDGE.collisions.held_before(Q0, out["qpos"])[1].row is None
        assert len(out["qpos"]) == len(out["t_s"]) == len(out["poses"]) == 40


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stats": {"q01": STATS.q01, "q99": STATS.q99}}, "stats_domain='droid_lerobot'"),
        ({"stats": {"q01": STATS.q01}, "stats_domain": "droid"}, "q99"),
        (
            {"stats_domain": "umi"},
            "stats_domain='umi' does not describe embodiment 'droid_lerobot'",
        ),
        (
            {"stats": {"q01": STATS.q01, "q99": STATS.q99}, "stats_domain": "umi"},
            "does not describe",
        ),
        ({"stats": {"q01": STATS.q01[:9], "q99": STATS.q99[:9]}, "stats_domain": "droid"}, "10"),
    ],
)
def test_statistics_of_another_domain_are_refused(given, says):
    with pytest.raises((StatisticsError, ShapeError), match=says):
        decode_cosmos_chunk_to_targets(rows(), DROID, BRIDGE, Q0, **given)


def test_the_bridge_s_solver_and_whole_trajectories():
    assert BRIDGE.solver == MinkIKBridge(MODEL).solver == "daqp"
    with pytest.raises(UnknownNameError, match=r"solver 'gurobi'.*daqp"):
        MinkIKBridge(MODEL, solver="gurobi")
    poses = dh_forward(HOME_Q + np.linspace(0, 0.2, 5)[:, None] * np.eye(7)[3])
    q = BRIDGE.solve_trajectory(poses, Q0)
    assert q.shape == (5, MODEL.nq)
    np.testing.assert_allclose(dh_forward(q[:, :7]), poses, atol=1e-5)
    error = BRIDGE.tracking_error(poses, q)
    assert error["max_mm"] < 1e-2
    poses[2, 2, 3] += 0.003
    assert BRIDGE.tracking_error(poses, q)["max_mm"] == pytest.approx(3, abs=1e-2)
    assert BRIDGE.tracking_error(poses, q)["mean_mm"] == pytest.approx(0.6, abs=1e-2)
    with pytest.raises(ShapeError, match="got 5 and 4"):
        BRIDGE.tracking_error(poses, q[:-1])
