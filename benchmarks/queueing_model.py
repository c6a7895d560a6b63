"""How long requests wait for a server, and how many GPUs a number of robots need
(benchmarks/NOTES.md).

Workers share one queue, first come, first served. Requests of many robots that do not know of each
other arrive nearly as a Poisson process, and an inference always takes the same time: M/D/c, for
which the distribution of waits is exact. Erlang's M/M/c is there for comparison. What has no
formula, robots with periods of their own or workers that take several requests at a time, is
simulated.

``tests/test_queueing.py`` compares the formulas with published values and with the simulation,
``benchmarks/queueing.py --measure`` all of them with a server.

Sources: A. K. Erlang, 1917 (M/M/c); Pollaczek and Khinchine (M/D/1); G. J. Franx, "A simple
solution for the M/D/c waiting time distribution", Operations Research Letters 29, 2001.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_toeplitz
from scipy.optimize import brentq
from scipy.stats import poisson

_DRAWS, _PERIODS = 200, 12  # the first period, which begins with an empty queue, does not count
_EXPONENT = 30.0  # longer queues than have a probability of e to the minus this are left out


@dataclass(frozen=True)
class Station:
    """Workers that share one queue; inferences last ``service_s`` on average, and ``rate`` requests
    arrive a second. Raises ValueError unless the workers can keep up.
    """

    workers: int
    service_s: float
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.utilisation < 1:
            raise ValueError(
                f"{self.workers} workers would be busy for {self.utilisation:.3g} of the time; "
                "there is a state of balance above 0 and below 1 only."
            )

    @property
    def utilisation(self) -> float:
        """Share of the time for which a worker is busy."""
        return self.rate * self.service_s / self.workers

    @property
    def erlang_c(self) -> float:
        """Probability that a request waits, where durations are exponential."""
        load = self.rate * self.service_s
        blocked = poisson.pmf(self.workers, load) / poisson.cdf(self.workers, load)
        return float(blocked / (1 - self.utilisation * (1 - blocked)))

    def longer_exponential(self, wait_s: float) -> float:
        """Probability of a longer wait, where durations are exponential."""
        spare = self.workers / self.service_s - self.rate
        return self.erlang_c * float(np.exp(-spare * wait_s))

    @property
    def mean_exponential_s(self) -> float:
        """Mean wait, where durations are exponential [s]."""
        return self.erlang_c / (self.workers / self.service_s - self.rate)

    @cached_property
    def waiting(self) -> NDArray[np.float64]:
        """Probabilities of 0, 1, 2 ... waiting requests, where all inferences last equally long.

        One duration later whoever is served now has left, and as many as there are workers have
        left the queue, which whoever came meanwhile has joined. The state of balance solves a
        Toeplitz system, apart from an empty queue's probability, which makes their sum 1.
        """
        load, c = self.rate * self.service_s, self.workers
        # of a long queue each length is 1 / z as probable as the one before
        z = brentq(lambda z: load * (z - 1) - c * np.log(z), c / load, 2 * (c / load) ** 2 + 1)
        length = int(_EXPONENT / math.log(cast("float", z))) + 2
        come = partial(poisson.pmf, mu=load)
        n = np.arange(length)
        first_column, first_row = -come(c + n), -come(c - n)
        first_column[0] = first_row[0] = 1 - come(c)
        queue = solve_toeplitz((first_column, first_row), come(c + 1 + n))
        waiting = np.append(1.0, queue)
        return waiting / waiting.sum()

    @property
    def mean_s(self) -> float:
        """Mean wait, where all inferences last equally long [s]; by Little's law."""
        return float(self.waiting @ np.arange(len(self.waiting))) / self.rate

    def longer(self, wait_s: float) -> float:
        """Probability of a longer wait, where all inferences last equally long.

        With k the first whole number of durations beyond the wait t: whoever arrives is served
        within t if those who wait, and those who come in the k durations but the last t, are fewer
        than the places that become free in k durations (Franx).
        """
        k = int(wait_s / self.service_s) + 1
        places = k * self.workers
        come = poisson.cdf(
            places - 1 - np.arange(len(self.waiting)), self.rate * (k * self.service_s - wait_s)
        )
        return float(1 - self.waiting @ come)

    def quantile_s(self, share: float) -> float:
        """The wait that this share of the requests does not exceed [s], to a microsecond."""
        low, high = 0.0, self.service_s
        if self.longer(low) <= 1 - share:
            return 0.0
        while self.longer(high) > 1 - share:
            low, high = high, 2 * high
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if self.longer(middle) > 1 - share else (low, middle)
        return high


def simulated_waits_s(
    arrivals_s: Sequence[float] | NDArray[np.float64],
    service_s: Callable[[int], float],
    workers: int,
    batch: int = 1,
) -> NDArray[np.float64]:
    """The wait of each request until its inference begins [s].

    Args:
        arrivals_s: Times at which requests arrive, in their order.
        service_s: Duration of an inference for so many requests.
        workers: Whoever is free takes the first requests.
        batch: How many at most, of those that wait then.
    """
    arrivals = np.asarray(arrivals_s)
    waits_s = np.empty(len(arrivals))
    free_s = [-np.inf] * workers
    first = 0
    while first < len(arrivals):
        start_s = max(heappop(free_s), arrivals[first])
        come = int(np.searchsorted(arrivals, start_s, "right"))
        last = min(max(come, first + 1), first + batch)
        waits_s[first:last] = start_s - arrivals[first:last]
        heappush(free_s, start_s + service_s(last - first))
        first = last
    return waits_s


@dataclass(frozen=True)
class Robots:
    """Robots that each execute ``executed`` rows of a chunk of ``horizon`` rows, ``rows_hz`` a
    second, and then ask for the next chunk. While it is computed they execute what is left.
    """

    count: int
    horizon: int
    executed: int
    rows_hz: float

    @property
    def rate(self) -> float:
        """Requests of all robots a second."""
        return self.count * self.rows_hz / self.executed

    @property
    def slack_s(self) -> float:
        """Time after which a robot runs out of rows [s]."""
        return (self.horizon - self.executed) / self.rows_hz


def workers_needed(
    robots: Robots, service_s: float, network_s: float = 0.0, share: float = 0.99
) -> int | None:
    """Return the least number of workers with one queue for which this share of the chunks arrive
    before the robots run out of rows; None if an inference alone takes longer.
    """
    wait_s = robots.slack_s - network_s - service_s
    if wait_s < 0:
        return None
    busy = int(robots.rate * service_s)  # on average

    def station(workers: int) -> Station:
        return Station(workers, service_s, robots.rate)

    # exponential durations make them wait longer, and have a formula for any number of workers
    workers = next(n for n in count(busy + 1) if station(n).longer_exponential(wait_s) <= 1 - share)
    while workers - 1 > busy and station(workers - 1).longer(wait_s) <= 1 - share:
        workers -= 1
    return workers


def robots_served(
    workers: int, robots: Robots, service_s: float, network_s: float = 0.0, share: float = 0.99
) -> int:
    """Return how many robots like these so many workers can serve in the same way.

    So few robots are no Poisson process, since each has one request at most: they are simulated,
    with equal periods and phases drawn at random again and again.
    """
    wait_s = robots.slack_s - network_s - service_s
    if wait_s < 0:
        return 0
    period_s = robots.executed / robots.rows_hz
    most = int(workers * period_s / service_s)

    def too_many(number: int) -> bool:
        return (
            _waits_of_robots_s(number, period_s, service_s, workers) > wait_s
        ).mean() > 1 - share

    return bisect_left(range(1, most + 1), True, key=too_many)


def _waits_of_robots_s(
    number: int, period_s: float, service_s: float, workers: int
) -> NDArray[np.float64]:
    """Waits of robots that ask once a period, for many draws of their phases."""
    rng = np.random.default_rng(0)
    starts_s = np.arange(_PERIODS)[:, None] * period_s
    waits_s = []
    for _ in range(_DRAWS):
        arrivals_s = np.sort(starts_s + rng.uniform(0, period_s, number), axis=1).ravel()
        waits_s.append(simulated_waits_s(arrivals_s, lambda _: service_s, workers)[number:])
    return np.concatenate(waits_s)
