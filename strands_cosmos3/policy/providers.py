"""Policies by name: created here, and registered with strands-robots."""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import Any

from strands_cosmos3.checks import typed
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
from strands_cosmos3.policy.policy import Policy
from strands_cosmos3.policy.preflight import require_arguments

PROVIDER = "strands_cosmos3"
"""Our name in strands-robots' registry; ``cosmos3`` there is its own provider."""
_BUILT_IN = "cosmos3"
_REMEDY = "pip install 'strands-robots>=0.5.3' 'mujoco<4' (it wants Python 3.12 or newer)"


class HostedCosmos3Policy(Cosmos3Policy):
    """The policy that strands-robots makes by name: its default backend is ``service`` on
    localhost:8000.
    """

    default_backend = "service"


@typed()
def create_policy(provider: str = "cosmos3", **config: Any) -> Policy:
    """Make a policy by name, as strands-robots does: ``create_policy("cosmos3", embodiment="droid",
    backend="scripted")``.

    Without a backend, model or degrees of parallelism it is ``service`` on localhost:8000, as
    strands-robots' own ``cosmos3``; ``"cosmos3://host:port"`` says where that server is, with TLS
    ``"cosmos3://wss://host:port"``.

    Raises:
        ConfigError: Another provider (this package makes Cosmos 3 policies only), or an option that
            there is not.
    """
    name, _, address = provider.partition("://")
    if name not in ("cosmos3", "strands_cosmos3") or ("://" in provider and not address):
        raise ConfigError(
            f"unknown policy provider {provider!r}; this package provides 'cosmos3' "
            "and 'cosmos3://host:port'."
        )
    if address:
        if twice := [key for key in ("host", "port", "client") if config.get(key) is not None]:
            raise ConfigError(
                f"{provider!r} says where the server is; leave {', '.join(twice)} out."
            )
        config["host"] = address
    require_arguments(config, inspect.signature(Cosmos3Policy).parameters)
    return HostedCosmos3Policy(**config)


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
