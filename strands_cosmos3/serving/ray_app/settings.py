"""What a fleet serves, and its limits."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.base import Backend
from strands_cosmos3.checks import positive, typed_fields, whole_number
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.options import (
    ENGINE_BACKENDS,
    MODEL_BACKENDS,
    require_heeded,
    section,
    with_options,
)
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server_config import ServerConfig, Tokens

_MOST_REPLICAS = 4096


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """What a fleet serves, and its limits: the arguments of the application in a config file, and
    flags of ``serve --ray``, both by these names and by those of the policy's options.

    Raises:
        ConfigError: Values do not go together, or no fleet can serve them.
        InputError: A number is out of range.
    """

    embodiment: str = "droid"
    """Name of the embodiment."""
    factory: str | None = None
    """``module:function`` that makes the backend instead: each replica calls it with ``model``, a
    text or None.
    """
    http: str | None = None
    """HTTP dialect that is answered too."""
    seed: int = 0
    """Noise seed for clients that send none."""
    replicas: int = 1
    """Replicas of the policy, each of tp x cfg x sp ranks on one machine; the least of them, if
    there may be more.
    """
    max_replicas: int | None = None
    """Most replicas; Ray Serve adds and removes them as requests come. None: always as many."""
    ingresses: int = 2
    """Processes that hold the clients' sockets."""
    max_clients: int = 128
    """Connections of each of these processes at a time."""
    max_per_address: int | None = None
    """Connections of one address at each of them; None is no limit."""
    max_surge_percent: int = 0
    """Of the replicas, how many more an update may start before it ends old ones; with 0 an old one
    makes room first, since there may be no more GPUs.
    """
    max_batch: int = 8
    """Requests that a replica infers for together, at most; it holds as many again."""
    max_queued: int = 64
    """Requests of each ingress that wait for a replica to take them; another one is refused."""
    max_queue_age: float = 30.0
    """Seconds that a request may wait."""
    grace: float = 30.0
    """Seconds for running inferences of a replica that is to end."""
    stalled_after: float = 600.0
    """Seconds without progress of an inference after which its replica is replaced."""
    token_file: str | None = None
    """File with the clients' tokens, on every machine that may have an ingress."""
    token: str | None = None
    """One token for all clients, instead of a file."""
    policy: PolicyOptions = section(PolicyOptions)

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.replicas, "replicas", 1, _MOST_REPLICAS)
        if self.max_replicas is not None:
            name = f"max_replicas (replicas is {self.replicas})"
            whole_number(self.max_replicas, name, self.replicas, _MOST_REPLICAS)
        whole_number(self.ingresses, "ingresses", 1, 256)
        whole_number(self.max_queued, "max_queued", 1)
        whole_number(self.max_surge_percent, "max_surge_percent", 0, 100)
        positive(self.stalled_after, "stalled_after")
        if self.backend not in (*MODEL_BACKENDS, "factory"):
            raise ConfigError(
                f"backend {self.backend!r} is not served by a fleet; valid: "
                f"{', '.join(MODEL_BACKENDS)}."
            )
        if self.factory is None:
            require_heeded(self.backend, self.policy)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FleetSettings:
        """Return settings that are given by name in one flat dictionary.

        Raises:
            ConfigError: There is no such setting; or as the class itself does.
        """
        return with_options(cls(), arguments)

    @property
    def backend(self) -> str:
        """Where inference runs."""
        if self.factory is not None:
            return "factory"
        return self.policy.backend_with(self.policy.model)

    @property
    def model(self) -> str | None:
        """The checkpoint's folder or repository; without one that of the bundled policy."""
        if self.policy.model is None and self.backend in ENGINE_BACKENDS:
            return str(embedded_checkpoint(self.embodiment))
        return self.policy.model

    def server_config(self, **address: Any) -> ServerConfig:
        """Return the limits of an ingress as those of a server; ``address`` is what else a
        ``ServerConfig`` has.

        Raises:
            ResourceNotFoundError: The file of tokens cannot be read.
            ConfigError: Its tokens are invalid, or others may read it.
        """
        tokens = None if self.token_file is None else Tokens.read(Path(self.token_file))
        return ServerConfig(
            token=self.token if tokens is None else tokens.by_client,
            realtime=() if tokens is None else tokens.realtime,
            grace_s=self.grace,
            max_clients=self.max_clients,
            max_per_address=self.max_per_address,
            max_batch=self.max_batch,
            queue_s=self.max_queue_age,
            **address,
        )

    def make_backend(self) -> Backend:
        """Make the backend, with its ranks if there are several. Raises Cosmos3Error."""
        if self.factory is not None:
            return _made_by(self.factory, self.policy.model)
        options = self.policy
        return make_backend(self.backend, self.model, options.for_backend, options.action_space)

    def served(self, backend: Any) -> ServedPolicy:
        """Return the policy of a backend. Raises Cosmos3Error if it cannot be served."""
        space = self.policy.action_space
        on_event = self.policy.on_event
        return ServedPolicy(
            backend, self.embodiment, space, self.seed, http=self.http, on_event=on_event
        )


def _made_by(place: str, model: str | None) -> Backend:
    """What a function that a setting names makes of a model."""
    try:
        make = pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"factory {place!r} is no module:function that can be imported here ({error})."
        ) from None
    return make(model)
