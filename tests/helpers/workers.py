"""The workers of an evaluation, for tests that kill them."""

from __future__ import annotations

from strands_cosmos3.evaluation.driver import Driver
from strands_cosmos3.evaluation.plan import Assignment


def busy(driver: Driver) -> dict[int, Assignment]:
    """Current assignment by process id."""
    return {slot.pid: slot.job.assignment for slot in driver.slots if slot.job is not None}
