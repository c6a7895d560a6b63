"""The bundled policy from nothing: the steps of its recipe, their options, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from recipes.pipeline import (
    PipelineOptions,
    PipelineStep,
    card_step,
    command_step,
    evaluated,
    history,
)
from recipes.pipeline import main as run
from strands_cosmos3.evaluation.tables import dynamics_of
from strands_cosmos3.resources import load_json

TRAINED = "run/decoder/checkpoint"
STAGES = ("vae", "policy", "preview", "joint", "decoder")


@dataclass(frozen=True)
class Recipe:
    """Options of the recipe; those of training are in :class:`.config.RunConfig`."""

    episodes: int = 700  # of demonstrations
    visual_randomization: float = 0.2  # of the demonstrations; their other looks have all of it
    training: tuple[str, ...] = ()  # options of the training, where it differs from its defaults
    evaluate_every: int = 10_000  # more steps than a stage has: at its end
    # of ``evaluation``, which is without conditions, and of ``controls``
    tasks: str = "reach,pick,place"
    seeds: int = 200  # episodes of each task and condition of ``evaluation`` and ``conditions``
    hard_task: str = "pick"  # of ``conditions``
    conditions: str = (
        "limit=7,replan=16,latency=0.2,latency=0.4,latency=0.8,light=0.5,table=dark,table=white,"
        "camera=2,cubes=32,close,swapped,paraphrased"
    )
    few_seeds: int = 20  # of ``controls``
    controls: str = (
        "latency=0.4,steps=1,swapped,paraphrased,camera=3,camera=4,light=0.2,light=1.6,crowded,"
        "shuffled,blank,random"
    )
    clips: int = 48  # of the expert, on which dynamics are measured
    limit_s: float = 20.0  # simulated seconds of an evaluation's episode

    def steps(self, options: PipelineOptions) -> list[PipelineStep]:
        """Return the steps: demonstrations, the stages of training, evaluations, the card."""
        seed = ("--seed", str(options.seed))
        workers = ("--workers", str(options.workers))
        recording = (
            *("--episodes", str(self.episodes)),
            *("--visual-randomization", str(self.visual_randomization)),
        )
        episodes = ("--evaluate-every", str(self.evaluate_every), "--evaluate-tasks")
        judged = (*episodes, *self.tasks.split(","))
        training = ("recipes.table_policy.train", "--out", "run", "--demos", "demos")
        return [
            command_step(
                *("demos", "recipes.table_policy.record", "--out", "demos", *recording, *seed),
                unrecorded=workers,
            ),
            *(
                command_step(
                    *(stage, *training, "--until", stage, *seed, *self.training),
                    unrecorded=judged if stage in ("policy", "joint") else (),
                )
                for stage in STAGES
            ),
            *(
                command_step(
                    *(name, "evaluate", "--model", TRAINED, "--out", name, "--tasks", tasks),
                    *("--seeds", str(seeds), "--duration", f"{self.limit_s:g}", *more),
                    unrecorded=("--resume", *workers),
                )
                for name, tasks, seeds, more in (
                    ("evaluation", self.tasks, self.seeds, ("--clips", str(self.clips))),
                    ("conditions", self.hard_task, self.seeds, ("--conditions", self.conditions)),
                    ("controls", self.tasks, self.few_seeds, ("--conditions", self.controls)),
                )
            ),
            card_step(TRAINED, card, "run/curves.png"),
        ]


TINY = Recipe(
    episodes=4,
    training=(
        *("--vae-steps", "2", "--vae-decoder-steps", "1", "--policy-steps", "4"),
        *("--preview-steps", "2", "--joint-steps", "2", "--decoder-steps", "2"),
        *("--hidden", "64", "--layers", "2", "--policy-batch", "4", "--joint-batch", "2"),
        "--no-gate",
    ),
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


def card(folder: Path) -> str:
    """Return the model card: every figure from the records and reports of the steps."""
    checkpoint = folder / TRAINED
    about = load_json(checkpoint / "checkpoint.json")["strands_cosmos3"]
    config = load_json(checkpoint / "transformer/config.json")
    gate = load_json(folder / "run/vae/gate.json")
    dynamics = dynamics_of(load_json(folder / "evaluation/report.json")["dynamics"])
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8")).substitute(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        megabytes=round(size / 1e6),
        verbs=", ".join(about["language"]["verbs"]),
        colours=", ".join(about["language"]["colours"]),
        prefix_rows=about.get("prefix_rows", 0),
        novelty=about.get("novelty_rmse"),
        **{name: evaluated(folder, name) for name in ("evaluation", "conditions", "controls")},
        dynamics="\n".join(f"- {name}: {text}" for name, text in dynamics.items()),
        kept_colours=", ".join(f"{name} {share:.0%}" for name, share in gate["by_colour"].items()),
        vae_db=f"{gate['psnr']:.1f}",
        history=history(folder, ("demos", *STAGES)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the bundled policy, or go on with it; return an exit status."""
    return run("bundled policy", lambda o: (TINY if o.tiny else Recipe()).steps(o), arguments)
