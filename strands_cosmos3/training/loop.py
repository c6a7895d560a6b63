"""A resumable training loop: an interrupted run ends with bit-identical weights.

What a step draws depends only on (seed, step); the state is the weights, their average, the
optimiser's moments and the step. It ends with its SHA-256, and the state before it is kept: if one
is damaged, the other is resumed, with a warning.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from strands_cosmos3.errors import ConfigError, MissingDependencyError, TrainingError
from strands_cosmos3.extras import pip_command
from strands_cosmos3.resources import storing, write_text, write_whole
from strands_cosmos3.training.state import PREVIOUS, STATE, has_state, read_state, write_state

Metrics = Mapping[str, float]
LossMetrics = Mapping[str, float | torch.Tensor]
"""What a loss reports: numbers, or tensors, for which a GPU need not be waited for before the
gradient is computed.
"""
CURVE = "curve.jsonl"
Optimizers = Callable[[Mapping[str, nn.Parameter], "TrainLoopConfig"], list[torch.optim.Optimizer]]
"""Makes the optimisers of parameters by name; their learning rates are those after the warm-up."""


@dataclass(frozen=True)
class TrainLoopConfig:
    """Options of the optimisation."""

    steps: int
    lr: float = 2e-3  # after the warm-up
    warmup: int = 100  # steps in which the rate rises linearly
    # fraction of the steps, at the end, in which the rate decays to zero along a cosine
    decay: float = 0.4
    weight_decay: float = 0.01  # of matrices; vectors have none
    clip: float = 1.0  # largest norm of the gradient
    ema: float = 0.999  # decay of the moving average of the weights
    # draws whose gradients a step averages: more windows per step in the same memory
    accumulate: int = 1
    save_s: float = 120.0  # seconds between saved states
    log_every: int = 20  # steps between points of the curve
    tensorboard: bool = False  # whether the curve is written for TensorBoard, too

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, as a fraction of the highest."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        fall_from = self.steps * (1 - self.decay)
        if step < fall_from:
            return up
        return (
            up
            * 0.5
            * (1 + math.cos(math.pi * (step - fall_from) / max(1.0, self.steps - fall_from)))
        )


def adamw(
    trained: Mapping[str, nn.Parameter], config: TrainLoopConfig
) -> list[torch.optim.Optimizer]:
    """Return AdamW, with weight decay for matrices only."""
    matrices = [p for p in trained.values() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), eps=1e-8)]


class Loop:
    """Optimise those parameters of a model that require a gradient.

    Args:
        loss: Number of a draw -> loss, and metrics for the curve. A step makes ``accumulate``
            draws.
        folder: Folder of the state and the curve; a state that it holds is resumed.
        optimizers: Makes the optimisers; the default is AdamW for all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[int], tuple[torch.Tensor, LossMetrics]],
        config: TrainLoopConfig,
        folder: Path,
        optimizers: Optimizers = adamw,
    ):
        self.model = model
        self.config = config
        self.folder = folder
        self.step = 0  # steps done
        self._consistent = True
        self._loss = loss
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ConfigError("nothing to train: every parameter is frozen.")
        self.optimizers = optimizers(self._trained, config)
        self._optimizers_of = {
            p: o for o in self.optimizers for group in o.param_groups for p in group["params"]
        }
        groups = [group for o in self.optimizers for group in o.param_groups]
        self._rates = [(group, group["lr"]) for group in groups]  # and that after the warm-up
        # moving averages
        self.ema = {name: p.detach().clone() for name, p in self._trained.items()}
        self._writes = not dist.is_initialized() or dist.get_rank() == 0
        folder.mkdir(parents=True, exist_ok=True)
        if has_state(folder):
            self.restore(*read_state(folder))
        if self._writes:
            drop_from(folder / CURVE, self.step + 1)

    def run(
        self, until: int | None = None, on_step: Callable[[int, Metrics], None] = lambda *_: None
    ) -> None:
        """Train to the end, or to the step ``until``; ``on_step`` is called with (steps done,
        metrics).

        Raises:
            TrainingError: The loss or its gradient is not finite; the last saved state stays.
        """
        last = min(self.config.steps, self.config.steps if until is None else until)
        saved = time.monotonic()
        since: list[Metrics] = []
        try:
            while self.step < last:
                since.append(metrics := self._train_step())
                if self.step % self.config.log_every == 0 or self.step == last:
                    self._log(mean_metrics(since))
                    since.clear()
                on_step(self.step, metrics)
                if self._agreed(time.monotonic() - saved > self.config.save_s):
                    self.save()
                    saved = time.monotonic()
        except TrainingError:
            self._consistent = False  # weights may have diverged before the loss showed it
            raise
        finally:
            if self._consistent:  # Ctrl-C may have come in the middle of a step
                self.save()

    def skip(self, until: int, on_step: Callable[[int, Metrics], None]) -> None:
        """Go on to a step without those before it: there is nothing to learn in them, and the
        moments of the optimiser would move the weights all the same. ``on_step`` is called once.
        """
        self.step = until
        on_step(until, {})
        self.save()

    def _agreed(self, decision: bool) -> bool:
        """Return rank 0's decision: what every process must do together, none may begin by its
        own clock.
        """
        if not dist.is_initialized():
            return decision
        of_rank_0 = torch.tensor(int(decision), device=next(iter(self._trained.values())).device)
        dist.broadcast(of_rank_0, 0)
        return bool(of_rank_0.item())

    def _train_step(self) -> Metrics:
        rate = self.config.rate(self.step)
        for group, highest in self._rates:
            group["lr"] = highest * rate
        self.model.zero_grad(set_to_none=True)
        draws = self.config.accumulate
        losses: list[torch.Tensor] = []
        seen: list[LossMetrics] = []
        for i in range(draws):
            loss, metrics = self._loss(self.step * draws + i)
            (loss / draws).backward()
            losses.append(loss.detach())
            seen.append(metrics)
        norm = nn.utils.clip_grad_norm_(list(self._trained.values()), self.config.clip)
        for loss in losses:
            self._require_finite("loss", loss)
        self._require_finite("gradient's norm", norm)
        found = mean_metrics(seen)
        self._consistent = False
        for optimizer in self.optimizers:
            optimizer.step()
        keep = min(self.config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            weights = [p.detach() for p in self._trained.values()]
            torch._foreach_lerp_(list(self.ema.values()), weights, 1 - keep)  # pyright: ignore
        self.step += 1
        self._consistent = True
        return found

    def _require_finite(self, name: str, number: torch.Tensor) -> None:
        if not math.isfinite(value := full_tensor(number).item()):
            raise TrainingError(
                f"the {name} is {value} at step {self.step} in {self.folder}; resuming would draw "
                "the same windows again. "
                "Give another --out with another --seed; post-training can resume from the last "
                "state with a lower --lr."
            )

    def _log(self, metrics: Metrics) -> None:
        if self._writes:
            rounded = {name: round(value, 6) for name, value in metrics.items()}
            self._append(CURVE, {"time": round(time.time(), 1), **rounded})
            self._show(metrics)

    def record(self, name: str, figures: Metrics) -> None:
        """Write figures that are measured now and then to ``<name>.jsonl``, in place of this
        step's, and to TensorBoard.
        """
        if self._writes:
            drop_from(self.folder / f"{name}.jsonl", self.step)
            self._append(f"{name}.jsonl", figures)
            self._show({f"{name}/{key}": value for key, value in figures.items()})

    def lacks(self, name: str) -> bool:
        """Whether ``<name>.jsonl`` has no figures of this step: measuring them was interrupted."""
        figures = read_curve(self.folder / f"{name}.jsonl")
        return all(line["step"] != self.step for line in figures)

    def _append(self, name: str, figures: Metrics) -> None:
        with storing(self.folder / name), (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **figures}) + "\n")

    def _show(self, figures: Metrics) -> None:
        if self.config.tensorboard:
            for name, value in figures.items():
                self._board.add_scalar(name, value, self.step)
            self._board.flush()

    @cached_property
    def _board(self) -> Any:
        """TensorBoard's event file; points after the step that is resumed are dropped."""
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore

        return SummaryWriter(str(self.folder), purge_step=self.step)

    def save(self) -> None:
        """Write the state, unsharded, so that any number of processes can resume it. Every
        process must call this.
        """
        state = self.state()
        if self._writes:
            write_whole(
                self.folder / STATE, partial(write_state, state), previous=self.folder / PREVIOUS
            )

    def state(self) -> dict[str, Any]:
        """Return step, weights, their averages and the optimisers' moments, unsharded. Every
        process must call this.
        """
        return {
            "step": self.step,
            "model": {name: full_tensor(p.detach()) for name, p in self._trained.items()},
            "ema": {name: full_tensor(t) for name, t in self.ema.items()},
            "moments": {
                name: {
                    key: full_tensor(t)
                    for key, t in self._optimizers_of[p].state.get(p, {}).items()
                }
                for name, p in self._trained.items()
            },
        }

    def restore(self, state: Mapping[str, Any], source: Path) -> None:
        """Go on from what :meth:`state` returned; ``source`` is where it is from, for a message.

        Raises:
            ConfigError: It is the state of other weights.
        """
        shapes = {name: tuple(t.shape) for name, t in state["model"].items()}
        if shapes != {name: tuple(p.shape) for name, p in self._trained.items()}:
            raise ConfigError(
                f"{source} is the state of another model, or of other trained weights; choose "
                "another folder."
            )
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(shard_like(state["model"][name], p))
                self.ema[name].copy_(shard_like(state["ema"][name], p))
                if moments := state["moments"][name]:
                    self._optimizers_of[p].state[p] = {
                        key: t.clone() if key == "step" else shard_like(t, p).clone()
                        for key, t in moments.items()
                    }
        self.step = int(state["step"])

    def average(self) -> dict[str, torch.Tensor]:
        """Return the averaged weights, unsharded. Every process must call this."""
        return {name: full_tensor(tensor).cpu() for name, tensor in self.ema.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have its averaged weights in a block; afterwards it has its own, to the
        bit.
        """
        own = {name: p.detach().clone() for name, p in self._trained.items()}
        self.adopt_average()
        try:
            yield
        finally:
            self._set(own)

    def adopt_average(self) -> None:
        """Replace the weights of the model by their average."""
        self._set(self.ema)

    @torch.no_grad()
    def _set(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, p in self._trained.items():
            p.copy_(weights[name])


def drop_from(path: Path, step: int) -> None:
    """Drop the lines of a curve from a step on: a resumed state is older than they are."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        earlier = [
            line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step
        ]
        if len(earlier) < len(lines):
            write_text(path, "".join(earlier))


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return the points of a curve; none without a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def mean_metrics(seen: Sequence[LossMetrics]) -> Metrics:
    """Return the mean of each metric over the draws or steps that have it: one without inverse
    dynamics has no error of it.
    """
    names = dict.fromkeys(name for metrics in seen for name in metrics)
    return {
        name: fmean(float(metrics[name]) for metrics in seen if name in metrics) for name in names
    }


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor. Every process must call it, because a sharded tensor is
    gathered.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor on the device of another, sharded as that one is."""
    tensor = tensor.to(like.device, like.dtype)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements)
    return tensor


def require_tensorboard() -> None:
    """Raise MissingDependencyError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise MissingDependencyError(
            f"TensorBoard's curves need tensorboard: {pip_command(['train'])}, or train "
            "with --no-tensorboard."
        )
