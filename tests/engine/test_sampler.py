"""Schedules and UniPC against diffusers' scheduler class."""

import json

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from strands_cosmos3.engine.sampler import SchedulerConfig, UniPC, unipc_coefficients
from strands_cosmos3.errors import InputError, LayoutError

KARRAS = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "sigma_min": 0.147,
    "sigma_max": 200.0,
    "flow_shift": 1.0,
}
FLOW = {**KARRAS, "use_karras_sigmas": False}


def test_timesteps_of_the_contract():
    config = SchedulerConfig.from_dict(KARRAS)
    assert config.schedule(4, 5.0, False).timesteps == (999, 937, 833, 624)
    assert config.schedule(2, 5.0, False).timesteps == (999, 833)
    assert config.schedule(4).timesteps == (995, 973, 798, 128)


def test_shift_is_without_effect_on_karras():
    config = SchedulerConfig.from_dict(KARRAS)
    assert config.schedule(4, 5.0) == config.schedule(4, 1.0) == config.schedule(4, None, True)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 30])
@pytest.mark.parametrize(
    ("data", "native", "shift"),
    [(KARRAS, False, 1.0), (FLOW, True, 5.0), (FLOW, False, 10.0), (FLOW, False, 1.0)],
)
def test_every_step_as_the_scheduler_class_rounds_it(data, native, shift, steps):
    stock = UniPCMultistepScheduler(**{**data, "flow_shift": shift})
    if native:
        import numpy as np

        stock.set_timesteps(sigmas=np.linspace(1 - 1 / 1000, 0.0, steps + 1)[:-1])
    else:
        stock.set_timesteps(steps)
    schedule = SchedulerConfig.from_dict(data, native).schedule(steps, shift)
    assert schedule.timesteps == tuple(stock.timesteps.tolist())
    assert schedule.sigmas == tuple(stock.sigmas.tolist())
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 3, 7, generator=generator)
    ours = UniPC(sample[0], unipc_coefficients(schedule, torch))
    for t in stock.timesteps:
        velocity = torch.randn(1, 3, 7, generator=generator)
        sample = stock.step(velocity, t, sample, return_dict=False)[0]
        assert torch.equal(ours.step(velocity[0]), sample[0])


def test_a_checkpoints_own_shift_and_number_of_levels():
    data = {**FLOW, "flow_shift": 3.0, "num_train_timesteps": 500}
    stock = UniPCMultistepScheduler(**data)
    stock.set_timesteps(4)
    schedule = SchedulerConfig.from_dict(data).schedule(4)
    assert (schedule.timesteps, schedule.sigmas) == (
        tuple(stock.timesteps.tolist()),
        tuple(stock.sigmas.tolist()),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prediction_type": "epsilon"}, "prediction_type"),
        ({"solver_order": 3}, "solver_order"),
        ({"solver_type": "bh1"}, "solver_type"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas"),
        ({"sigma_min": None}, "sigma_min"),
        ({"disable_corrector": [0]}, "disable_corrector"),
    ],
)
def test_other_solvers_are_refused(change, named):
    with pytest.raises(LayoutError, match=named):
        SchedulerConfig.from_dict({**KARRAS, **change})


@pytest.mark.parametrize(
    ("steps", "shift"), [(0, 5.0), (-1, 5.0), (1001, 5.0), (4, 0.0), (4, float("nan"))]
)
def test_impossible_schedules(steps, shift):
    with pytest.raises(InputError):
        SchedulerConfig.from_dict(FLOW).schedule(steps, shift)


def test_karras_needs_its_limits():
    with pytest.raises(InputError, match="sigma_min"):
        SchedulerConfig.from_dict({**FLOW, "sigma_min": None}).schedule(4, None, True)


def test_unknown_keys_are_ignored():
    assert SchedulerConfig.from_dict(
        json.loads(json.dumps({**KARRAS, "_diffusers_version": "x", "novelty": 1}))
    )
