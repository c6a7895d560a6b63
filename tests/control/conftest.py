"""What tests of loops share."""

import threading
import time

import pytest


@pytest.fixture
def no_thread_is_left():
    """A loop that ended has ended its threads."""
    before = threading.active_count()
    yield
    until = time.monotonic() + 2.0
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before
