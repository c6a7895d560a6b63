"""Metrics of a server, in Prometheus' text format."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_PREFIX = "strands_cosmos3"


@dataclass
class Metrics:
    """Counters of one server; only its event loop writes them."""

    requests: Counter[str] = field(default_factory=lambda: Counter(ok=0, error=0, reset=0, abandoned=0))
    """By outcome; abandoned: the client left before the answer."""
    handshakes_refused: Counter[str] = field(default_factory=Counter[str])  # by HTTP status
    clients: int = 0  # open connections
    connections: int = 0  # accepted so far
    in_flight: int = 0  # requests queued or in inference
    received_bytes: int = 0
    sent_bytes: int = 0
    _seconds: float = 0.0
    _within: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))

    def observe(self, seconds: float) -> None:
        """Add the duration of one inference."""
        self._seconds += seconds
        self._within[sum(seconds > bound for bound in _BUCKETS_S)] += 1

    def text(self) -> str:
        """Return all metrics in text format 0.0.4."""
        refused = _labelled("status", self.handshakes_refused)
        cumulative = itertools.accumulate(self._within)
        bounds = (*map(str, _BUCKETS_S), "+Inf")
        durations: dict[str, float] = {f'_bucket{{le="{bound}"}}': n for bound, n in zip(bounds, cumulative, strict=True)}
        durations |= {"_sum": self._seconds, "_count": sum(self._within)}
        families = (
            _family("requests_total", "counter", "Requests by outcome.", _labelled("outcome", self.requests)),
            _family("handshakes_refused_total", "counter", "Refused handshakes by HTTP status.", refused),
            _family("connections_total", "counter", "Connections accepted.", {"": self.connections}),
            _family("clients", "gauge", "Connections open.", {"": self.clients}),
            _family("in_flight", "gauge", "Requests queued or in inference.", {"": self.in_flight}),
            _family("received_bytes_total", "counter", "Bytes of requests.", {"": self.received_bytes}),
            _family("sent_bytes_total", "counter", "Bytes of replies.", {"": self.sent_bytes}),
            _family("inference_seconds", "histogram", "Duration of an inference.", durations),
        )
        return "".join(families)


def _labelled(label: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': count for name, count in sorted(counts.items())}


def _family(name: str, kind: str, help_: str, samples: dict[str, float]) -> str:
    head = f"# HELP {_PREFIX}_{name} {help_}\n# TYPE {_PREFIX}_{name} {kind}\n"
    return head + "".join(f"{_PREFIX}_{name}{suffix} {value}\n" for suffix, value in samples.items())
