"""Groups of ranks, and small random checkpoints that eight ranks can split."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from recipes.random_checkpoint import FactorySizes, write_checkpoint

SIZES = {
    "nano": ("silu", FactorySizes(64, 2, heads=8, kv_heads=4, head_dim=16, intermediate=160)),
    "super": ("silu", FactorySizes(80, 3, heads=16, kv_heads=2, head_dim=16, intermediate=320)),
    "edge": ("relu2", FactorySizes(64, 2, heads=8, kv_heads=2, head_dim=16, intermediate=160)),
}
"""Random weights in the proportions of each variant: query heads for each key head, depth,
width.
"""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Kind -> folder."""
    root = tmp_path_factory.mktemp("parallel")
    return {
        kind: str(write_checkpoint(root / kind, hidden_act=act, sizes=sizes))
        for kind, (act, sizes) in SIZES.items()
    }
