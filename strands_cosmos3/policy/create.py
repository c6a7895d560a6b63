"""Policies by name."""

from __future__ import annotations

import inspect
from typing import Any

from strands_cosmos3.checks import typed
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.policy.contract import Policy
from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
from strands_cosmos3.policy.host import HostedCosmos3Policy
from strands_cosmos3.policy.preflight import require_arguments


@typed()
def create_policy(provider: str = "cosmos3", **config: Any) -> Policy:
    """Make a policy by name, as strands-robots does: ``create_policy("cosmos3", embodiment="droid",
    backend="scripted")``.

    Without a backend, model or degrees of parallelism it is ``service`` on localhost:8000, as
    strands-robots' own ``cosmos3``; ``"cosmos3://host:port"`` says where that server is.

    Raises:
        ConfigError: Another provider (this package makes Cosmos 3 policies only), or an option that
            there is not.
    """
    name, _, address = provider.partition("://")
    if name not in ("cosmos3", "strands_cosmos3") or ("://" in provider and not address):
        raise ConfigError(
            f"unknown policy provider {provider!r}; this package provides 'cosmos3' and "
            "'cosmos3://host:port'."
        )
    if address:
        if twice := [key for key in ("host", "port", "client") if config.get(key) is not None]:
            raise ConfigError(
                f"{provider!r} says where the server is; leave {', '.join(twice)} out."
            )
        config["host"] = f"ws://{address}"
    require_arguments(config, inspect.signature(Cosmos3Policy).parameters)
    return HostedCosmos3Policy(**config)
