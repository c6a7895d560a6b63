"""``python -m recipes.table_policy``: make the bundled policy from nothing, or go on with it."""

import sys

from recipes.table_policy.recipe import main

if __name__ == "__main__":
    sys.exit(main())
