"""One Ray for all tests of this folder."""

import pytest

pytest.importorskip("ray")

from helpers.local_ray import local_ray  # noqa: F401
