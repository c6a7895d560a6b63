"""The policy: observation and instruction in, motion out. The same object serves our Robot and
strands-robots.
"""

from strands_cosmos3.policy.contract import Policy, Step
from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
from strands_cosmos3.policy.create import create_policy
from strands_cosmos3.policy.host import register

__all__ = ["Cosmos3Policy", "Policy", "Step", "create_policy", "register"]
