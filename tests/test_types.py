"""The six types that flow: what they copy, what they refuse, and that nobody can change them
afterwards.
"""

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ActionSpaceError,
    InputError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
)
from strands_cosmos3.types import (
    ActionChunk,
    ErrorSummary,
    JointTrajectory,
    Mode,
    Observation,
    Outcome,
    PoseTrajectory,
    Request,
    Rollout,
)

DROID = get_embodiment("droid")
EYE = np.eye(4)
STACK = np.repeat(EYE[None], 3, axis=0)
TIMES = [0.1, 0.2, 0.3]


def test_observation_copies_and_freezes():
    q, image = np.zeros(7), np.zeros((4, 6, 3), np.uint8)
    seen = Observation(q, 0.2, {"wrist": image})
    q[0], image[0] = 1.0, 9
    assert seen.q_rad[0] == 0
    assert seen.images["wrist"].max() == 0
    np.testing.assert_array_equal(seen.qd_rad_s, np.zeros(7))
    with pytest.raises(ValueError, match="read-only"):
        seen.q_rad[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        seen.images["wrist"][0] = 1
    with pytest.raises(TypeError):
        seen.images["wrist"] = image
    with pytest.raises(FrozenInstanceError):
        seen.gripper = 1.0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"q_rad": []}, ShapeError),
        ({"q_rad": [[0.0]]}, ShapeError),
        ({"q_rad": [np.nan]}, NonFiniteError),
        ({"q_rad": "seven"}, InputError),
        ({"q_rad": None}, InputError),
        ({"q_rad": [1j]}, InputError),
        ({"qd_rad_s": [0.0, 0.0]}, ShapeError),
        ({"gripper": 1.1}, InputError),
        ({"gripper": -0.1}, InputError),
        ({"gripper": np.inf}, NonFiniteError),
        ({"images": {"wrist": np.zeros((4, 4, 3))}}, ShapeError),
        ({"images": {"wrist": np.zeros((4, 4), np.uint8)}}, ShapeError),
        ({"images": {"wrist": None}}, ShapeError),
    ],
)
def test_observation_refuses(fields, error):
    with pytest.raises(error):
        Observation(**{"q_rad": [0.0], "gripper": 0.5, **fields})


def test_request_refuses_a_bad_pose_and_no_rows():
    good = {
        "embodiment": DROID,
        "action_space": DROID.action_space(),
        "instruction": "go",
        "q_rad": [0.0],
        "gripper": 1,
    }
    assert Request(**good, n_rows=16, limb_poses={"arm": EYE}).mode is Mode.POLICY
    with pytest.raises(InputError):
        Request(**good, n_rows=0)
    with pytest.raises(InputError, match="rigid"):
        Request(**good, n_rows=1, limb_poses={"arm": np.diag([1.0, 1, -1, 1])})
    with pytest.raises(InputError, match="last row"):
        Request(**good, n_rows=1, limb_poses={"arm": np.vstack([EYE[:3], [0, 0, 1, 1]])})


def test_a_changed_request_shares_its_pictures():
    views = {name: np.zeros((36, 64, 3), np.uint8) for name in ("wrist", "exterior_1")}
    clip = np.zeros((3, 16, 16, 3), np.uint8)
    request = Request(
        DROID, DROID.action_space("midtrain"), "go", 8, np.zeros(7), 1.0,
        composite=np.ones((54, 64, 3), np.uint8), images=views, mode=Mode.INVERSE_DYNAMICS, clip=clip,
    )  # fmt: skip
    changed = replace(request, seed=3)
    assert changed.composite is request.composite
    assert changed.clip is request.clip
    assert all(changed.images[name] is request.images[name] for name in views)
    assert not request.clip.flags.writeable
    assert not any(np.shares_memory(request.images[name], views[name]) for name in views)
    locked = views["wrist"][:]
    locked.setflags(write=False)  # and its base is not
    views["wrist"][:] = 9
    assert not np.shares_memory(replace(request, composite=locked).composite, locked)


def test_chunk_takes_the_embodiment_s_rate_and_its_space_s_times():
    midtrain = ActionChunk(np.zeros((2, 10)), DROID.action_space("midtrain"), DROID)
    joints = ActionChunk(np.zeros((2, 8)), DROID.action_space("joint_pos"), DROID, fps=10)
    np.testing.assert_allclose(midtrain.row_times_s, [1 / 15, 2 / 15])
    np.testing.assert_allclose(joints.row_times_s, [0, 0.1])


@pytest.mark.parametrize(
    "quantiles", [(np.zeros(9), np.ones(9)), (np.zeros(10), np.full(10, np.nan))]
)
def test_chunk_refuses_quantiles_that_do_not_fit_its_columns(quantiles):
    with pytest.raises(InputError):
        ActionChunk(np.zeros((2, 10)), DROID.action_space("midtrain"), DROID, quantiles=quantiles)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (np.zeros((2, 8)), ActionSpaceError),
        (np.zeros(10), ShapeError),
        (np.zeros((0, 10)), ShapeError),
        (np.full((1, 10), 10.1), ActionOutOfRangeError),
        (np.full((1, 10), np.nan), NonFiniteError),
    ],
)
def test_chunk_refuses(rows, error):
    with pytest.raises(error):
        ActionChunk(rows, DROID.action_space("midtrain"), DROID)


def test_chunk_of_joints_may_exceed_ten_and_needs_a_rate():
    ActionChunk(np.full((1, 8), 11.0), DROID.action_space("joint_pos"), DROID)
    pusht = get_embodiment("pusht")
    with pytest.raises(InputError, match="fps"):
        ActionChunk(np.zeros((1, 2)), pusht.action_space(), pusht)
    for fps in (0, -15.0, 1e308, float("inf"), "15", True):  # 1e308 made angles of NaN
        with pytest.raises(InputError, match="fps"):
            ActionChunk(np.zeros((1, 10)), DROID.action_space(), DROID, fps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"t_s": [0.1, 0.1, 0.2]},
        {"t_s": [-0.1, 0.1, 0.2]},
        {"t_s": [0.1, 0.2]},
        {"gripper": [0, 0.5, 1.1]},
        {"gripper": [0, 0.5]},
        {"T_base_frame": EYE},
        {"T_base_frame": 2 * STACK},
        {"T_base_anchor": np.diag([1.0, -1, 1, 1])},
    ],
)
def test_pose_trajectory_refuses(fields):
    with pytest.raises(InputError):
        PoseTrajectory(
            **{
                "T_base_frame": STACK,
                "t_s": TIMES,
                "frame": "cosmos",
                "T_base_anchor": EYE,
                **fields,
            }
        )


def test_joint_trajectory_fills_in_a_clean_account():
    motion = JointTrajectory(np.zeros((3, 7)), [0, 0.1, 0.2])
    assert motion.converged.all()
    assert not motion.clamped.any()
    np.testing.assert_array_equal(motion.residual_m, np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        motion.clamped[0] = True
    with pytest.raises(ShapeError):
        JointTrajectory(np.zeros((3, 7)), [0, 0.1, 0.2], clamped=[True])


def test_modes_and_outcomes():
    assert Mode.parse("policy") is Mode.POLICY
    with pytest.raises(UnknownNameError, match="inverse_dynamics"):
        Mode.parse("backwards")
    assert all(outcome.message.endswith(".") for outcome in Outcome)


def test_error_summary_has_millimetres_and_degrees():
    summary = ErrorSummary.of(np.array([0.001, 0.003]), np.array([0.0, np.pi / 2]))
    assert vars(summary) == pytest.approx(
        {"mean_mm": 2.0, "max_mm": 3.0, "mean_deg": 45.0, "max_deg": 90.0}
    )


@pytest.mark.parametrize(
    ("task", "outcome", "success"),
    [
        ("reach", Outcome.SUCCESS, True),
        ("reach", Outcome.TIMEOUT, False),
        (None, Outcome.COMPLETED, None),
    ],
)
def test_rollout_is_json(task, outcome, success, tmp_path):
    zero = ErrorSummary(0, 0, 0, 0)
    rollout = Rollout(
        seed=1,
        task=task,
        instruction="go",
        outcome=outcome,
        ik=zero,
        path=zero,
        tracking=zero,
        steps={"total": 1},
        latency_ms={"p50": 1.0},
        counters={},
        duration_s=1.0,
        realtime_factor=2.0,
        arrays={"q_rad": np.zeros((2, 7))},
    )
    written = json.loads(json.dumps(rollout.to_dict()))
    assert written["success"] is success
    assert {
        "seed",
        "task",
        "instruction",
        "ik",
        "path",
        "tracking",
        "steps",
        "latency_ms",
        "counters",
    } <= set(written)
    assert "drift" not in written
    assert "held" not in written
    assert written["latency_clock"] == "simulated"
    rollout.save_npz(str(tmp_path / "episode.npz"))
    assert np.load(tmp_path / "episode.npz")["q_rad"].shape == (2, 7)


def test_a_rollout_is_one_line_of_text_and_shows_its_film_in_a_notebook(tmp_path):
    nothing = ErrorSummary(0.1, 0.2, 0.3, 0.4)
    film = tmp_path / "a.mp4"
    film.write_bytes(b"film")
    rollout = Rollout(
        3, "pick", "pick up <b>the</b> red "
                   "cube", Outcome.SUCCESS, {}, {}, {}, 4.5, 2.0, nothing, nothing, nothing,
        arrays={"q": np.zeros((1000, 7))}, video=film,
    )  # fmt: skip
    assert "\n" not in repr(rollout)
    assert len(repr(rollout)) < 200
    assert "pick: success" in repr(rollout)
    page = rollout._repr_html_()
    assert "data:video/mp4;base64,ZmlsbQ==" in page
    assert "<b>the" not in page
    film.unlink()
    assert "no longer exists" in rollout._repr_html_()
    assert "video" not in rollout.to_dict()
