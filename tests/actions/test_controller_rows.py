"""LIBERO's actions as rows: every column by hand, and there and back."""

import numpy as np
import pytest

from strands_cosmos3.actions.controller_rows import (
    controller_rows,
    decode_rows,
    encode_actions,
    normalize_actions,
)
from strands_cosmos3.actions.stats import load_action_stats
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import InputError
from strands_cosmos3.types import ActionChunk

LIBERO = get_embodiment("libero")


def chunk(rows, **given):
    return ActionChunk(rows, LIBERO.action_space(), LIBERO, **given)


def test_a_row_by_hand():
    """Half a unit about x is written as half a radian: the columns of Rx(0.5); -1 opens, which
    is 1 in the model.
    """
    row = encode_actions([[0.1, -0.2, 0.9, 0.5, 0.0, 0.0, -1.0]])[0]
    assert row == pytest.approx([0.1, -0.2, 0.9, 1, 0, 0, 0, np.cos(0.5), np.sin(0.5), 1.0])
    assert encode_actions([[0, 0, 0, 0, 0, 0, 1.0]])[0, 9] == 0.0


def test_a_rotation_about_z_has_the_columns_of_the_matrix_and_not_its_rows():
    row = encode_actions([[0, 0, 0, 0, 0, 0.3, 0]])[0]
    assert row[3:9] == pytest.approx([np.cos(0.3), np.sin(0.3), 0, -np.sin(0.3), np.cos(0.3), 0])


def test_actions_survive_rows_and_their_normalisation():
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (200, 7)) * [1, 1, 1, 0.3, 0.3, 0.3, 1]
    assert np.allclose(decode_rows(encode_actions(actions)), actions, atol=1e-12)
    assert np.allclose(
        decode_rows(controller_rows(chunk(normalize_actions(actions)))), actions, atol=1e-9
    )


def test_all_ten_columns_are_normalised_by_the_unprocessed_data():
    """With the other figures of the file, or with rotations left as they are, rows would be
    others.
    """
    raw = load_action_stats("libero").raw
    assert controller_rows(chunk(np.ones((1, 10))))[0] == pytest.approx(raw.q99)
    assert controller_rows(chunk(-np.ones((1, 10))))[0] == pytest.approx(raw.q01)


def test_a_checkpoints_own_figures_come_first():
    own = np.full(10, -2.0), np.full(10, 4.0)
    assert controller_rows(chunk(np.zeros((1, 10)), quantiles=own))[0] == pytest.approx(np.ones(10))


def test_a_networks_rot6d_is_projected_and_its_gripper_clipped():
    row = encode_actions([[0, 0, 0, 0.2, -0.1, 0.3, 0]])
    assert decode_rows(np.hstack((row[:, :3], 1.7 * row[:, 3:9], [[1.4]])))[0] == pytest.approx(
        [0, 0, 0, 0.2, -0.1, 0.3, -1]
    )


def test_a_degenerate_rotation_is_refused():
    with pytest.raises(InputError, match="rot6d"):
        decode_rows(np.zeros((1, 10)))
