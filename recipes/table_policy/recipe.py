"""The bundled policy from nothing: the stages of its recipe, and their options."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.pipeline import Stage, program
from recipes.table_policy.card import write_card
from strands_cosmos3.resources import write_folder

JOINT, TRAINED, CARD = "run/joint/checkpoint", "run/decoder/checkpoint", "checkpoint"


@dataclass(frozen=True)
class Recipe:
    """Options of the recipe."""

    episodes: int = 700  # of demonstrations
    vae_steps: int = 1000
    vae_decoder_steps: int = 800
    visual_randomization: float = 0.2  # of the demonstrations; their other looks have all of it
    policy_steps: int = 600
    looks_from: int = 0  # step of the policy stage
    preview_steps: int = 1000
    joint_steps: int = 3200
    decoder_steps: int = 400
    hidden: int = 192
    layers: int = 4
    latent_patch: int = 1  # tokens of one latent; dynamics need them
    policy_batch: int = 160
    joint_batch: int = 40
    seed: int = 0
    gate: bool = True
    evaluate_every: int = 10_000  # more steps than a stage has: at its end
    # of ``evaluation``, which is without conditions, and of ``controls``
    tasks: str = "reach,pick,place"
    seeds: int = 200  # episodes of each task and condition of ``evaluation`` and ``conditions``
    hard_task: str = "pick"  # of ``conditions``
    conditions: str = (
        "limit=7,replan=16,latency=0.2,latency=0.4,latency=0.8,light=0.5,table=dark,table=white,camera=2,cubes=32,close"
        ",swapped,paraphrased"
    )
    few_seeds: int = 20  # of ``controls``
    controls: str = "latency=0.4,steps=1,swapped,paraphrased,camera=3,camera=4,light=0.2,light=1.6,crowded,shuffled,blank,random"
    clips: int = 48  # of the expert, on which dynamics are measured
    limit_s: float = 20.0  # simulated seconds of an evaluation's episode

    def stages(self, workers: int) -> tuple[Stage, ...]:
        """Return the stages; ``workers`` processes record and evaluate, which changes no result."""
        vae, policy = (
            ("seed", "vae_steps", "vae_decoder_steps", "gate"),
            (
                "seed",
                "hidden",
                "layers",
                "latent_patch",
                "looks_from",
                "policy_steps",
                "policy_batch",
            ),
        )
        joint = (*policy[:5], "joint_steps", "joint_batch")
        shown = ("episodes", "seed", "visual_randomization")
        found = self._evaluations(workers)
        records = tuple(
            f"records/{name}.json"
            for name in ("demos", "vae", "policy", "preview", "joint", "decoder")
        )
        reports = tuple(f"{stage.name}/report.json" for stage in found)
        return (
            self._stage(
                "demos",
                (
                    "demos",
                    "--out",
                    "demos",
                    *(text for name in shown for text in self._option(name)),
                ),
                {name: getattr(self, name) for name in shown},
                makes=("demos",),
                more=("--workers", str(workers)),
            ),
            self._train("vae", vae, ("demos",), "run/vae/final.pt", ("run",)),
            self._train(
                "policy",
                policy,
                ("demos", "run/vae/final.pt"),
                "run/policy/checkpoint",
                ("run/settings.json",),
            ),
            self._train(
                "preview",
                ("seed", "preview_steps"),
                ("demos", "run/vae/final.pt"),
                "run/preview/curve.jsonl",
            ),
            self._train(
                "joint",
                joint,
                ("demos", "run/policy/checkpoint", "run/preview/curve.jsonl"),
                JOINT,
                ("run/settings.json",),
            ),
            self._train(
                "decoder",
                ("seed", "decoder_steps", "gate"),
                ("demos", "run/vae/final.pt", JOINT),
                TRAINED,
            ),
            *found,
            Stage(
                "card",
                f"the card, {CARD}/README.md",
                {},
                (TRAINED, *records, *reports),
                (CARD,),
                (CARD,),
                self._write_card,
            ),
        )

    def _train(
        self,
        until: str,
        decides: Sequence[str],
        reads: tuple[str, ...],
        made: str,
        owns: tuple[str, ...] = (),
    ) -> Stage:
        names = (
            "hidden",
            "layers",
            "latent_patch",
            "policy_batch",
            "joint_batch",
            "looks_from",
            "seed",
        )
        names += tuple(
            f"{stage}_steps"
            for stage in ("vae", "vae_decoder", "policy", "preview", "joint", "decoder")
        )
        options = [text for name in names for text in self._option(name)]
        options += [] if self.gate else ["--no-gate"]
        command = (
            "recipes.table_policy.train",
            "--out",
            "run",
            "--demos",
            "demos",
            "--until",
            until,
            *options,
        )
        judged = (
            "--evaluate-every",
            str(self.evaluate_every),
            "--evaluate-tasks",
            *self.tasks.split(","),
        )
        more = judged if until in ("policy", "joint") else ()
        decided = {name: getattr(self, name) for name in decides}
        return self._stage(until, command, decided, reads, (made,), (*owns, f"run/{until}"), more)

    def _option(self, name: str) -> tuple[str, str]:
        return f"--{name.replace('_', '-')}", str(getattr(self, name))

    def _evaluations(self, workers: int) -> tuple[Stage, ...]:
        """Return the stages of the figures: tasks and dynamics, conditions that make one task
        harder, and controls.
        """
        made = []
        for name, tasks, seeds, more in (
            ("evaluation", self.tasks, self.seeds, ("--clips", str(self.clips))),
            ("conditions", self.hard_task, self.seeds, ("--conditions", self.conditions)),
            ("controls", self.tasks, self.few_seeds, ("--conditions", self.controls)),
        ):
            options = (
                "--tasks",
                tasks,
                "--seeds",
                str(seeds),
                "--duration",
                f"{self.limit_s:g}",
                *more,
            )
            command = ("evaluate", "--model", TRAINED, *options)
            also = ("--out", name, "--workers", str(workers))
            made.append(
                self._stage(
                    name,
                    command,
                    {"command": list(command)},
                    (TRAINED,),
                    (f"{name}/report.json",),
                    (name,),
                    also,
                )
            )
        return tuple(made)

    def _stage(
        self,
        name: str,
        command: Sequence[str],
        decides: Mapping[str, Any],
        reads: tuple[str, ...] = (),
        makes: tuple[str, ...] = (),
        owns: tuple[str, ...] = (),
        more: Sequence[str] = (),
    ) -> Stage:
        """Return a stage that runs a command; ``more`` are options that change no result."""
        whole = [*command, *more]

        def work(folder: Path) -> None:
            again = ["--resume"] if command[0] == "evaluate" and (folder / name).exists() else []
            program([*whole, *again])(folder)

        return Stage(
            name,
            f"python -m {shlex.join(whole)}"
            if command[0].startswith("recipes")
            else f"strands-cosmos3 {shlex.join(whole)}",
            decides,
            reads,
            makes,
            owns or makes,
            work,
        )

    def _write_card(self, folder: Path) -> None:
        def fill(hidden: Path) -> None:
            shutil.copytree(folder / TRAINED, hidden, dirs_exist_ok=True)
            shutil.copy(folder / "run/curves.png", hidden / "curves.png")
            write_card(folder, hidden)

        write_folder(folder / CARD, fill)


TINY = Recipe(
    episodes=4,
    vae_steps=2,
    vae_decoder_steps=1,
    policy_steps=4,
    preview_steps=2,
    joint_steps=2,
    decoder_steps=2,
    hidden=64,
    layers=2,
    policy_batch=4,
    joint_batch=2,
    gate=False,
    evaluate_every=0,
    tasks="reach,pick",
    seeds=1,
    few_seeds=1,
    conditions="swapped,latency=0.2",
    controls="blank",
    clips=1,
    limit_s=0.5,
)
"""Runs through every stage in minutes; its policy can do nothing."""
