"""One Ray for all tests of a session, started as an evaluation starts it."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("mujoco")

from strands_cosmos3.evaluation.cluster import ONE_THREAD, cluster


@pytest.fixture(scope="session")
def local_ray():
    with pytest.MonkeyPatch.context() as patch:
        for name in ONE_THREAD:
            # the evaluation itself sets them for its workers, which a test checks
            patch.delenv(name, raising=False)
        with cluster(None, cpus=8) as resources:
            yield resources
