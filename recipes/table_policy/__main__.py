"""``python -m recipes.table_policy``: make the bundled policy from nothing, or go on
with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from recipes.pipeline import run_stages
from recipes.table_policy.recipe import CARD, TINY, Recipe


def main(arguments: list[str] | None = None) -> int:
    """Run the stages that are not done; return an exit status."""
    description = "Make the bundled policy from nothing, or go on with it."
    return run_stages(
        arguments,
        "bundled policy",
        description,
        lambda tiny, seed, workers: replace(TINY if tiny else Recipe(), seed=seed).stages(workers),
        CARD,
    )


if __name__ == "__main__":
    sys.exit(main())
