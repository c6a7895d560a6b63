"""Virtual environments for what cannot live in ours, made once in pytest's cache
(`.pytest_cache/d/NAME`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def environment(
    config: pytest.Config, name: str, python: str, requirements: Sequence[str], also: str = ""
) -> str:
    """The Python of an environment with these requirements; made anew where they, or ``also``, have
    changed.

    The calling test is skipped, with the reason, where the package index does not give them.
    """
    assert config.cache is not None
    home = Path(config.cache.mkdir(name))
    made = hashlib.sha256(
        "\0".join((python, sys.version, *requirements, also)).encode()
    ).hexdigest()[:16]
    interpreter, done = home / made / "bin/python", home / made / "done"
    if done.exists():
        return str(interpreter)
    shutil.rmtree(home)
    subprocess.run([python, "-m", "venv", "--clear", str(home / made)], check=True)
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        pytest.skip(
            f"the package index does not give {', '.join(requirements)}: "
            f"{pip.stderr.strip().splitlines()[-1]}"
        )
    done.touch()
    return str(interpreter)


def strands_robots(config: pytest.Config) -> str:
    """The Python of an environment with strands-robots 0.5.3 and this package, as `pip install`
    makes it.
    """
    requirements = ("strands-robots==0.5.3", "mujoco<4", "--editable", f"{ROOT}[sim,serve]")
    python = python_3_12("strands-robots 0.5.3")
    return environment(
        config, "strands", python, requirements, (ROOT / "pyproject.toml").read_text()
    )


def lerobot(config: pytest.Config) -> str:
    """The Python of an environment with lerobot 0.6.1 and our plugin (3 GB), or the one that
    LEROBOT_PYTHON names.
    """
    if given := os.environ.get("LEROBOT_PYTHON"):
        return given
    plugin = ROOT / "plugins/lerobot_policy_cosmos3"
    requirements = (
        "lerobot[async,dataset]==0.6.1",
        "--editable",
        f"{ROOT}[engine,sim]",
        "--editable",
        str(plugin),
    )
    ours = "".join((folder / "pyproject.toml").read_text() for folder in (ROOT, plugin))
    return environment(config, "lerobot", python_3_12("lerobot 0.6.1"), requirements, ours)


def checkout(variable: str, repository: str) -> tuple[Path, str]:
    """The folder that an environment variable names, and its commit; without it the test is
    skipped, with the reason.
    """
    if not (given := os.environ.get(variable)):
        pytest.skip(f"{variable} does not name a checkout of {repository}")
    head = subprocess.run(
        ["git", "-C", given, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return Path(given), head.stdout.strip()


def python_3_12(who: str) -> str:
    """A Python 3.12; the calling test is skipped, with the reason, where there is none."""
    python = find_python((3, 12))
    if python is None:
        pytest.skip(
            f"{who} wants Python 3.12, and there is none on the path, in pyenv, or running this"
        )
    return python


def find_python(version: tuple[int, int]) -> str | None:
    """A Python of that version that can make environments: this one, one on the path, or one of
    pyenv's.
    """
    wanted = ".".join(map(str, version))
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{wanted}*/bin/python"), reverse=True)
    return next(
        (
            path
            for path in _present((sys.executable, shutil.which(f"python{wanted}"), *pyenv))
            if _is(path, version)
        ),
        None,
    )


def _present(candidates: Iterable[str | Path | None]) -> list[str]:
    return [str(path) for path in candidates if path is not None]


def _is(python: str, version: tuple[int, int]) -> bool:
    """It must be asked: pyenv puts launchers on the path for versions that are not chosen."""
    told = subprocess.run(
        [python, "-c", "import ensurepip, sys, venv; print(*sys.version_info[:2])"],
        capture_output=True,
        text=True,
    )
    return told.returncode == 0 and told.stdout.split() == [str(part) for part in version]


def network_namespace() -> None:
    """Make and delete a network namespace; the calling test is skipped, with the reason, where that
    takes rights or a program that there are not.
    """
    name = f"cosmos-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
        subprocess.run(["ip", "netns", "delete", name], check=True)
    except OSError as error:
        pytest.skip(f"two machines need network namespaces: install iproute2 ({error})")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two machines need network namespaces, made by root: {error.stderr.strip()}")
