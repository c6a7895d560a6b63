"""One Ray for all tests of this folder, started as an evaluation starts it. It ends with them: an
idle Ray takes a twentieth of a core.
"""

import pytest

pytest.importorskip("ray")
pytest.importorskip("mujoco")

from strands_cosmos3.evaluation.cluster import ONE_THREAD, cluster


@pytest.fixture(scope="package")
def local_ray():
    """The number of its GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ONE_THREAD:
            # the evaluation itself sets them for its workers, which a test checks
            patch.delenv(name, raising=False)
        with cluster(None, cpus=8) as gpus:
            yield gpus
