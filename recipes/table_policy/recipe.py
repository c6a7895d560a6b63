"""The bundled policy from nothing: the recipe, whose steps and options are in ``recipe.toml``, and
its card.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

from recipes.pipeline import Recipe, evaluated, history
from strands_cosmos3.evaluation.tables import dynamics_of
from strands_cosmos3.resources import load_json

TRAINED = "run/decoder/checkpoint"


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
        history=history(folder, ("demos", "vae", "policy", "preview", "joint", "decoder")),
    )


RECIPE = Recipe(
    "bundled policy",
    Path(__file__).with_name("recipe.toml"),
    TRAINED,
    card,
    files=("run/curves.png",),
)
