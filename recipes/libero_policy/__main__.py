"""``python -m recipes.libero_policy``: make a small policy for LIBERO from nothing, or go on with
it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from recipes.libero_policy.recipe import CARD, TINY, LiberoRecipe
from recipes.pipeline import run_stages


def main(arguments: list[str] | None = None) -> int:
    """Run the stages that are not done; return an exit status."""
    description = "Make a small policy for LIBERO, or go on with it."
    return run_stages(
        arguments,
        "libero policy",
        description,
        lambda tiny, seed, workers: replace(TINY if tiny else LiberoRecipe(), seed=seed).stages(
            workers
        ),
        CARD,
    )


if __name__ == "__main__":
    sys.exit(main())
