"""One Ray for all tests of a session, started as an evaluation starts it."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("mujoco")

from strands_cosmos3.evaluation.cluster import cluster


@pytest.fixture(scope="session")
def local_ray():
    with cluster(None, cpus=8) as resources:
        yield resources
