"""Register this package's policies with strands-robots: by name in its registry, and for its
type checks.
"""

from __future__ import annotations

import inspect
from importlib import import_module, metadata

from strands_cosmos3.errors import MissingDependencyError
from strands_cosmos3.policy.contract import Policy
from strands_cosmos3.policy.cosmos3 import Cosmos3Policy

PROVIDER = "strands_cosmos3"
"""Our name in strands-robots' registry; ``cosmos3`` there is its own provider."""
_BUILT_IN = "cosmos3"
_REMEDY = "pip install 'strands-robots>=0.5.3' 'mujoco<4' (it wants Python 3.12 or newer)"


class HostedCosmos3Policy(Cosmos3Policy):
    """The policy that strands-robots makes by name: its default backend is ``service`` on
    localhost:8000.
    """

    default_backend = "service"


def register(overwrite: bool = False) -> tuple[str, ...]:
    """Register this package's policies with strands-robots: by type for ``policy_object=``, by name
    for ``policy_provider=``.

    Calling it again changes nothing. ``create_policy("cosmos3://host:port")`` there goes on to mean
    its own provider, whatever is registered: it looks addresses up in its own table; write
    ``create_policy("strands_cosmos3", host=..., port=...)``.

    Args:
        overwrite: Whether ``cosmos3`` there shall be this package's too, for the rest of the
            process.

    Returns:
        The names under which strands-robots knows this package's policy from now on.

    Raises:
        MissingDependencyError: strands-robots is not installed, or has no registry yet (0.3.8 has
            none).
    """
    try:
        policies = import_module("strands_robots.policies")
    except ImportError as error:
        raise MissingDependencyError(
            f"register() needs strands-robots, and {error}: {_REMEDY}."
        ) from error
    register_policy = getattr(policies, "register_policy", None)
    if register_policy is None:
        raise MissingDependencyError(
            f"strands-robots {metadata.version('strands-robots')} has no register_policy(); it is "
            f"too old: {_REMEDY}."
        )
    policies.Policy.register(Policy)
    names = (PROVIDER, _BUILT_IN) if overwrite else (PROVIDER,)
    # since 0.5.3; 0.5.0 to 0.5.2 always replace
    replaces = "overwrite" in inspect.signature(register_policy).parameters
    for name in names:
        register_policy(name, _hosted, **({"overwrite": overwrite} if replaces else {}))
    return names


def _hosted() -> type[Cosmos3Policy]:
    return HostedCosmos3Policy
