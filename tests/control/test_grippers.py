"""Any number of grippers: of one, open fractions are numbers and [T]; of G others they are [G]
and [T, G].
"""

import numpy as np
import pytest

from strands_cosmos3.checks import of_grippers, open_fractions
from strands_cosmos3.control.chunk_blending import blend_chunk, drop_elapsed
from strands_cosmos3.control.executor import Executor
from strands_cosmos3.control.limb_ik import LimbIK
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import ControlError, InputError, ShapeError
from strands_cosmos3.robots.panda import FER, HOME_Q
from strands_cosmos3.serving import wire
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Request

DT = 1 / 600
DUAL = get_embodiment("robomind-franka-dual")


def sway(grippers, n=8):
    phase = np.linspace(0, 1, n)
    return JointTrajectory(
        HOME_Q + 0.05 * np.sin(3 * phase)[:, None], np.arange(1, n + 1) / 15, grippers
    )


def ways(grippers):
    """Every way on which the executor hands out references: a motion, a blended one, a hold, a
    stop, a fault.
    """
    executor, blocks = (
        Executor(FER, DT, HOME_Q, 0.25 if grippers.ndim == 1 else np.array([0.25, 1.0])),
        [],
    )
    executor.accept(sway(None))
    blocks.append(executor.advance(30))
    executor.accept(sway(grippers))
    blocks.append(executor.advance(50))
    rest = blend_chunk(sway(grippers), HOME_Q, 0.2, executor.reference, FER, 0.2)
    executor.accept(rest)
    blocks.append(executor.advance(100))
    ahead = executor.takeover(20)
    blocks.append(executor.advance(20))
    executor.take_up(ahead.prepare(sway(grippers[::-1])))
    blocks.append(executor.advance(500))  # it ends, and holds
    executor.accept(sway(grippers))
    blocks.append(executor.advance(40))
    executor.stop()
    blocks.append(executor.advance(300))
    executor.accept(sway(grippers))
    blocks.append(executor.advance(60))
    executor.fault(followed=False)
    blocks.append(executor.advance(300))
    return blocks


def test_two_grippers_go_through_every_way_as_one_does():
    one, other = np.linspace(0.1, 0.8, 8), np.linspace(1.0, 0.3, 8)
    alone, both = ways(one), ways(np.column_stack((one, other)))
    for single, double in zip(alone, both, strict=True):
        np.testing.assert_array_equal(double.q_rad, single.q_rad)
        assert single.gripper.shape == (len(single),)
        assert double.gripper.shape == (len(double), 2)
        np.testing.assert_array_equal(double.gripper[:, 0], single.gripper)
    gripper = np.concatenate([block.gripper for block in both])
    assert (gripper[:30] == [0.25, 1.0]).all()  # rows without grippers keep them
    # the columns are not mixed up
    np.testing.assert_allclose(gripper[30:].sum(axis=1), 1.1, atol=0.15)
    assert len(np.unique(gripper[:, 1])) == 8


def test_rows_due_at_once_and_rows_without_grippers():
    """A first row that is due now is merged into the start; rows that move no gripper keep what
    was commanded last.
    """
    grippers = np.column_stack((np.linspace(0.1, 0.8, 8), np.linspace(1.0, 0.3, 8)))
    executor = Executor(FER, DT, HOME_Q, np.ones(2))
    executor.accept(JointTrajectory(sway(None).q_rad, np.arange(8) / 15, grippers))
    block = executor.advance(100)
    np.testing.assert_array_equal(block.gripper[0], grippers[1])
    last = block.gripper[-1]
    assert (last != block.gripper[0]).all()
    executor.accept(sway(None))
    assert (executor.advance(300).gripper == last).all()


def test_a_row_of_other_grippers_is_refused_and_moves_nothing():
    for start, given, said in (
        (1.0, np.ones((8, 2)), r"\[2\], but the arm's are a number"),
        (np.ones(2), np.ones(8), "a number"),
    ):
        executor = Executor(FER, DT, HOME_Q, start)
        with pytest.raises(ControlError, match=said):
            executor.accept(sway(given))
        assert not executor.advance(5).qd_rad_s.any()


def test_dropped_rows_leave_the_others_grippers():
    grippers = np.column_stack((np.linspace(0, 1, 8), np.linspace(1, 0, 8)))
    rest = drop_elapsed(sway(grippers), 2.5 / 15)
    np.testing.assert_array_equal(rest.gripper, grippers[2:])


@pytest.mark.parametrize(
    "bad",
    [np.ones((3, 1)), np.ones((2, 2)), np.ones((3, 2, 2)), np.full((3, 2), 1.1), [[0.5], [0.5, 1]]],
)
def test_malformed_open_fractions(bad):
    with pytest.raises(InputError):
        open_fractions(bad, 3)


def test_shapes_of_grippers():
    assert of_grippers(np.ones((4, 1))).shape == (4,)
    assert of_grippers(np.ones((4, 3))).shape == (4, 3)
    assert of_grippers(np.ones((4, 0))).shape == open_fractions(np.ones((4, 0)), 4).shape == (4, 0)
    observed = Observation(np.zeros(14), np.array([0.2, 1 + 1e-7]))
    np.testing.assert_array_equal(observed.gripper, [0.2, 1.0])
    assert isinstance(Observation(np.zeros(7), 0.5).gripper, float)
    with pytest.raises(ShapeError):
        Observation(np.zeros(7), np.array([0.5]))


def test_a_chunk_of_two_arms_moves_both_grippers_by_name():
    ik = LimbIK("dual_panda", check_collisions=False)
    rows = np.zeros((4, 20))
    # the left arm's gripper; the right one's stays in the middle
    rows[:, 9] = np.linspace(-1, 1, 4)
    trajectory = ik.plan(ActionChunk(rows, DUAL.action_space(), DUAL), ik.home).trajectory
    assert trajectory.gripper.shape == (4, 2)
    assert np.ptp(trajectory.gripper[:, 0]) > 0.9
    assert np.ptp(trajectory.gripper[:, 1]) == 0
    assert set(trajectory.limb_poses) == {"left", "right"}
    rest = drop_elapsed(trajectory, 1.5 / 10)
    for name, poses in trajectory.limb_poses.items():
        np.testing.assert_array_equal(rest.limb_poses[name].T_base_frame, poses.T_base_frame[1:])


def test_the_wire_carries_two_grippers():
    request = Request(DUAL, DUAL.action_space(), "lift", 16, None, np.array([0.25, 1.0]))
    message = wire.encode_request(request, wire.DIALECTS["robolab"], "s", 1)
    np.testing.assert_allclose(message["observation/gripper_position"], [0.75, 0.0])
    for sent, read in (
        ([0.75, 0.0], [0.25, 1.0]),
        ([[0, 0], [0.75, 0.0]], [0.25, 1.0]),
        ([0.5], [0.5, 0.5]),
    ):
        message["observation/gripper_position"] = np.array(sent, np.float32)
        got = wire.decode_request(message, DUAL, DUAL.action_space(), images=False)
        np.testing.assert_array_equal(got.gripper, read)
