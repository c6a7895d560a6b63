"""Small random checkpoints with eyes, made once a session."""

import numpy as np
import pytest

from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.reasoner.pixels import Film
from strands_cosmos3.reasoner.reasoner import Reasoner

KINDS = ("silu", "relu2")  # Nano's and Edge's
QUESTION = "Did the gripper close on the red cube?"


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """Kind -> folder."""
    root = tmp_path_factory.mktemp("seeing")
    return {kind: write_checkpoint(root / kind, hidden_act=kind, eyes=True) for kind in KINDS}


@pytest.fixture(scope="session")
def reasoners(seeing):
    """Kind -> reasoner, in float32."""
    return {kind: Reasoner.from_pretrained(folder) for kind, folder in seeing.items()}


@pytest.fixture(scope="session")
def pictures():
    """Three pictures [H, W, 3] of different sizes, which no scaling changes."""
    rng = np.random.default_rng(0)
    sizes = ((64, 96), (96, 64), (128, 64))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


@pytest.fixture(scope="session")
def film():
    """Twenty frames at 8 a second: 5 are read."""
    rng = np.random.default_rng(1)
    return Film(rng.integers(0, 256, (20, 64, 96, 3), dtype=np.uint8), 8.0)


@pytest.fixture(scope="session")
def cases(pictures, film):
    """Name -> pictures and films of a question."""
    return {
        "none": ((), ()),
        "one picture": (pictures[:1], ()),
        "three pictures": (pictures, ()),
        "a film": ((), (film,)),
        "both": (pictures[:2], (film, film)),
    }
