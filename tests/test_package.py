"""The package as it is installed: light to import, its data found from a wheel and from a
checkout, its names all there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import strands_cosmos3
from strands_cosmos3.errors import ResourceNotFoundError
from strands_cosmos3.resources import resource

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={**os.environ, **env},
    )
    return done.stdout.strip()


def test_the_page_on_pypi_has_absolute_links_to_files_that_exist(tmp_path: Path):
    page = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert page is not None
    assert page.loader is not None
    hook = importlib.util.module_from_spec(page)
    page.loader.exec_module(hook)
    readme = (ROOT / "README.md").read_text()
    targets = [
        target
        for target in re.findall(r"\]\(([^)]+)\)", readme)
        if not target.startswith(("http", "#"))
    ]
    assert len(targets) > 15
    assert not [target for target in targets if not leads_somewhere(target)]
    links = re.findall(r"\]\(([^)]+)\)", hook.absolute(readme, "https://host/us/it"))
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    assert "https://host/us/it/raw/main/docs/rollout.webp" in links
    assert (ROOT / "docs/rollout.webp").stat().st_size < 4 << 20


@pytest.mark.parametrize("target", ["docs/no_such_page.md", "docs/performance.md#no-such-heading"])
def test_a_dead_link_is_noticed(target: str):
    assert not leads_somewhere(target)


def leads_somewhere(target: str) -> bool:
    """Return whether a relative link's file exists, and in it the heading that the link names
    after ``#``.
    """
    path, _, anchor = target.partition("#")
    if not (ROOT / path).exists():
        return False
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
    return not anchor or anchor in [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    ]


def test_importing_the_package_loads_nothing_heavy():
    loaded = run(
        "import sys, strands_cosmos3; print([m for m in ('torch', 'mujoco', 'numpy', 'scipy') if "
        "m in sys.modules])"
    )
    assert loaded == "[]"


def test_the_numpy_packages_load_neither_torch_nor_mujoco():
    code = (
        "import sys, strands_cosmos3.actions.decode, strands_cosmos3.observe.mapping, "
        "strands_cosmos3.worlds.table.expert, "
        "strands_cosmos3.backends.replay; print([m for m in ('torch', 'mujoco', 'mink') if m in "
        "sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize("name", strands_cosmos3.__all__)
def test_every_public_name_is_there_and_documented(name: str):
    value = getattr(strands_cosmos3, name)
    assert name == "__version__" or value.__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        strands_cosmos3.Nonsense  # noqa: B018


def test_a_checkout_finds_its_data():
    assert resource("stats/droid_lerobot.json") == ROOT / "stats/droid_lerobot.json"
    assert resource("assets/panda.xml") == ROOT / "assets/panda.xml"
    with pytest.raises(ResourceNotFoundError, match="reinstall"):
        resource("assets/nothing.xml")


def test_a_wheel_finds_its_data(tmp_path: Path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "strands_cosmos3/py.typed" in names
    assert any(name.endswith("LICENSE.OpenMDW-1.1.txt") for name in names)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "from strands_cosmos3 import load_action_stats; from strands_cosmos3.sim import "
        "load_panda; "
        "from strands_cosmos3.resources import resource; "
        "from strands_cosmos3.robots.catalogue import packaged_robots; "
        "print(load_action_stats('droid').q01.shape, load_panda().nq, resource('assets'), "
        "len(packaged_robots()))"
    )
    shape, nq, assets, robots = run(code, PYTHONPATH=str(site)).rsplit(" ", 3)
    assert (shape, nq, robots) == ("(10,)", "9", "11")
    assert Path(assets).is_relative_to(site)


def test_the_lock_names_every_requirement_with_a_hash_and_an_allowed_version():
    lines = [
        line
        for line in (ROOT / "requirements-ci.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = {
        canonicalize_name(name): version
        for name, version in (line.split()[0].split("==") for line in lines)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups, wanted = (
        project["optional-dependencies"],
        [*project["dependencies"], "strands-cosmos3[dev,docs,rerun]"],
    )
    for text in wanted:  # grows by the groups that a requirement of this package itself names
        needed = Requirement(text)
        if canonicalize_name(needed.name) == "strands-cosmos3":
            wanted += [each for extra in needed.extras for each in groups[extra]]
        else:
            assert needed.specifier.contains(locked[canonicalize_name(needed.name)]), (
                f"make lock: {text} is not locked"
            )
