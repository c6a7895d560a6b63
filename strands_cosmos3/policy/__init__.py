"""The policy: observation and instruction in, motion out. The same object serves our Robot and
strands-robots.
"""

from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.policy.policy import Policy, Step
from strands_cosmos3.policy.providers import create_policy, register

__all__ = ["Cosmos3Policy", "Policy", "PolicyOptions", "Step", "create_policy", "register"]
