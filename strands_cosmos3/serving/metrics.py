"""What a server counts, and how Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_PREFIX = "strands_cosmos3"


@dataclass
class Metrics:
    """Counters of one server; written by its event loop only.

    Attributes:
        requests: By outcome: ``ok``, ``error``, ``reset``, ``abandoned`` (the asker left before the answer).
        handshakes_refused: By HTTP status.
        clients: Connections open now.
        in_flight: Requests waiting for, or in, the worker.
        received_bytes, sent_bytes: Of messages.
    """

    requests: Counter[str] = field(default_factory=lambda: Counter(ok=0, error=0, reset=0, abandoned=0))
    handshakes_refused: Counter[str] = field(default_factory=Counter[str])
    clients: int = 0
    connections: int = 0
    in_flight: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    _seconds: float = 0.0
    _within: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))

    def observe(self, seconds: float) -> None:
        """Count one inference."""
        self._seconds += seconds
        self._within[sum(seconds > bound for bound in _BUCKETS_S)] += 1

    def text(self) -> str:
        """Everything in Prometheus' text format 0.0.4."""
        return "".join(
            [
                _family("requests_total", "counter", "Requests by outcome.", _labelled("outcome", self.requests)),
                _family("handshakes_refused_total", "counter", "By HTTP status.", _labelled("status", self.handshakes_refused)),
                _family("connections_total", "counter", "Connections accepted.", {"": self.connections}),
                _family("clients", "gauge", "Connections open.", {"": self.clients}),
                _family("in_flight", "gauge", "Requests waiting for, or in, inference.", {"": self.in_flight}),
                _family("received_bytes_total", "counter", "Bytes of requests.", {"": self.received_bytes}),
                _family("sent_bytes_total", "counter", "Bytes of replies.", {"": self.sent_bytes}),
                self._histogram(),
            ]
        )

    def _histogram(self) -> str:
        total = 0
        lines: dict[str, float] = {}
        for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), self._within, strict=True):
            total += count
            lines[f'_bucket{{le="{bound}"}}'] = total
        lines |= {"_sum": self._seconds, "_count": total}
        return _family("inference_seconds", "histogram", "Time from the worker's start to its answer.", lines)


def _labelled(label: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': count for name, count in sorted(counts.items())}


def _family(name: str, kind: str, says: str, samples: dict[str, float]) -> str:
    head = f"# HELP {_PREFIX}_{name} {says}\n# TYPE {_PREFIX}_{name} {kind}\n"
    return head + "".join(f"{_PREFIX}_{name}{suffix} {value}\n" for suffix, value in samples.items())
