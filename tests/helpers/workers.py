"""The workers of an evaluation, for tests that kill them."""

from __future__ import annotations

from strands_cosmos3.evaluation.driver import Driver
from strands_cosmos3.evaluation.plan import Assignment


def busy(driver: Driver) -> dict[int, Assignment]:
    """Current assignment by process id."""
    return {place.pid: place.job.assignment for place in driver.places if place.job is not None}
