"""The model of benchmarks/queueing_model.py against published formulas, tables and a simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest

import queueing
import queueing_model
from queueing_model import Robots, Station, robots_served, simulated_waits_s, workers_needed

ROBOTS = Robots(100, 32, 16, 15.0)


@pytest.mark.parametrize(
    ("workers", "load", "waits"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (2, 1.8, 0.8526), (5, 4.0, 0.5541), (10, 8.0, 0.4092)],
)
def test_the_probability_of_waiting_is_that_of_erlangs_tables(workers, load, waits):
    station = Station(workers, 2.0, load / 2.0)
    assert station.erlang_c == pytest.approx(waits, abs=5e-5)
    assert station.longer_exponential(0.0) == station.erlang_c


def test_one_worker_with_exponential_durations():
    """M/M/1: the mean is rho / (mu - lambda); waits beyond zero are exponential."""
    station = Station(1, 0.5, 1.6)
    assert station.mean_exponential_s == pytest.approx(0.8 / (2.0 - 1.6))
    assert station.longer_exponential(2.0) == pytest.approx(0.8 * math.exp(-0.8))


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.97])
def test_one_worker_with_equal_durations(rho):
    """M/D/1: the mean of Pollaczek and Khinchine, and Erlang's distribution."""
    station = Station(1, 0.2, rho / 0.2)
    assert station.mean_s == pytest.approx(rho * 0.2 / (2 * (1 - rho)), rel=1e-6)
    assert station.longer(0.0) == pytest.approx(rho, rel=1e-9)
    for durations in (0.5, 1.0, 2.3):
        shorter = (1 - rho) * sum(
            (-rho * (durations - j)) ** j / math.factorial(j) * math.exp(rho * (durations - j))
            for j in range(int(durations) + 1)
        )
        assert station.longer(durations * 0.2) == pytest.approx(1 - shorter, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("workers", "rho"), [(2, 0.5), (2, 0.9), (5, 0.8), (10, 0.9)])
def test_several_workers_with_equal_durations(workers, rho):
    """M/D/c: the mean is near Cosmetatos' approximation, and all of it the simulation's."""
    station = Station(workers, 1.0, rho * workers)
    correction = (1 - rho) * (workers - 1) * (math.sqrt(4 + 5 * workers) - 2) / (16 * rho * workers)
    assert station.mean_s == pytest.approx(
        station.mean_exponential_s / 2 * (1 + correction), rel=0.02
    )
    rng = np.random.default_rng(0)
    arrivals_s = np.cumsum(rng.exponential(1 / station.rate, 100_000))
    waits_s = simulated_waits_s(arrivals_s, lambda _: 1.0, workers)
    assert waits_s.mean() == pytest.approx(station.mean_s, rel=0.1)
    for share in (0.9, 0.99):
        wait_s = station.quantile_s(share)
        assert (waits_s <= wait_s).mean() == pytest.approx(share, abs=0.01)


def test_workers_take_what_waits_together():
    arrivals_s = [0.0, 0.1, 0.2, 0.3, 5.0]
    one_by_one = simulated_waits_s(arrivals_s, lambda _: 1.0, 1)
    np.testing.assert_allclose(one_by_one, [0, 0.9, 1.8, 2.7, 0])
    of_two = simulated_waits_s(arrivals_s, lambda size: 1.0 + 0.5 * (size - 1), 1, batch=2)
    np.testing.assert_allclose(of_two, [0, 0.9, 0.8, 2.2, 0])
    np.testing.assert_allclose(simulated_waits_s(arrivals_s, lambda _: 1.0, 2), [0, 0, 0.8, 0.8, 0])


@pytest.mark.parametrize("rate", [0.0, 2.0, 5.0])
def test_a_queue_without_a_balance_is_refused(rate):
    with pytest.raises(ValueError, match="2 workers would be busy"):
        Station(2, 1.0, rate)


def test_one_worker_less_would_be_late():
    needed = workers_needed(ROBOTS, 0.5, network_s=0.1)
    wait_s = 16 / 15 - 0.1 - 0.5
    assert Station(needed, 0.5, ROBOTS.rate).longer(wait_s) <= 0.01
    assert Station(needed - 1, 0.5, ROBOTS.rate).longer(wait_s) > 0.01
    assert workers_needed(ROBOTS, 1.0, network_s=0.1) is None, "16 rows last for 1.07 s"


def test_as_many_robots_as_the_workers_suffice_for():
    assert robots_served(8, replace(ROBOTS, executed=15), 1.0) == 8, "one at a time on each"
    most = robots_served(8, ROBOTS, 0.5)
    assert 8 < most <= 8 * ROBOTS.executed / ROBOTS.rows_hz / 0.5
    assert most > 8 * 100 / workers_needed(ROBOTS, 0.5) - 2, "waits are shorter than at random"
    assert robots_served(8, ROBOTS, 2.0) == 0


def test_no_fewer_gpus_than_are_busy(monkeypatch):
    monkeypatch.setattr(queueing_model, "_DRAWS", 20)
    needs = queueing.run(robots=60, gpus_a_server=4)["needs"]
    assert any(row["gpus_with_one_queue"] is None for row in needs)
    for row in needs:
        if row["gpus_with_one_queue"] is not None:
            assert row["busy_gpus"] < min(row["gpus_with_one_queue"], row["gpus_in_servers"])


@pytest.mark.parametrize("batch", [1, 2])
def test_the_model_stands_beside_a_server(monkeypatch, batch):
    monkeypatch.setattr(queueing, "UTILISATIONS", (0.5,))
    monkeypatch.setattr(queueing, "_CONNECTIONS", 10)
    figures = queueing.run(measure=True, inference_ms=10.0, seconds=1.5, batch=batch)
    assert [part["arrivals"] for part in figures["parts"]] == ["poisson", "periodic"]
    for part in figures["parts"]:
        assert part["requests"] > 50
        assert part["service_ms"] >= 10.0
        assert part["measured_ms"]["p50"] >= 10.0
        assert ("formula_ms" in part) is (batch == 1)
