"""``python -m recipes.libero_policy``: make a small policy for LIBERO from nothing, or go on
with it.
"""

import sys

from recipes.libero_policy.recipe import RECIPE

if __name__ == "__main__":
    sys.exit(RECIPE.main())
