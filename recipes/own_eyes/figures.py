"""``python -m recipes.own_eyes.figures CHECKPOINT``: what the eyes answer about posed tables that
training had not, in conditions that it had not, through :meth:`Reasoner.ask`.

How often they agree with the simulator on success is measured by ``strands-cosmos3 evaluate --judge
reasoner`` (``NOTES.md``).
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recipes.own_eyes.pictures import CUBES, PosedTables, config_of
from recipes.own_eyes.questions import (
    IS_CLOSED,
    WHICH_COLOURS,
    WHICH_IS_NEAREST,
    colours_said,
    nearest_said,
    said,
)
from strands_cosmos3.evaluation.statistics import rate_of
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.reasoner.reasoner import Reasoner
from strands_cosmos3.resources import write_json
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.worlds.arms import Robot
from strands_cosmos3.worlds.table.demonstrations import DemoCollector
from strands_cosmos3.worlds.table.randomized_scene import RandomizedScene
from strands_cosmos3.worlds.table.scene import Cube
from strands_cosmos3.worlds.table.world import TableVariation, TableWorld
from strands_cosmos3.worlds.world import Start

CONDITIONS = ("plain", "light=0.5", "table=white", "table=dark", "cubes=32", "camera=2", "camera=3")
_SEED = 777_000_000
_SHORT = AskOptions(max_tokens=12)


@dataclass(frozen=True)
class FigureOptions:
    """Options of the command."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    pictures: int = 300  # of each condition
    conditions: tuple[str, ...] = CONDITIONS
    json: Path | None = None


@dataclass(frozen=True)
class Asked:
    """A question with the right answer."""

    name: str
    question: str
    answer: str


def questions_about(facts: dict[str, Any]) -> list[Asked]:
    """Return the questions about a picture. Which cube is nearest is asked where there are two."""
    asked = [
        Asked("colours", WHICH_COLOURS, colours_said(facts["present"])),
        Asked("closed", IS_CLOSED, said(facts["held"] >= 0)),
    ]
    if facts["present"].sum() > 1:
        asked.append(Asked("nearest", WHICH_IS_NEAREST, nearest_said(facts["nearest"])))
    return asked


def posed(condition: str, pictures: int) -> list[dict[str, Any]]:
    """Return pictures of tables in a condition of the world."""
    changes = {} if condition == "plain" else TableVariation.change(condition)
    variation = TableVariation(**changes)
    world = TableWorld()
    rng = np.random.default_rng([_SEED, len(condition)])
    with DemoCollector(config_of(0.0)) as collector:
        scene = world.scene(PANDA, None, variation)
        robot = Robot("panda", scene=scene)
        with Renderer(scene.model, *VIEW_HW) as renderer:
            shown = RandomizedScene(robot, renderer, {})
            tables = PosedTables(collector, rng, 0.0)
            edge_m = (variation.cubes_mm or 1e3 * Cube.edge_m) / 1e3
            seen = []
            for number in range(pictures):
                world.arrange(robot, Start("pick", _SEED % 2**31 + number, variation=variation))
                seen.append(tables.posed(shown, edge_m))
    return seen


def answered(
    reasoner: Reasoner, seen: list[dict[str, Any]], blank: bool
) -> dict[str, list[tuple[str, str]]]:
    """Return the given and the right answers of each kind of question."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for facts in seen:
        picture: NDArray[np.uint8] = facts["picture"] * np.uint8(not blank)
        for asked in questions_about(facts):
            given = reasoner.ask(asked.question, [picture], options=_SHORT).text.strip()
            pairs.setdefault(asked.name, []).append((given, asked.answer))
    return pairs


def figures_of(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return how many answers are right, and how many one would get right who always gives the
    most frequent one. Of colours, also how many are right one by one.
    """
    right = rate_of([given == answer for given, answer in pairs])
    frequent = Counter(answer for _, answer in pairs).most_common(1)[0][1] / len(pairs)
    colours = [name.removeprefix("cube_") for name in CUBES]
    single = [(c in given) == (c in answer) for given, answer in pairs for c in colours]
    return {**right, "majority": frequent, "each_colour": float(np.mean(single))}


def main(options: FigureOptions) -> None:
    """Measure, and print the figures."""
    reasoner = Reasoner.from_pretrained(options.checkpoint)
    table = Table("condition", "question", "right", "%", "95 %", "majority, %", "each colour, %")
    report: dict[str, Any] = {}
    for condition in options.conditions:
        seen = posed(condition, options.pictures)
        for blank in (False, True) if condition == "plain" else (False,):
            name = "black" if blank else condition
            for question, pairs in answered(reasoner, seen, blank).items():
                figures = report[f"{name}, {question}"] = figures_of(pairs)
                table.add_row(
                    name,
                    question,
                    f"{figures['successes']} / {figures['of']}",
                    f"{100 * figures['rate']:.1f}",
                    f"{100 * figures['low']:.1f} .. {100 * figures['high']:.1f}",
                    f"{100 * figures['majority']:.1f}",
                    f"{100 * figures['each_colour']:.1f}" if question == "colours" else "",
                )
    Console(width=110).print(table)
    if options.json is not None:
        write_json(options.json, report)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(FigureOptions)))
