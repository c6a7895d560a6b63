"""Deprecated name of :mod:`strands_cosmos3.robots`. To be removed after 0.2."""

import sys
import warnings
from importlib import import_module

warnings.warn(
    "strands_cosmos3.arm is now strands_cosmos3.robots.", DeprecationWarning, stacklevel=2
)
for _name in ("hosted", "model", "panda", "servo"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = import_module(
        f"strands_cosmos3.robots.{_name}"
    )
