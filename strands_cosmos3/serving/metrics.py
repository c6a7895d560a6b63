"""Metrics of a server, in Prometheus' text format."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strands_cosmos3.serving.served import Answer

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass
class Histogram:
    """Durations in s, counted by bucket."""

    _seconds: float = 0.0
    _within: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self._seconds += seconds
        self._within[bisect.bisect_left(_BUCKETS_S, seconds)] += 1

    def samples(self) -> dict[str, float]:
        """Return the samples of the text format by suffix."""
        bounds = (*map(str, _BUCKETS_S), "+Inf")
        cumulative = itertools.accumulate(self._within)
        values: dict[str, float] = {
            f'_bucket{{le="{bound}"}}': n for bound, n in zip(bounds, cumulative, strict=True)
        }
        return values | {"_sum": self._seconds, "_count": sum(self._within)}


@dataclass
class Metrics:
    """Counters of one server; only its event loop writes them.

    ``about`` says what is served, e.g. ``{"backend": "native", "model_sha256": "..."}``.
    """

    about: Mapping[str, str] = field(default_factory=dict[str, str])
    requests: Counter[str] = field(
        default_factory=lambda: Counter(
            ok=0, error=0, reset=0, abandoned=0, late=0, refused=0, held=0
        )
    )
    """By outcome; abandoned: the client left before the answer; late: it waited too long and was
    not inferred for; refused: its client would not have waited for the answer; held: its
    camera views or state were implausible.
    """
    by_class: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Requests by class and outcome."""
    handshakes_refused: Counter[str] = field(default_factory=Counter[str])  # by HTTP status
    clients: int = 0  # open connections
    connections: int = 0  # accepted so far
    evicted: int = 0  # idle connections closed for another client
    cut_off: Counter[str] = field(
        default_factory=lambda: Counter(crowded=0, unfinished=0, protocol=0)
    )
    """By reason; crowded: one of too many connections without a request; unfinished: a message did
    not arrive in time; protocol: frames broke WebSockets' rules, or our limits.
    """
    # requests queued or in inference; an abandoned one counts until its inference ends
    in_flight: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    inference: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)

    def count(self, priority: str, answer: Answer | None) -> None:
        """Count a request of a class that was answered, or whose client left (None)."""
        outcome = "abandoned" if answer is None else answer.outcome
        self.requests[outcome] += 1
        self.by_class[priority, outcome] += 1
        if answer is None or answer.retry_after_s:
            return
        self.queue.observe(answer.waited_s)
        if answer.outcome == "ok":
            self.inference.observe(answer.infer_s)

    def text(self, busy_s: float = 0.0) -> str:
        """Return all metrics in text format 0.0.4; ``busy_s`` is the age of the running
        inference.
        """
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(self.about.items()))
        families: tuple[tuple[str, str, str, dict[str, float] | float], ...] = (
            ("info", "gauge", "What is served.", {f"{{{labels}}}": 1}),
            (
                "requests_total",
                "counter",
                "Requests by outcome.",
                _labelled("outcome", self.requests),
            ),
            (
                "class_requests_total",
                "counter",
                "Requests by class and outcome.",
                {f'{{class="{c}",outcome="{o}"}}': n for (c, o), n in self.by_class.items()},
            ),
            (
                "handshakes_refused_total",
                "counter",
                "Refused handshakes by HTTP status.",
                _labelled("status", self.handshakes_refused),
            ),
            ("connections_total", "counter", "Connections accepted.", self.connections),
            ("clients", "gauge", "Connections open.", self.clients),
            (
                "evicted_total",
                "counter",
                "Idle connections closed for another client.",
                self.evicted,
            ),
            (
                "cut_off_total",
                "counter",
                "Connections closed by reason.",
                _labelled("reason", self.cut_off),
            ),
            ("in_flight", "gauge", "Requests queued or in inference.", self.in_flight),
            ("busy_seconds", "gauge", "Age of the running inference.", busy_s),
            ("received_bytes_total", "counter", "Bytes of requests.", self.received_bytes),
            ("sent_bytes_total", "counter", "Bytes of replies.", self.sent_bytes),
            (
                "queue_seconds",
                "histogram",
                "Time from a request's arrival to its inference.",
                self.queue.samples(),
            ),
            (
                "inference_seconds",
                "histogram",
                "Duration of an inference.",
                self.inference.samples(),
            ),
        )
        lines: list[str] = []
        for name, kind, meaning, samples in families:
            metric = f"strands_cosmos3_{name}"
            lines += f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"
            by_suffix = samples if isinstance(samples, dict) else {"": samples}
            lines += (f"{metric}{suffix} {value}" for suffix, value in by_suffix.items())
        return "\n".join([*lines, ""])


def _labelled(label: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{label}="{name}"}}': count for name, count in sorted(counts.items())}
