"""Which files are a policy's source."""

import sys
from pathlib import Path

import pytest
import rich
import typing_extensions

from strands_cosmos3.evaluation.policies import source_sha256
from strands_cosmos3.evaluation.sources import sources_of

POLICY = """
class Policy:
    def get_actions_sync(self, observation, instruction):
        {late}
        return []
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write files of a project whose names are this test's own, and return its digest."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"p{abs(hash(tmp_path)):x}"

    def write(files):
        for path, text in files.items():
            file = tmp_path / path.replace("NAME", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("NAME", name))
        return name

    return write


@pytest.mark.parametrize(
    ("policy", "files", "edited"),
    [
        ("import NAME_a", {"NAME_a.py": "import NAME_b", "NAME_b.py": ""}, "NAME_b.py"),
        ("from NAME_pkg import heads", {"NAME_pkg/heads.py": ""}, "NAME_pkg/heads.py"),
        (
            "from NAME_pkg.deep.x import *",
            {"NAME_pkg/__init__.py": "", "NAME_pkg/deep/__init__.py": "", "NAME_pkg/deep/x.py": ""},
            "NAME_pkg/deep/__init__.py",
        ),
        (
            "import NAME_pkg.a",
            {"NAME_pkg/__init__.py": "", "NAME_pkg/a.py": "from . import b", "NAME_pkg/b.py": ""},
            "NAME_pkg/b.py",
        ),
        (
            "from importlib import import_module\nimport_module('NAME_a')",
            {"NAME_a.py": ""},
            "NAME_a.py",
        ),
        (
            "import sys\nfrom pathlib import Path\n"
            "sys.path.insert(0, str(Path(__file__).parent / 'lib'))\nimport NAME_a",
            {"lib/NAME_a.py": ""},
            "lib/NAME_a.py",
        ),
        (None, {"NAME_a.py": ""}, "NAME_a.py"),
    ],
)
def test_what_a_policy_imports_from_its_folder_counts(
    project, tmp_path, monkeypatch, policy, files, edited
):
    late = "import NAME_a" if policy is None else "pass"
    text = f"{policy or ''}\n{POLICY.format(late=late)}"
    monkeypatch.setattr("sys.path", list(sys.path))
    name = project({"NAME.py": text, **files, "unrelated.py": ""})
    before = source_sha256(f"{name}:Policy")
    project({"unrelated.py": "1"})
    assert source_sha256(f"{name}:Policy") == before
    project({edited: "# edited\n" + files[edited]})
    assert source_sha256(f"{name}:Policy") != before


@pytest.mark.parametrize("linked", [True, False])
def test_folders_in_a_circle_are_searched_once(project, tmp_path, linked):
    name = project({"NAME.py": POLICY.format(late="import lib.lib.again"), "lib/again.py": ""})
    if linked:
        for link in ("lib", "again"):
            (tmp_path / "lib" / link).symlink_to(tmp_path, target_is_directory=True)
    source_sha256(f"{name}:Policy")
    assert sources_of(name) == {tmp_path / f"{name}.py", tmp_path / "lib/again.py"}


def test_what_is_installed_and_this_package_do_not_count(project, tmp_path):
    name = project(
        {
            "NAME.py": POLICY.format(late="import os, numpy, strands_cosmos3.types, nowhere"),
            "strands_cosmos3/__init__.py": "",
            "strands_cosmos3/types.py": "",
        }
    )
    source_sha256(f"{name}:Policy")
    assert sources_of(name) == {tmp_path / f"{name}.py"}
    installed = Path(rich.__file__).parent
    assert {installed / "__init__.py", installed / "console.py"} <= sources_of("rich")
    assert all(path.is_relative_to(installed) for path in sources_of("rich"))
    assert sources_of("typing_extensions") == {Path(typing_extensions.__file__)}
    assert sources_of("sys") == sources_of("nowhere") == set()
