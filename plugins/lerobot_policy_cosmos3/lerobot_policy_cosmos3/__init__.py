"""NVIDIA Cosmos 3 as the LeRobot policy type ``cosmos3``. LeRobot finds this package and its
modules by name.
"""

from lerobot_policy_cosmos3.configuration_cosmos3 import Cosmos3Config

__all__ = ["Cosmos3Config"]
