"""Reinforcement learning on more workers, on a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("ray")

from rl_scaling import Times, main, simulate

TIMES = Times(weights_gb=0.0)


def test_one_worker_and_the_trainer_take_turns_without_staleness():
    shares = simulate(TIMES, workers=1, staleness=0, episodes=8)
    assert shares.trainer_idle + shares.workers_idle == pytest.approx(1)
    assert shares.staleness == 0


def test_weights_that_are_a_version_old_hide_the_shorter_of_both():
    shares = simulate(TIMES, workers=1, staleness=1, episodes=8)
    assert shares.iteration_s < 1.2 * max(TIMES.steps * TIMES.step_s, 8 * 6.5 * TIMES.group_s)
    assert 0.9 < shares.staleness < 1
    fast = simulate(replace(TIMES, step_s=1e-6), workers=64, staleness=1, episodes=640)
    assert fast.trainer_idle > 0.99
    assert fast.workers_idle < 0.25


def test_workers_wait_for_large_weights_one_after_another():
    small, large = (
        simulate(replace(TIMES, step_s=0.05, weights_gb=gb), 64, 0, 64).iteration_s
        for gb in (0.0, 1.0)
    )
    assert large - small > 55


def test_the_table_has_all_numbers_of_workers(capsys):
    main(["simulate", "--step-s", "0.05"])
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [
        workers for workers in (1, 2, 4, 8, 16, 32, 64) for _ in range(2)
    ]
