"""Environments with the Gymnasium API: simulated arms in a world, and the LIBERO benchmark.

::

    gymnasium.make("strands_cosmos3.environments:strands_cosmos3/Table-v0", task="pick")
    gymnasium.make("strands_cosmos3.environments:strands_cosmos3/Libero-v0", task=3)

Importing this module registers both; Gymnasium comes with the extra ``gym``, LIBERO with the extra
``libero``. Evaluations drive the same simulations without Gymnasium
(:mod:`strands_cosmos3.evaluation`).
"""

from strands_cosmos3.extras import EXTRAS
from strands_cosmos3.tables import packaged_worlds


def register() -> None:
    """Register the environments with Gymnasium, once; without Gymnasium do nothing."""
    if EXTRAS["gym"].absent:
        return
    import gymnasium

    for world in packaged_worlds().values():
        for name, entry in world["environments"].items():
            if name not in gymnasium.registry:
                gymnasium.register(name, entry_point=entry)


register()
