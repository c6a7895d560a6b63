"""UniPC (order 2, bh2, predicting clean data, flow sigmas) with every coefficient computed before
the first step.

With the x0 prediction ``m = x - sigma v``, a step is two linear updates: the corrector computes x
from the previous x, the two previous predictions and the current one; the predictor the next x from
this x and the last two predictions. Coefficients are plain numbers, so the loop needs no host
synchronisation. sigma is the noise level, alpha = 1 - sigma, lambda = log(alpha / sigma).

Sources: diffusers 0.42.1 ``UniPCMultistepScheduler`` (the oracle of the tests),
``Cosmos3OmniPipeline``'s native flow sigmas, arXiv:2302.04867.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from strands_cosmos3.checks import positive, whole_number
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.resources import shown

_KARRAS_RHO = 7.0
_MAX_TIMESTEPS = 100_000
_UNSTATED = {"prediction_type": "epsilon", "use_flow_sigmas": False}  # diffusers' defaults


@dataclass(frozen=True)
class SchedulerConfig:
    """Noise schedule of a checkpoint, from ``scheduler/scheduler_config.json``."""

    # Karras' rule between sigma_min and sigma_max instead of the flow schedule and its shift
    use_karras_sigmas: bool
    flow_shift: float = 1.0
    sigma_min: float | None = None
    sigma_max: float | None = None
    num_train_timesteps: int = 1000
    # a flow schedule of linspace(1 - 1/1000, 0, N + 1)[:-1] instead of diffusers' default
    native_flow: bool = False

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], native_flow: bool = False) -> SchedulerConfig:
        """Read a released config; raises LayoutError with every key that is not of UniPC order 2
        bh2 over flow sigmas.
        """
        wrong = []
        karras = bool(data.get("use_karras_sigmas"))
        limits = (data.get("sigma_min"), data.get("sigma_max"))
        if karras and None in limits:
            wrong.append("use_karras_sigmas is true without sigma_min and sigma_max")
        shift = data.get("flow_shift", 1.0)
        steps = data.get("num_train_timesteps", 1000)
        for name, value in {
            "flow_shift": shift,
            "num_train_timesteps": steps,
            "sigma_min": limits[0],
            "sigma_max": limits[1],
        }.items():
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                wrong.append(f"{name} is {shown(value)}, not a number above zero")
        if wrong or int(steps) > _MAX_TIMESTEPS:
            wrong = wrong or [
                f"num_train_timesteps is {steps}, at most {_MAX_TIMESTEPS} are supported"
            ]
            raise LayoutError(
                "scheduler/scheduler_config.json cannot be used: "
                f"{'; '.join(wrong)}. Download it again."
            )
        config = cls(karras, float(shift), *limits, int(steps), native_flow)
        stated = {key: value for key, value in data.items() if value is not None}
        require_computed("scheduler/scheduler_config.json", {**_UNSTATED, **stated}, config)
        return config

    def schedule(
        self,
        num_inference_steps: int,
        flow_shift: float | None = None,
        use_karras_sigmas: bool | None = None,
    ) -> Schedule:
        """Noise levels of a run.

        Args:
            flow_shift: Shift of the flow schedule; None is the checkpoint's.
            use_karras_sigmas: None follows the checkpoint, True its Karras schedule, False the
                native flow schedule.

        Raises:
            InputError: num_inference_steps or flow_shift is out of range, or the checkpoint has no
                Karras limits.
        """
        whole_number(num_inference_steps, "num_inference_steps", 1, self.num_train_timesteps)
        if use_karras_sigmas if use_karras_sigmas is not None else self.use_karras_sigmas:
            return self._karras(num_inference_steps)
        shift = self.flow_shift if flow_shift is None else flow_shift
        shift = positive(shift, "flow_shift")
        native = self.native_flow or use_karras_sigmas is False
        return _flow_schedule(num_inference_steps, shift, self.num_train_timesteps, native)

    def _karras(self, num_inference_steps: int) -> Schedule:
        if self.sigma_min is None or self.sigma_max is None:
            raise InputError(
                "use_karras_sigmas=True, but the checkpoint's scheduler has no sigma_min and "
                "sigma_max; use False, "
                "the flow schedule."
            )
        low = self.sigma_min ** (1 / _KARRAS_RHO)
        high = self.sigma_max ** (1 / _KARRAS_RHO)
        sigma = (high + np.linspace(0, 1, num_inference_steps) * (low - high)) ** _KARRAS_RHO
        return _schedule(sigma / (sigma + 1), self.num_train_timesteps)


@dataclass(frozen=True)
class Schedule:
    """Noise levels of one run before each step and after the last one (zero), rounded to float32
    as the oracle does.
    """

    timesteps: tuple[int, ...]
    sigmas: tuple[float, ...]


def _flow_schedule(
    num_inference_steps: int, shift: float, train_timesteps: int, native: bool
) -> Schedule:
    last = 1 / train_timesteps
    ends = (1 - last, 0.0) if native else (1.0, last)
    sigma = np.linspace(*ends, num_inference_steps + 1)[:-1]
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    if abs(sigma[0] - 1) < 1e-6:  # all noise has no finite lambda
        sigma[0] -= 1e-6
    return _schedule(sigma, train_timesteps)


def _schedule(sigma: np.ndarray, train_timesteps: int) -> Schedule:
    timesteps = (sigma * train_timesteps).astype(np.int64)
    rounded = np.append(sigma, 0.0).astype(np.float32)
    return Schedule(tuple(int(t) for t in timesteps), tuple(float(s) for s in rounded))


@dataclass(frozen=True)
class UniPCUpdate:
    """One linear update of UniPC: from a sample and the x0 predictions at some noise levels to
    another level.

    ``y = sample_coef x - x0_coef m0 - correction_coef (rho_old (m1 - m0) / ratio + rho_new (m -
    m0))``, where m0 is the prediction at the level where the update starts, m1 the one before it,
    and m the one at the level that it reaches (corrector only). ``ratio`` is the step in lambda
    from m0's level to m1's, divided by the update's; None at order 1.
    """

    sample_coef: float
    x0_coef: float
    correction_coef: float
    ratio: float | None
    rho_old: float
    rho_new: float

    def __call__(self, x: Array, m0: Array, m1: Array | None, m: Array | None) -> Array:
        """The sample at the next level; all arrays have its shape. Rounds in the oracle's
        order.
        """
        y = self.sample_coef * x - self.x0_coef * m0
        slope = None
        if self.ratio is not None and m1 is not None:
            slope = self.rho_old * ((m1 - m0) / self.ratio)
        if m is not None:
            new = self.rho_new * (m - m0)
            slope = new if slope is None else slope + new
        return y if slope is None else y - self.correction_coef * slope


@dataclass(frozen=True)
class StepCoefficients:
    """Updates of one step: ``corrector`` from the previous level to this one (none at first),
    ``predictor`` to the next.
    """

    sigma: float
    corrector: UniPCUpdate | None
    predictor: UniPCUpdate


@lru_cache(64)
def unipc_coefficients(schedule: Schedule, xp: Any) -> tuple[StepCoefficients, ...]:
    """Coefficients of every step: order 2 inside, order 1 at both ends, by the oracle's float32
    operations.

    ``xp`` is ``torch`` or ``numpy``, which computes them. The oracle's bits are torch's: NumPy
    rounds logarithms and solved systems otherwise. In bfloat16 the last bit of a sample can change
    the rounding of a token, and the run diverges.
    """
    sigmas = xp.asarray(schedule.sigmas, dtype=xp.float32)
    count = len(schedule.timesteps)
    orders = [min(2, count - i, i + 1) for i in range(count)]
    with np.errstate(divide="ignore"):  # the logarithm of no noise
        return tuple(
            StepCoefficients(
                schedule.sigmas[i],
                None if i == 0 else _update(xp, sigmas, i - 1, orders[i - 1], corrects=True),
                _update(xp, sigmas, i, orders[i], corrects=False),
            )
            for i in range(count)
        )


def _update(xp: Any, sigmas: Array, start: int, order: int, corrects: bool) -> UniPCUpdate:
    def level(i: int) -> Array:
        return xp.log(1 - sigmas[i]) - xp.log(sigmas[i])

    sigma_0 = sigmas[start]
    sigma_t = sigmas[start + 1]
    # infinite where no noise is left: the update then ends at m0
    h = level(start + 1) - level(start)
    growth = xp.expm1(-h)
    ratio = None if order == 1 else (level(start - 1) - level(start)) / h
    rho_old = 0.5
    rho_new = 0.5
    if ratio is not None and corrects:
        phi_2 = growth / -h - 1
        phi_3 = phi_2 / -h - 1 / 2
        system = xp.asarray([[1, 1], [ratio, 1]], dtype=xp.float32)
        rho_old, rho_new = xp.linalg.solve(
            system, xp.asarray([phi_2 / growth, phi_3 * 2 / growth])
        ).tolist()
    alpha_growth = float((1 - sigma_t) * growth)
    ratio = None if ratio is None else float(ratio)
    return UniPCUpdate(
        float(sigma_t / sigma_0), alpha_growth, alpha_growth, ratio, rho_old, rho_new
    )


@dataclass
class UniPC:
    """Sampler state of one sample, float32, which starts as noise with given values in place."""

    sample: Array
    steps: tuple[StepCoefficients, ...]
    _index: int = 0
    _before: Array | None = None
    _predictions: tuple[Array | None, Array | None] = (None, None)

    def step(self, velocity: Array) -> Array:
        """Take one step with the velocity at the current sample; return the next sample."""
        step = self.steps[self._index]
        x = self.sample
        m = x - step.sigma * velocity
        older, last = self._predictions
        if step.corrector is not None:
            assert self._before is not None
            assert last is not None
            x = step.corrector(self._before, last, older, m)
        self._before = x
        self._predictions = (last, m)
        self.sample = step.predictor(x, m, last, None)
        self._index += 1
        return self.sample
