"""Options of backends by name."""

from typing import Any

from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.options import with_options


def backend_options(**values: Any) -> BackendOptions:
    """Options, some of them set: ``backend_options(num_steps=2, device="cpu")``."""
    return with_options(BackendOptions(), values)
