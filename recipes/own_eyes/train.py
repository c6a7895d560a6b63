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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from recipes.own_eyes.folder import EMBEDDING, HEAD, POLICY_WORDS, VISION, write_sight
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

_GOAL_WORDS = [plain(goal) for goal in range(len(GOALS))]
_AUXILIARY = {"cubes_m": 9, "present": 3, "held": 4, "opening": 1, "achieved": 9}
_UNIT_M = 0.1
_SAVE_S = 120.0
_PLAYED = 1 / 3  # of the single pictures
_DONE = 0.6  # of the films end where a goal is achieved
_JUST_DONE = 0.6  # of these end where it is achieved at last, as an episode does
_NEARLY = 4  # pictures before that, which no film without success ends with
_HARDEST = 0.6  # of these are asked about the last of the achieved goals


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command."""

    out: Path
    pictures: Path  # folder of the shards
    steps: int = 6000  # may be changed when it resumes: the rate decays at the end
    batch: int = 40  # single pictures
    films: int = 24
    device: str = "cpu"
    workers: int = 0  # processes that draw batches; 0: the training's own
    rate: float = 1e-3
    decay: float = 0.3  # last fraction of the steps, in which the rate falls to 0
    auxiliary: float = 1.0
    seed: int = 0
    limit_s: float = 1e9  # CPU seconds in all


class Shards:
    """Pictures of all shards of a folder, in memory; shard 0 of each kind is for validation."""

    def __init__(self, folder: Path):
        self.posed = self._read(folder, "posed-*")
        self.played = self._read(folder, "played-*")
        self.held_out = {
            kind: self._read(folder, f"{kind}-*", held_out=True) for kind in ("posed", "played")
        }

    @staticmethod
    def _read(folder: Path, pattern: str, held_out: bool = False) -> dict[str, NDArray[Any]]:
        """Return the shards' arrays, joined; ``start`` then counts from the first of all."""
        files = sorted(folder.glob(f"{pattern}.npz"))
        parts: list[dict[str, NDArray[Any]]] = []
        before = 0
        for path in files:
            if path.name.endswith("-0000.npz") == held_out:
                with np.load(path) as file:
                    part = {name: file[name] for name in file.files}
                if "start" in part:
                    part["start"] = part["start"] + before
                before += len(part["picture"])
                parts.append(part)
        if not parts:
            raise SystemExit(f"{folder} has no {pattern} that fits; make pictures first.")
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(eq=False)
class Batch:
    """Which pictures are looked at, which questions are asked of which, and what the auxiliary
    head shall say.

    Args:
        pairs: [B, 2] first and last picture, by number; the played follow the posed.
        gains: [B, 3] that colours are multiplied by. shift: Pixels down and to the right.
        of: [Q] the picture of each question. kinds: Their names.
    """

    pairs: torch.Tensor
    gains: torch.Tensor
    shift: tuple[int, int]
    of: torch.Tensor
    written: list[Written]
    kinds: list[str]
    facts: dict[str, torch.Tensor]


class Batches(Dataset[Batch]):
    """Draws batches of pictures; which one a step gets depends on nothing else."""

    def __init__(
        self, sight: Sight, posed: dict[str, NDArray[Any]], played: dict[str, NDArray[Any]]
    ):
        self.sight = sight
        self.posed = posed
        self.played = played
        achieved, start = played["achieved"], played["start"]
        goes_on = np.append(False, start[1:] == start[:-1])[:, None]
        first = achieved & ~(np.roll(achieved, 1, axis=0) & goes_on)
        self._done = [np.flatnonzero(done) for done in achieved.T if done.any()]
        self._just_done = [np.flatnonzero(done) for done in first.T if done.any()]
        undone = ~achieved.any(1)
        for before in range(1, _NEARLY + 1):  # what looks like success is none yet
            undone &= ~(np.roll(first.any(1), -before) & (start == np.roll(start, -before)))
        self._undone = np.flatnonzero(undone)
        self.options: TrainOptions | None = None

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step; questions about films stand behind the others."""
        options = self.options
        assert options is not None
        rng = np.random.default_rng([options.seed, step])
        rows: list[tuple[int, bool, int | None]] = []
        for _ in range(options.batch):
            played = bool(rng.random() < _PLAYED)
            among = self.played if played else self.posed
            rows.append((int(rng.integers(len(among["picture"]))), played, None))
        for _ in range(options.films):
            among = self._undone
            if self._done and rng.random() < _DONE:  # all goals equally often: the bin is rare
                ends = self._just_done if rng.random() < _JUST_DONE else self._done
                among = ends[int(rng.integers(len(ends)))]
            last = int(rng.choice(among))
            rows.append((last, True, int(self.played["start"][last])))
        return _together(self.made(rows, rng, augmented=True))

    def made(
        self,
        rows: list[tuple[int, bool, int | None]],
        rng: np.random.Generator,
        augmented: bool,
    ) -> Batch:
        """Return a batch: (number, whether it was played, number of a film's first picture)."""
        of: list[int] = []
        written: list[Written] = []
        kinds: list[str] = []
        for place, (i, played, first) in enumerate(rows):
            kind = self.played if played else self.posed
            asked = _asked_of_picture(kind, i) if first is None else _asked(kind, i, rng)
            if augmented and first is None:
                del asked[int(rng.integers(3))]
            for name, question, answer, film_s in asked:
                of.append(place)
                kinds.append(name)
                written.append(self.sight.write(question, answer, film_s))
        facts = {name: self._known(rows, name) for name in ("present", "held", "opening")}
        facts["held"] = facts["held"] + 1
        facts["cubes_m"] = self._known(rows, "cubes_m").flatten(1) / _UNIT_M
        nothing = np.zeros(len(GOALS), bool)
        done = [nothing if f is None else self.played["achieved"][i] for i, _, f in rows]
        facts["achieved"] = torch.from_numpy(np.stack(done))
        facts["is_film"] = torch.tensor([first is not None for _, _, first in rows])
        behind = [len(self.posed["picture"]) * played for _, played, _ in rows]
        pairs = [
            (k + (i if first is None else first), k + i)
            for k, (i, _, first) in zip(behind, rows, strict=True)
        ]
        gains, shift = np.ones((len(rows), 3)), (0, 0)
        if augmented:
            gains = rng.normal(1, 0.12, (len(rows), 1)) * rng.normal(1, 0.04, (len(rows), 3))
            down, right = rng.integers(-2, 3, 2)
            shift = (int(down), int(right))
        return Batch(
            torch.tensor(pairs),
            torch.from_numpy(gains).float(),
            shift,
            torch.tensor(of),
            written,
            kinds,
            facts,
        )

    def _known(self, rows: list[tuple[int, bool, int | None]], name: str) -> torch.Tensor:
        kinds = (self.posed, self.played)
        return torch.from_numpy(np.stack([kinds[played][name][i] for i, played, _ in rows]))


def _together(batch: Batch) -> Batch:
    """Stack a batch's questions; the longer ones about films go through the tower alone."""
    film = [kind == "success" for kind in batch.kinds]
    among = [[i for i, f in enumerate(film) if f is kind] for kind in (False, True)]
    order = [i for part in among for i in part]
    stacked = [Written.stacked([batch.written[i] for i in part]) for part in among if part]
    kinds = [batch.kinds[i] for i in order]
    return replace(batch, of=batch.of[order], written=stacked, kinds=kinds)


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
        done = np.flatnonzero(achieved)  # a cube that is picked up is reached, too
        goal = int(done[-1] if rng.random() < _HARDEST else rng.choice(done))
        alike = (3 * rng.integers(3) + goal % 3, 3 * (goal // 3) + rng.integers(3))
        goals = {goal, int(rng.choice(alike))}
    else:
        goals = {int(shard["goal"][i])} if rng.random() < 0.7 else {int(rng.integers(9))}
    film_s = float(np.round(rng.choice([shard["time_s"][i], rng.uniform(0.2, 20.0)]) * 2) / 2)
    return [
        ("success", SUCCEEDED.format(_GOAL_WORDS[g]), said(bool(achieved[g])), max(film_s, 0.5))
        for g in sorted(goals)
    ]


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
        HEAD: torch.randn(POLICY_WORDS + new, width) * 0.02,
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
        reasoner = Reasoner.from_pretrained(folder, device=options.device, dtype=torch.float32)
        self.sight = Sight(reasoner, POLICY_WORDS)
        self.device = self.sight.device
        self.auxiliary = Auxiliary(20, self.sight.head.shape[1]).to(self.device)
        self._shards = Shards(options.pictures)
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
            state = torch.load(self._state, map_location=self.device)
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

    def loss(self, batch: Batch, pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a batch's loss, given all pictures [N, H, W, 3] as bytes."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cpu"):
            logits, targets, seen = self._answers(batch, pictures)
        facts = {name: fact.to(self.device) for name, fact in batch.facts.items()}
        return {
            "answers": F.cross_entropy(logits.float(), targets),
            "auxiliary": self.auxiliary(seen, facts),
        }

    def _answers(
        self, batch: Batch, pictures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits and targets of all answers, and the pictures' tokens."""
        shown = signed(pictures[batch.pairs.to(self.device)])
        gains = batch.gains.to(self.device)[:, None, None, None]
        seen = self.sight.see(torch.roll((shown + 1) * gains - 1, batch.shift, (2, 3)).clamp(-1, 1))
        logits, targets = [], []
        for of, part in zip(
            batch.of.to(self.device).split([len(part.ids) for part in batch.written]),
            batch.written,
            strict=True,
        ):
            said, wanted = self.sight(seen, of, part.on(self.device))
            logits.append(said)
            targets.append(wanted)
        return torch.cat(logits), torch.cat(targets), seen

    def run(self) -> None:
        """Train to the last step."""
        options, shards = self.options, self._shards
        batches = Batches(self.sight, shards.posed, shards.played)
        batches.options = options
        pictures = self._on_device(shards.posed, shards.played)
        print(f"{len(pictures)} pictures", flush=True)
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        before = self.cpu_s - _cpu_s()
        saved = time.monotonic()
        parts: list[dict[str, torch.Tensor]] = []
        try:
            for batch in DataLoader(
                batches,
                batch_size=None,
                sampler=range(self.step, options.steps),
                num_workers=options.workers,
            ):
                if before + _cpu_s() > options.limit_s:
                    break
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate()
                losses = self.loss(batch, pictures)
                self.optimizer.zero_grad()
                (losses["answers"] + options.auxiliary * losses["auxiliary"]).backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                self.optimizer.step()
                self.step += 1
                parts.append({name: each.detach() for name, each in losses.items()})
                if self.step % 50 == 0:
                    mean = {k: float(sum(each[k] for each in parts)) / len(parts) for k in parts[0]}
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

    def _on_device(self, *kinds: dict[str, NDArray[Any]]) -> torch.Tensor:
        joined = np.concatenate([kind["picture"] for kind in kinds])
        return torch.from_numpy(joined).to(self.device)

    def export(self) -> Path:
        """Write the checkpoint as it is now."""
        folder = self.options.out / f"checkpoint-{self.step}"
        if not folder.exists():
            label = f"trained by strands_cosmos3, recipes/own_eyes, {self.step} steps"
            sight = self.sight
            write_sight(self.bundled, folder, sight.vision_weights(), sight.text_weights(), label)
        return folder

    @torch.no_grad()
    def judged(self, most: int = 384) -> str:
        """Return how many answers are wholly right on the shards for validation."""
        right: dict[str, list[bool]] = {}
        rng = np.random.default_rng(0)
        shards = self._shards.held_out
        batches = Batches(self.sight, shards["posed"], shards["played"])
        pictures = self._on_device(shards["posed"], shards["played"])
        for film, shard in enumerate(shards.values()):
            among = rng.permutation(len(shard["picture"]))[:most]
            for part in np.array_split(among, max(1, len(among) // 64)):
                rows = [
                    (int(i), bool(film), int(shard["start"][i]) if film else None) for i in part
                ]
                batch = _together(batches.made(rows, rng, augmented=False))
                logits, targets, _ = self._answers(batch, pictures)
                hits = (logits.argmax(1) == targets).tolist()
                at = 0
                lengths = [n for w in batch.written for n in (w.targets >= 0).sum(1).tolist()]
                for name, length in zip(batch.kinds, lengths, strict=True):
                    right.setdefault(name, []).append(all(hits[at : at + length]))
                    at += length
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
