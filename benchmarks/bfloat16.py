"""float32 against bfloat16 on this CPU: times of the engine, or success in a closed loop.

Times are CPU times of the benchmarks' random mid-size model. Whether actions are still good is
measured on the bundled policy, the only trained one there is, with equal scenes, instructions and
noise for both dtypes.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

import report
from engine import SETTINGS, cpu_seconds, random_request
from recipes.random_checkpoint import MID_SIZE, FactorySizes, write_checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.preflight import LEAST_GAIN, bfloat16_gain
from strands_cosmos3.worlds.table.grammar import COLOURS, TEMPLATES, Verb

DTYPES = ("float32", "bfloat16")
MARGIN = 0.10
_VERBS = (Verb.REACH, Verb.PICK)  # that the bundled policy knows
_CONFIDENCE = 0.95


def measure(tier: str, steps: int, repeats: int) -> dict[str, Any]:
    """:func:`compare` on one thread, or ``skipped`` with the reason where this CPU does not
    multiply bfloat16 faster.
    """
    torch.set_num_threads(1)
    report.progress("matrix products")
    gain = bfloat16_gain(MID_SIZE.hidden, MID_SIZE.intermediate, 1)
    if gain < LEAST_GAIN:
        reason = (
            f"bfloat16 matrix products take 1/{gain:.2f} of float32's time: a CPU without AMX or "
            "AVX512-BF16?"
        )
        return {"skipped": reason}
    return {
        "matrix_product_ratio": gain,
        "threads": 1,
        **compare(tier, MID_SIZE, steps, repeats),
    }


def compare(tier: str, sizes: FactorySizes, steps: int, repeats: int) -> dict[str, Any]:
    """Run both dtypes alternately; return medians, ratios and the largest difference of the
    actions.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as loaded:
        write_checkpoint(folder, sizes=sizes)
        engines = {
            name: loaded.enter_context(
                Cosmos3Engine.from_pretrained(folder, dtype=name, domains=(8,))
            )
            for name in DTYPES
        }
        request = random_request(SETTINGS[tier], engines["float32"], steps)
        # warms both up
        single, half = (engine.step(request)["action"] for engine in engines.values())
        seconds: dict[str, list[float]] = {name: [] for name in DTYPES}
        for i in range(repeats):
            for name in DTYPES if i % 2 == 0 else DTYPES[::-1]:
                report.progress(f"run {i + 1} of {repeats}: {name}")
                seconds[name].append(cpu_seconds(lambda name=name: engines[name].step(request))[0])
    each = [one / other for one, other in zip(*seconds.values(), strict=True)]
    return {
        "setting": SETTINGS[tier].name,
        "steps": steps,
        "cpu_s": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(each),
        "ratio_each": each,
        "largest_action_difference": float((single - half).abs().max()),
        "actions_rms": float(single.square().mean().sqrt()),
        "model": vars(sizes),
    }


def closed_loop(episodes: int, seed: int) -> dict[str, Any]:
    """Roll the bundled policy out in both dtypes; compare their success rates over the same
    episodes.

    bfloat16 is not inferior if it loses fewer than :data:`MARGIN` of the episodes that float32
    wins, by the exact one-sided 95 % bound of Clopper and Pearson. That takes 29 episodes at least,
    without a loss; what bfloat16 alone wins does not count.
    """
    from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
    from strands_cosmos3.worlds.arms import Robot

    robot = Robot("panda")
    won: dict[str, list[bool]] = {name: [] for name in DTYPES}
    with ExitStack() as loaded:
        policies = {
            name: loaded.enter_context(Cosmos3Policy(robot="panda", device="cpu", dtype=name))
            for name in DTYPES
        }
        for i in range(seed, seed + episodes):
            verb = _VERBS[i % len(_VERBS)]
            instruction = TEMPLATES[verb].format(a=COLOURS[i // 2 % 3])
            for name, policy in policies.items():
                report.progress(f"{verb}, seed {i}, {name}")
                rollout = robot.run_policy(
                    instruction=instruction, policy=policy, task=str(verb), seed=i, duration=20.0
                )
                won[name].append(bool(rollout.success))
    single, half = (np.array(won[name], dtype=float) for name in DTYPES)
    difference = half - single
    lost = int((difference < 0).sum())
    lower = -most_lost(lost, episodes)
    return {
        "episodes": episodes,
        "seed": seed,
        "successes": {name: sum(wins) for name, wins in won.items()},
        "only_float32": lost,
        "only_bfloat16": int((difference > 0).sum()),
        "difference": float(difference.mean()),
        "lower_bound": lower,
        "margin": MARGIN,
        "not_inferior": lower > -MARGIN,
    }


def most_lost(lost: int, episodes: int) -> float:
    """Upper bound, with 95 % confidence, of the share of episodes that are lost, if so many of
    them were.
    """
    return (
        1.0 if lost >= episodes else float(stats.beta.ppf(_CONFIDENCE, lost + 1, episodes - lost))
    )


def run(
    rollouts: bool = False,
    tier: Literal["256", "480"] = "256",
    steps: int = 4,
    repeats: int = 3,
    episodes: int = 100,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare the times of both dtypes, or the successes of the bundled policy in both.

    Args:
        rollouts: Compare successes.
        tier: A small composite, or DROID's (times).
        steps: Denoising steps (times).
        repeats: Runs of each side, of which the medians are reported (times).
        episodes: Episodes of each side (successes).
        seed: First seed (successes).
    """
    return closed_loop(episodes, seed) if rollouts else measure(tier, steps, repeats)


if __name__ == "__main__":
    report.run(run)
