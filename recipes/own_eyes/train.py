"""``python -m recipes.own_eyes.train``: train the eyes end to end through the policy's text tower.

A batch has single pictures, each asked some questions, and first and last pictures of episodes,
each asked about some goals. Beside the answers, a head that is thrown away afterwards reads off the
picture's tokens where the cubes are, which is where learning begins. The state is saved every two
minutes and on Ctrl-C; run the command again to resume.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from recipes.own_eyes.folder import EMBEDDING, HEAD, VISION, write_sight
from recipes.own_eyes.questions import (
    IS_CLOSED,
    MERGES,
    SUCCEEDED,
    WHICH_COLOURS,
    WHICH_IS_NEAREST,
    WORDS,
    colours_said,
    nearest_said,
    said,
)
from recipes.own_eyes.sight import Sight, Written, signed
from recipes.random_eyes import PADS
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.reasoner.reasoner import Reasoner
from strands_cosmos3.resources import load_json, write_whole
from strands_cosmos3.worlds.table.phrases import GOALS, plain

KNOWN_WORDS = 479
_GOAL_WORDS = [plain(goal) for goal in range(len(GOALS))]
_AUXILIARY = {"cubes_m": 9, "present": 3, "held": 4, "opening": 1, "achieved": 9}
_UNIT_M = 0.1
_SAVE_S = 120.0
_READ_AGAIN = 400  # steps after which new shards are looked for


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command."""

    out: Path
    pictures: Path  # folder of the shards
    steps: int = 6000  # may be changed when it resumes: the rate decays at the end
    batch: int = 40  # single pictures
    films: int = 24
    rate: float = 1e-3
    decay: float = 0.3  # last fraction of the steps, in which the rate falls to 0
    auxiliary: float = 1.0
    seed: int = 0
    limit_s: float = 1e9  # CPU seconds in all


class Shards:
    """Pictures of all shards of a folder; those with a number below ``held_out`` are for
    validation.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: set[Path] = set()
        self.posed: list[dict[str, NDArray[Any]]] = []
        self.played: list[dict[str, NDArray[Any]]] = []

    def read(self) -> int:
        """Read shards that are new; return how many pictures there are."""
        for path in sorted(self._folder.glob("*.npz")):
            if path in self._read or path.name.endswith("-0000.npz"):
                continue
            self._read.add(path)
            with np.load(path) as file:
                kind = self.posed if path.name.startswith("posed") else self.played
                kind.append({name: file[name] for name in file.files})
        return sum(len(shard["picture"]) for shard in [*self.posed, *self.played])

    def held_out(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the shards for validation, which are number 0 of each kind."""
        read: dict[str, dict[str, NDArray[Any]]] = {}
        for path in sorted(self._folder.glob("*-0000.npz")):
            with np.load(path) as file:
                read[path.name.partition("-")[0]] = {name: file[name] for name in file.files}
        return read


@dataclass(eq=False)
class Batch:
    """Pairs of pictures [B, 2, H, W, 3], questions, which picture each is about, and what the
    auxiliary head shall say.
    """

    pictures: torch.Tensor
    of: torch.Tensor
    written: list[Written]
    kinds: list[str]
    facts: dict[str, torch.Tensor]


class Batches:
    """Draws batches from shards."""

    def __init__(self, sight: Sight, options: TrainOptions):
        self.sight = sight
        self.shards = Shards(options.pictures)
        self._options = options

    def draw(self, step: int) -> Batch:
        """Return the batch of a step."""
        rng = np.random.default_rng([self._options.seed, step])
        rows: list[tuple[dict[str, NDArray[Any]], int, int | None]] = []
        kinds = [*self.shards.posed, *self.shards.posed, *self.shards.played]
        for _ in range(self._options.batch):
            shard = kinds[int(rng.integers(len(kinds)))]
            rows.append((shard, int(rng.integers(len(shard["picture"]))), None))
        for _ in range(self._options.films):
            shard = self.shards.played[int(rng.integers(len(self.shards.played)))]
            achieved = shard["achieved"].any(1)
            among = np.flatnonzero(achieved) if rng.random() < 0.6 else np.flatnonzero(~achieved)
            last = int(rng.choice(among)) if len(among) else 0
            rows.append((shard, last, int(shard["start"][last])))
        return self.made(rows, rng, augmented=True)

    def made(
        self,
        rows: list[tuple[dict[str, NDArray[Any]], int, int | None]],
        rng: np.random.Generator,
        augmented: bool,
    ) -> Batch:
        """Return the batch of pictures: (shard, index, index of the first picture of a film)."""
        pairs = np.stack(
            [
                np.stack([s["picture"][i if first is None else first], s["picture"][i]])
                for s, i, first in rows
            ]
        )
        pictures = signed(pairs)
        if augmented:
            pictures = _augmented(pictures, rng)
        of: list[int] = []
        written: list[Written] = []
        kinds: list[str] = []
        for number, (shard, i, first) in enumerate(rows):
            asked = _asked_of_picture(shard, i) if first is None else _asked(shard, i, rng)
            if augmented and first is None:
                del asked[int(rng.integers(3))]
            for kind, question, answer, film_s in asked:
                of.append(number)
                kinds.append(kind)
                written.append(self.sight.write(question, answer, film_s))
        facts = {
            "cubes_m": _stack(rows, "cubes_m").flatten(1) / _UNIT_M,
            "present": _stack(rows, "present"),
            "held": _stack(rows, "held") + 1,
            "opening": _stack(rows, "opening"),
            "achieved": torch.from_numpy(
                np.stack(
                    [
                        np.zeros(9, bool) if first is None else shard["achieved"][i]
                        for shard, i, first in rows
                    ]
                )
            ),
            "is_film": torch.tensor([first is not None for _, _, first in rows]),
        }
        return Batch(pictures, torch.tensor(of), written, kinds, facts)


def _stack(rows: list[Any], name: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([shard[name][i] for shard, i, _ in rows]))


def _asked_of_picture(
    shard: dict[str, NDArray[Any]], i: int
) -> list[tuple[str, str, str, float | None]]:
    return [
        ("colours", WHICH_COLOURS, colours_said(shard["present"][i]), None),
        ("nearest", WHICH_IS_NEAREST, nearest_said(int(shard["nearest"][i])), None),
        ("closed", IS_CLOSED, said(bool(shard["held"][i] >= 0)), None),
    ]


def _asked(
    shard: dict[str, NDArray[Any]], i: int, rng: np.random.Generator
) -> list[tuple[str, str, str, float | None]]:
    """Ask about an achieved goal, the pursued one, and others that are alike."""
    achieved = shard["achieved"][i]
    if achieved.any():
        goal = int(rng.choice(np.flatnonzero(achieved)))
        alike = (3 * rng.integers(3) + goal % 3, 3 * (goal // 3) + rng.integers(3))
        goals = {goal, int(rng.choice(alike))}
    else:
        goals = {int(shard["goal"][i])} if rng.random() < 0.7 else {int(rng.integers(9))}
    film_s = float(np.round(rng.choice([shard["time_s"][i], rng.uniform(0.2, 20.0)]) * 2) / 2)
    return [
        ("success", SUCCEEDED.format(_GOAL_WORDS[g]), said(bool(achieved[g])), max(film_s, 0.5))
        for g in sorted(goals)
    ]


def _augmented(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Change brightness and hues a little, and shift pictures by up to two pixels."""
    gain = torch.from_numpy(rng.normal(1, [0.12, 0.04, 0.04, 0.04], (len(pictures), 4)))
    scale = (gain[:, :1] * gain[:, 1:]).float()[:, None, None, None]
    pictures = (pictures + 1) * scale - 1
    down, right = rng.integers(-2, 3, 2)
    return torch.roll(pictures, (int(down), int(right)), (2, 3)).clamp(-1, 1)


class Auxiliary(nn.Module):
    """Reads what is known of a picture off its tokens; thrown away after training."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(tokens * width, sum(_AUXILIARY.values()))

    def forward(self, seen: torch.Tensor, facts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        out = self.out(self.norm(seen.float()).flatten(1)).float()
        said = dict(zip(_AUXILIARY, out.split(list(_AUXILIARY.values()), 1), strict=True))
        present = facts["present"].float()
        seen_m = present.repeat_interleave(3, 1)
        off = F.smooth_l1_loss(said["cubes_m"], facts["cubes_m"], reduction="none", beta=0.3)
        film = facts["is_film"].float()[:, None]
        goals = F.binary_cross_entropy_with_logits(
            said["achieved"], facts["achieved"].float(), reduction="none"
        )
        return (
            (off * seen_m).sum() / seen_m.sum()
            + F.binary_cross_entropy_with_logits(said["present"], present)
            + 0.5 * F.cross_entropy(said["held"], facts["held"])
            + F.smooth_l1_loss(said["opening"][:, 0], facts["opening"].float())
            + (goals * film).sum() / (9 * film.sum() + 1)
        )


def fresh_folder(out: Path, bundled: Path, seed: int) -> Path:
    """Write a checkpoint with untrained eyes."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from recipes.own_eyes.folder import read_by_policy
    from strands_cosmos3.engine.checkpoint import Checkpoint

    torch.manual_seed(seed)
    weights = Checkpoint.open(bundled).weights
    config = load_json(bundled / "transformer/config.json")
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    encoder = Qwen3VLVisionConfig(**VISION, out_hidden_size=width)
    visual = Qwen3VLVisionModel(encoder)
    for name, parameter in visual.named_parameters():
        _begin(name, parameter.data, encoder.depth)
    new = len(MERGES) + len(PADS) + len(WORDS)
    text: dict[str, torch.Tensor] = {
        EMBEDDING: torch.randn(new, width),
        HEAD: torch.randn(KNOWN_WORDS + new, width) * 0.02,
    }
    for key, shape in weights.shapes.items():
        if key != HEAD and not read_by_policy(key, layers):
            text[key] = torch.ones(shape)
            _begin(key, text[key], layers)
    return write_sight(bundled, out, visual.state_dict(), text, "untrained eyes")


def _begin(name: str, parameter: torch.Tensor, depth: int) -> None:
    """Scale a matrix by its fan-in; what ends a branch begins smaller."""
    if parameter.ndim == 1:
        parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return
    scale = 0.3 if "pos_embed" in name else math.prod(parameter.shape[1:]) ** -0.5
    if any(part in name for part in ("attn.proj", "mlp.linear_fc2", "to_out", "down_proj")):
        scale /= (2 * depth) ** 0.5
    parameter.normal_(0, scale)


class Training:
    """A training that can be resumed."""

    def __init__(self, options: TrainOptions):
        self.options = options
        self.bundled = embedded_checkpoint("droid", "panda", "pick", "table")
        folder = options.out / "untrained"
        if not folder.exists():
            fresh_folder(folder, self.bundled, options.seed)
        self.sight = Sight(Reasoner.from_pretrained(folder), KNOWN_WORDS)
        self.auxiliary = Auxiliary(20, self.sight.head.shape[1])
        self.batches = Batches(self.sight, options)
        matrices, others = [], []
        for name, parameter in [*self.sight.named_parameters(), *self.auxiliary.named_parameters()]:
            is_matrix = parameter.ndim > 1 and "pos_embed" not in name and name != "words"
            (matrices if is_matrix else others).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.05},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98))
        self.step = 0
        self.cpu_s = 0.0
        self._state = options.out / "state.pt"
        if self._state.exists():
            state = torch.load(self._state)
            self.sight.load_state_dict(state["sight"])
            self.auxiliary.load_state_dict(state["auxiliary"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.cpu_s = state["step"], state["cpu_s"]

    def save(self, cpu_s: float) -> None:
        """Save the state."""
        state = {
            "sight": self.sight.state_dict(),
            "auxiliary": self.auxiliary.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "cpu_s": cpu_s,
        }
        write_whole(self._state, lambda unfinished: torch.save(state, unfinished))

    def rate(self) -> float:
        """Return the present learning rate."""
        left = (self.options.steps - self.step) / (self.options.decay * self.options.steps)
        return self.options.rate * min(1.0, (self.step + 1) / 200, max(left, 0.0))

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a batch's loss, and parts of it."""
        with torch.autocast("cpu", torch.bfloat16):
            seen = self.sight.see(batch.pictures)
            logits, targets = self._answers(seen, batch)
        answers = F.cross_entropy(logits.float(), targets)
        auxiliary = self.auxiliary(seen, batch.facts)
        parts = {"answers": answers.item(), "auxiliary": auxiliary.item()}
        return answers + self.options.auxiliary * auxiliary, parts

    def _answers(self, seen: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and targets of all answers; the longer questions about films go alone."""
        film = np.array([kind == "success" for kind in batch.kinds])
        parts = []
        for among in (np.flatnonzero(~film), np.flatnonzero(film)):
            if len(among):
                written = [batch.written[i] for i in among]
                parts.append(self.sight(seen, batch.of[torch.from_numpy(among)], written))
        logits, targets = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(targets)

    def run(self) -> None:
        """Train to the last step."""
        before = self.cpu_s - _cpu_s()
        saved = time.monotonic()
        parts: list[dict[str, float]] = []
        try:
            while self.step < self.options.steps and before + _cpu_s() < self.options.limit_s:
                if self.step % _READ_AGAIN == 0 or not self.batches.shards.posed:
                    print(f"{self.batches.shards.read()} pictures", flush=True)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate()
                loss, figures = self.loss(self.batches.draw(self.step))
                self.optimizer.zero_grad()
                loss.backward()
                parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
                nn.utils.clip_grad_norm_(parameters, 1.0)
                self.optimizer.step()
                self.step += 1
                parts.append(figures)
                if self.step % 50 == 0:
                    mean = {k: np.mean([each[k] for each in parts]) for k in parts[0]}
                    text = ", ".join(f"{name} {value:.4f}" for name, value in mean.items())
                    print(f"{self.step}: {text}, {before + _cpu_s():.0f} CPU s", flush=True)
                    parts.clear()
                if self.step % 400 == 0:
                    print(self.judged(), flush=True)
                if time.monotonic() - saved > _SAVE_S:
                    self.save(before + _cpu_s())
                    saved = time.monotonic()
        finally:
            self.save(before + _cpu_s())
        self.export()

    def export(self) -> Path:
        """Write the checkpoint as it is now."""
        folder = self.options.out / f"checkpoint-{self.step}"
        if not folder.exists():
            label = f"trained by strands_cosmos3, recipes/own_eyes, {self.step} steps"
            sight = self.sight
            write_sight(self.bundled, folder, sight.vision_weights(), sight.text_weights(), label)
        return folder

    @torch.no_grad()
    def judged(self, pictures: int = 384) -> str:
        """Return how many answers are wholly right on the shards for validation."""
        right: dict[str, list[bool]] = {}
        rng = np.random.default_rng(0)
        for kind, shard in self.batches.shards.held_out().items():
            among = rng.permutation(len(shard["picture"]))[:pictures]
            for part in np.array_split(among, max(1, len(among) // 64)):
                film = kind == "played"
                rows = [(shard, int(i), int(shard["start"][i]) if film else None) for i in part]
                batch = self.batches.made(rows, rng, augmented=False)
                logits, targets = self.sight(
                    self.sight.see(batch.pictures), batch.of, batch.written
                )
                hits = (logits.argmax(1) == targets).tolist()
                at = 0
                for name, written in zip(batch.kinds, batch.written, strict=True):
                    count = int((written.targets >= 0).sum())
                    right.setdefault(name, []).append(all(hits[at : at + count]))
                    at += count
        return "held out: " + ", ".join(
            f"{name} {100 * np.mean(hits):.1f} % of {len(hits)}" for name, hits in right.items()
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(options: TrainOptions) -> None:
    """Train."""
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    Training(options).run()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(TrainOptions)))
