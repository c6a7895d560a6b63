import pytest

from helpers.spy import Spy
from strands_cosmos3.policy import Cosmos3Policy


@pytest.fixture
def spy():
    return Spy()


@pytest.fixture
def policy(spy):
    return Cosmos3Policy(robot="panda", backend=spy)
