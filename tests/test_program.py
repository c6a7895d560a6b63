"""The first minutes of a process: interrupted imports, terminals of another encoding, choices."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.robots.catalogue import get_robot, write_robot

SLOW = pytest.mark.slow
INTERRUPTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Finder())
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strands_cosmos3", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "name",
    [
        "strands_cosmos3.cli",
        "numpy.linalg",
        *(pytest.param(n, marks=SLOW) for n in ("tyro", "mujoco")),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(tmp_path: Path, name: str):
    """A library that is being imported may turn KeyboardInterrupt into an error of its own."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING.format(name=name))
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    ended = run(["rollout", "--backend", "scripted"], PYTHONPATH=path)
    assert ended.returncode == 130
    assert ended.stderr.splitlines() == ["strands-cosmos3: interrupted."]


# ASCII lacks whatever they lack
ENCODINGS = ("ascii", *(pytest.param(name, marks=SLOW) for name in ("latin-1", "cp437")))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_terminal_that_lacks_a_character_shows_another(tmp_path: Path, encoding: str):
    """Files are UTF-8 whatever the locale says."""
    file = tmp_path / "arm.toml"
    file.write_text(write_robot(replace(get_robot("ur5e"), title="Árm – 机器人")), "utf-8")
    ended = run(
        ["robot", "inspect", str(file)], PYTHONIOENCODING=encoding, LC_ALL="C", PYTHONUTF8="0"
    )
    assert ended.returncode == 0, ended.stderr
    assert "simulation take it" in ended.stdout
    assert not ended.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rollout", "--backend", "sripted"], "Did you mean 'scripted'?"),
        (["infer", "--mode", "polcy"], "Did you mean 'policy'?"),
        (["serve", "--dtype", "float23"], "Did you mean 'float32'?"),
        (["robot", "fetsh"], "Did you mean 'fetch'?"),
    ],
)
def test_a_choice_has_a_suggestion_and_a_sorted_list(capsys, arguments, hint):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert hint in printed
    names = printed.split("Valid: ")[1].split(".")[0].split(", ")
    assert names == sorted(names)
    assert "None" not in names


@pytest.mark.parametrize("arguments", [["robot", "list"], ["--version"], ["help", "robot"]])
def test_output_on_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "strands_cosmos3", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "strands-cosmos3: the output cannot be written (No space left on device).\n"
    )


@pytest.mark.parametrize(
    "library", ["gpu", *(pytest.param(n, marks=SLOW) for n in ("foo", "opengl"))]
)
def test_a_library_that_mujoco_cannot_draw_with_is_one_line(library):
    ended = run(["rollout", "--backend", "scripted"], MUJOCO_GL=library)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert library in line
    assert "set MUJOCO_GL to egl, osmesa or glfw" in line


@pytest.mark.parametrize(
    "arguments", [["robot", "list"], ["doctor"], ["rollout", "--json", "a.json"]]
)
def test_a_folder_that_was_deleted_is_one_line(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    program = (
        f"import os; os.rmdir({str(tmp_path)!r}); import strands_cosmos3.__main__ as m; m.program()"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path[1:])))
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert ended.stderr == "strands-cosmos3: this folder was deleted; change into another one.\n"


@pytest.mark.parametrize(
    ("typed", "offered"), [("ro", "rollout"), ("rollout --inst", "--instruction")]
)
def test_tab_completes_what_the_help_promises(typed, offered, tmp_path):
    """In bash itself: the script that the program prints, asked as the Tab key asks."""
    script = tmp_path / "completion.sh"
    script.write_text(run(["--tyro-print-completion", "bash"]).stdout)
    asked = f"""
source {script}
COMP_WORDS=(strands-cosmos3 {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="strands-cosmos3 {typed}"; COMP_POINT=${{#COMP_LINE}}
$(complete -p strands-cosmos3 | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${{COMPREPLY[@]}}"
"""
    said = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert offered in said.stdout.split()
