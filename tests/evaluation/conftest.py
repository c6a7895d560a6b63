"""One Ray for all tests of this folder."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("mujoco")

from helpers.local_ray import local_ray  # noqa: F401
