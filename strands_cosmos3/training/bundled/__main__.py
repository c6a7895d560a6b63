"""``python -m strands_cosmos3.training.bundled``: make the bundled policy from nothing, or go on
with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from strands_cosmos3.training.bundled.recipe import CARD, TINY, Recipe
from strands_cosmos3.training.bundled.stages import run_stages


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
