"""``python -m recipes.table_policy``: make the bundled policy from nothing, or go on with it."""

import sys

from recipes.table_policy.recipe import RECIPE

if __name__ == "__main__":
    sys.exit(RECIPE.main())
