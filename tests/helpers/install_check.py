"""Build wheel and sdist, check their metadata, and install both into fresh environments of several
Pythons.

`make test-install` runs it:

    python -m helpers.install_check --pythons python3.11 python3.12 python3.13

Each environment gets the simulation without constraints (from the sdist) or with them (from the
wheel), runs a scripted episode, and says in one line what is missing for the bundled policy.
``--engine`` installs the engine too, with the wheel, and runs the self-test of the bundled policy:
on an index without PyTorch's CPU build that takes several GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, folder: Path, fails: bool = False) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=folder, env=environment
    )
    if (done.returncode != 0) != fails:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout + done.stderr


def build(folder: Path) -> tuple[Path, Path]:
    """Build both from a copy of what git tracks, check them with twine, and return wheel and
    sdist.
    """
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=folder)
    return wheel, sdist


def check(python: str, file: Path, constrained: bool, engine: bool, folder: Path) -> None:
    run(python, "-m", "venv", folder / "venv", folder=folder)
    pip = (folder / "venv/bin/python", "-m", "pip", "install", "--quiet")
    constraints = ("--constraint", ROOT / "constraints.txt") if constrained else ()
    run(*pip, *constraints, f"{file}[{'sim,engine' if engine else 'sim'}]", folder=folder)
    command = folder / "venv/bin/strands-cosmos3"
    run(
        command,
        "rollout",
        "--backend",
        "scripted",
        "--task",
        "reach",
        "--json",
        "reach.json",
        folder=folder,
    )
    if engine:
        run(command, "infer", "--self-test", "--device", "cpu", folder=folder)
    else:
        said = run(command, "rollout", folder=folder, fails=True)
        assert said.count("\n") == 1, said
        assert "pip install 'strands-cosmos3[engine]'" in said, said
    assert run(command, "--version", folder=folder).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"])
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel, sdist = build(Path(folder))
        print(f"built and checked {wheel.name}, {sdist.name}", flush=True)
        for python in options.pythons:
            for file, constrained in ((wheel, True), (sdist, False)):
                engine = options.engine and constrained
                with tempfile.TemporaryDirectory() as place:
                    check(python, file, constrained, engine, Path(place))
                how = "with" if constrained else "without"
                extras = "sim and engine" if engine else "sim"
                print(
                    f"{python}: {file.suffix} {how} constraints, {extras}: installed and ran",
                    flush=True,
                )


if __name__ == "__main__":
    main()
