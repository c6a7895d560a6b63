"""Small random checkpoints of both kinds, made once a session."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from recipes.random_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Kind -> folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(root / kind, hidden_act=kind) for kind in ("silu", "relu2")}


@pytest.fixture(scope="session")
def joint_checkpoint(tmp_path_factory):
    """A checkpoint that speaks joint_pos."""
    return write_checkpoint(
        tmp_path_factory.mktemp("joint") / "c", action_space="joint_pos", seed=3
    )
