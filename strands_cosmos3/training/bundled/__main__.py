"""``python -m strands_cosmos3.training.bundled``: make the bundled policy from nothing, or go on with it."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.training.bundled.recipe import CARD, TINY, Recipe
from strands_cosmos3.training.bundled.stages import make


def main(arguments: list[str] | None = None) -> int:
    """Run the stages that are not done; return an exit status."""
    parser = argparse.ArgumentParser("make bundled-policy", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of everything that is made")
    parser.add_argument("--workers", type=int, default=2, help="processes that record and evaluate; one per core")
    parser.add_argument("--tiny", action="store_true", help="all stages in minutes, for a policy that can do nothing")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        make(given.out, (TINY if given.tiny else Recipe()).stages(given.workers))
    except Cosmos3Error as error:
        print(f"bundled policy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bundled policy: interrupted; the same command goes on.", file=sys.stderr)
        return 130
    print(f"checkpoint and card: {given.out / CARD}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
