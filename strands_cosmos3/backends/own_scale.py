"""Rows of a checkpoint that was post-trained with statistics of its own, and the scale that everyone else speaks.

An :class:`~strands_cosmos3.types.ActionChunk` of a domain is in the scale of the domain's packaged statistics; policies,
recordings and servers decode it so. A checkpoint that carries ``action_stats.json`` speaks another one, so its rows are
brought over at its own backend's door, and known rows are brought to it.
"""

from __future__ import annotations

import numpy as np

from strands_cosmos3.actions.stats import load_action_stats, stats_for
from strands_cosmos3.checks import F64
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint

STATISTICS = "action_stats.json"
"""Beside a checkpoint's other files: statistics of its rows, in this project's schema."""


class OwnScale:
    """Between a checkpoint's scale and the packaged one; where it has no statistics of its own, nothing changes.

    Args:
        checkpoint: Whose rows.

    Raises:
        StatisticsError: Its statistics cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint):
        path = checkpoint.root / STATISTICS
        self.stats = load_action_stats(path) if path.exists() else None

    def outward(self, rows: F64, embodiment: Embodiment) -> F64:
        """The checkpoint's rows [..., D] in the packaged scale.

        Raises:
            StatisticsError: Its statistics are of another domain.
        """
        if self.stats is None:
            return rows
        own = stats_for(embodiment, self.stats).normalizer("quantile")
        return stats_for(embodiment).normalizer("quantile")(own.inverse(rows))

    def inward(self, rows: F64, embodiment: Embodiment) -> F64:
        """Rows in the packaged scale [..., D] as the checkpoint speaks them."""
        if self.stats is None:
            return np.array(rows)
        packaged = stats_for(embodiment).normalizer("quantile")
        return stats_for(embodiment, self.stats).normalizer("quantile")(packaged.inverse(rows))
