"""Malformed flags of every command: a message that names the flag or its value, before anything
runs or is written.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from strands_cosmos3.cli import main

SEEDS = ["-5", "-1", "4294967296", "1e3", "x", "", "nan"]
COUNTS = ["0", "-3", "1.5", "x", "", "nan"]
SECONDS = ["0", "-1", "nan", "inf", "x", ""]
PLACES = ["/proc/nothing/x", "/dev/null/x", "{file}/x", "a" * 300]
FILES = [f"{place}{{suffix}}" for place in PLACES] + ["x.wrong", "{folder}{suffix}", ""]
CHOICE = ["nothing", "", "Pick"]
ROLLOUT = {
    "--seed": SEEDS,
    "--episodes": COUNTS,
    "--duration": SECONDS,
    "--control-frequency": [*SECONDS, "7", "601", "1e300"],
    "--replan-rows": COUNTS,
    "--chunk-rows": [*COUNTS, "257"],
    "--latency": ["-1", "nan", "inf", "1e9", "x"],
    "--derating": ["0", "2", "-1", "nan", "x"],
    "--arm-model": ["nothing", "nothing.xml", "", "{file}"],
    "--limits": CHOICE,
    "--feed-forward": CHOICE,
    "--film": CHOICE,
    "--backend": CHOICE,
    "--task": CHOICE,
    "--instruction": ["juggle", "red", "pick", "stack the red cube on the red cube"],
    "--trajectory": ["nothing.json", "{file}"],
    "--model": ["nothing"],
    "--host": ["localhost"],
    "--port": ["99999", "-1", "x"],
    "--dialect": CHOICE,
    "--action-space": CHOICE,
    "--num-steps": COUNTS,
    "--guidance-scale": ["nan", "x"],
    "--policy-frames": COUNTS,
    "--device": ["abacus"],
    "--dtype": CHOICE,
    "--text-cache-bytes": ["-1", "x"],
    "--tp": ["0", "-1", "x", "2"],
    "--cfg": ["0", "3", "x", "2"],
    "--video": [place.replace("{suffix}", ".mp4") for place in FILES],
    "--json": [place.replace("{suffix}", ".json") for place in FILES],
    "--plot": [place.replace("{suffix}", ".png") for place in FILES],
    "--npz": [place.replace("{suffix}", ".npz") for place in FILES],
    "--dataset": [*PLACES[:3], "{file}", "{folder}"],
    "--nothing": ["", "1"],
}
RUN = ["--backend", "scripted", "--task", "reach", "--duration", "0.06"]
VIEW = {
    "--page-port": ["-1", "65536", "x"],
    "--page-address": ["0.0.0.0"],
    "--play": ["nothing", "{file}", "{folder}"],
}
COMMANDS = {
    "rollout": (RUN, ROLLOUT),
    "view": ([*RUN, "--leave", "--page-port", "0"], {**ROLLOUT, "--episodes": COUNTS[1:], **VIEW}),
    "evaluate": (
        ["--backend", "scripted", "--tasks", "reach", "--seeds", "1", "--out", "{out}"],
        {
            "--seed": SEEDS,
            "--seeds": COUNTS,
            "--tasks": ["juggle", "", "pick,pick", ","],
            "--conditions": ["nothing", "", "steps=x", "replan=0", "plain,plain", "blank"],
            "--duration": SECONDS,
            "--episode-timeout": SECONDS,
            "--control-frequency": ["7", "0", "nan"],
            "--workers": COUNTS,
            "--films": ["-1", "x"],
            "--clips": ["-1", "x", "3"],
            "--num-gpus": ["-1", "x", "3"],
            "--tp": ["0", "x", "3"],
            "--cfg": ["0", "3"],
            "--total-shard": ["0", "x"],
            "--config": ["nothing.toml", "{file}", "{folder}"],
            "--out": PLACES[:3],
            "--model": ["nothing"],
            "--port": ["x", "99999"],
        },
    ),
    "demos": (
        ["--out", "{out}", "--episodes", "1"],
        {
            "--out": [*PLACES, "{file}", "{folder}"],
            "--episodes": COUNTS,
            "--workers": COUNTS,
            "--seed": SEEDS,
            "--perturbed": ["-1", "2", "nan", "x"],
            "--distractors": ["-1", "2", "nan", "x"],
            "--visual-randomization": ["-1", "nan", "inf", "x"],
            "--tier": ["0", "100", "x"],
        },
    ),
    "train": (
        ["--out", "{out}", "--model", "nothing", "--dataset", "nothing"],
        {
            "--out": [*PLACES, "{file}"],
            "--seed": SEEDS,
            "--steps": COUNTS,
            "--batch": COUNTS,
            "--lr": ["0", "-1", "nan", "x"],
            "--lora-rank": ["-1", "x"],
            "--model": ["nothing"],
            "--dataset": ["nothing"],
            "--stats": CHOICE,
        },
    ),
    "checkpoint": (
        ["inspect", "{folder}"],
        {
            "--base": ["nothing", "/proc/nowhere"],
            "--contract": ["nothing.toml", "{folder}"],
            "--out": ["{folder}"],
            "--to": CHOICE,
            "--dtype": CHOICE,
            "--json": ROLLOUT["--json"],
        },
    ),
    "serve": (
        ["--trajectory", "nothing.json"],
        {
            "--port": ["-1", "65536", "x"],
            "--host": ["0.0.0.0", "nowhere"],
            "--token-file": ["nothing", "{folder}"],
            "--max-clients": COUNTS,
            "--grace": SECONDS,
            "--seed": SEEDS,
            "--trajectory": ["{file}", "{folder}"],
            "--backend": [*CHOICE, "scripted"],
            "--model": ["nothing"],
        },
    ),
    "infer": (
        ["--model", "nothing", "--image", "{file}", "--out", "{out}", "--prompt", "reach"],
        {
            "--seed": SEEDS,
            "--out": PLACES,
            "--image": ["nothing.png"],
            "--mode": CHOICE,
            "--action-file": ["nothing", "{file}", "{folder}"],
            "--condition-frames": ["x", ""],
            "--num-steps": ["x", "nan"],
            "--tp": ["0", "x"],
            "--cfg": ["3"],
        },
    ),
    "doctor": ([], {"--json": ROLLOUT["--json"], "--nothing": ["1"]}),
}
ALL = [
    (name, flag, value)
    for name, (_, flags) in COMMANDS.items()
    for flag in flags
    for value in flags[flag]
]


@pytest.fixture
def places(monkeypatch, tmp_path):
    """A file that is no folder, a folder with a strange file in it, and a place for output."""
    monkeypatch.chdir(tmp_path)
    for suffix in ("", ".mp4", ".json", ".png", ".npz"):
        (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "folder" / "strange").touch()
    (tmp_path / "file").write_text("strange")
    return {"file": "file", "folder": "folder", "out": "out"}


def refusal(name, flag, value, places, capsys):
    """What is wrong with the refusal of a flag, or None."""
    arguments = [name, *COMMANDS[name][0], flag, value]
    for key, place in places.items():
        arguments = [argument.replace(f"{{{key}}}", place) for argument in arguments]
    value = arguments[-1]
    try:
        status = main(arguments)
    except SystemExit as end:  # tyro's
        status = end.code
    except Exception as error:
        return f"{name} {flag} {value!r}: {type(error).__name__}: {error!s:.120}"
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    names = (
        flag.strip("-"),
        flag.strip("-").replace("-", "_"),
        flag.strip("-").replace("-", ""),
        value,
    )
    if (
        status not in (1, 2)
        or not any(text and text.replace(" ", "") in said for text in names)
        or "Traceback" in said
    ):
        return f"{name} {flag} {value!r}: status {status}, {said[-200:]!r}"
    return None


def check(chosen, places, capsys):
    assert not [found for case in chosen if (found := refusal(*case, places, capsys))]


def one_of_each(seed):
    rng = np.random.default_rng(seed)
    groups = itertools.groupby(ALL, key=lambda case: case[:2])
    return [
        options[int(rng.integers(len(options)))] for _, group in groups if (options := list(group))
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_malformed_flags(name, places, capsys):
    """Of ``view``, those that it does not share with ``rollout``, and every eighth of the others."""
    cases = [case for case in one_of_each(0) if case[0] == name]
    if name == "view":
        own, shared = (
            [case for case in cases if (case[1] in ROLLOUT) == is_shared]
            for is_shared in (False, True)
        )
        cases = own + shared[::8]
    check(cases, places, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_malformed_flag(name, places, capsys):
    check([case for case in ALL if case[0] == name], places, capsys)
