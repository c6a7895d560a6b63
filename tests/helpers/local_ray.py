"""Ray of this machine, started as a run starts it, for the tests of a folder. It ends with them: an
idle Ray takes a twentieth of a core.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strands_cosmos3.fleet.cluster import ONE_THREAD, cluster


@pytest.fixture(scope="package")
def local_ray() -> Iterator[int]:
    """The number of its GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ONE_THREAD:
            # a run itself sets them for its workers, which a test checks
            patch.delenv(name, raising=False)
        with cluster(None, cpus=8) as gpus:
            yield gpus
