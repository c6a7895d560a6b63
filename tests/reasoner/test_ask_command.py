"""``strands-cosmos3 ask`` streams an answer, and ends cleanly."""

import json
import signal
import subprocess
import sys

import pytest
from PIL import Image

from helpers.environments import ROOT
from reasoner.conftest import QUESTION
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.cli import main
from strands_cosmos3.films import VideoWriter
from strands_cosmos3.reasoner.options import AskOptions


@pytest.fixture(scope="module")
def files(tmp_path_factory, pictures, film):
    folder = tmp_path_factory.mktemp("files")
    for name, picture in zip("ab", pictures, strict=False):
        Image.fromarray(picture).save(folder / f"{name}.png")
    with VideoWriter(folder / "c.mp4", film.fps) as writer:
        for frame in film.frames:
            writer.write(frame)
    return folder


def test_an_answer_is_printed(seeing, reasoners, files, capsys):
    flags = ["--image", f"{files}/a.png", "--image", f"{files}/b.png", "--video", f"{files}/c.mp4"]
    flags += ["--max-tokens", "8", "--device", "cpu"]
    assert main(["ask", "--model", str(seeing["silu"]), *flags, QUESTION]) == 0
    answer = reasoners["silu"].ask(
        QUESTION,
        [files / "a.png", files / "b.png"],
        [files / "c.mp4"],
        options=AskOptions(max_tokens=8),
    )
    printed = capsys.readouterr()
    kept = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in answer.text)
    assert printed.out == kept + "\n"
    assert "cut off after 8 tokens" in printed.err
    assert "random weights" in printed.err


def test_what_would_steer_a_terminal_is_not_printed(capsys):
    from strands_cosmos3.commands import ask

    ask._print("a\x1b[31m\n")
    assert capsys.readouterr().out == "a\ufffd[31m\n"


@pytest.mark.parametrize("in_file", [False, True])
def test_an_answer_of_a_form(in_file, seeing, tmp_path, capsys):
    schema = json.dumps({"type": "object", "properties": {"closed": {"type": "boolean"}}, "required": ["closed"], "additionalProperties": False})  # fmt: skip
    if in_file:
        (tmp_path / "form.json").write_text(schema)
        schema = str(tmp_path / "form.json")
    folder = str(seeing["relu2"])
    assert main(["ask", "--model", folder, "--json", schema, "--device", "cpu", QUESTION]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"closed"}


@pytest.mark.parametrize(
    ("flags", "status", "problem"),
    [
        (["--image", "none.png"], 2, "none.png does not exist"),
        (["--json", "none.json"], 2, "none.json does not exist"),
        (["--json", "{nonsense"], 2, "cannot be read as JSON"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--json", '{"type": "string"}', "--max-tokens", "2"], 1, "limit of tokens"),
    ],
)
def test_what_cannot_be_answered_says_why(flags, status, problem, seeing, capsys):
    command = ["ask", "--model", str(seeing["silu"]), *flags, QUESTION]
    try:
        got = main(command)
    except SystemExit as end:
        got = end.code
    printed = capsys.readouterr()
    assert got == status
    assert problem in printed.err + printed.out


def test_a_checkpoint_without_eyes_says_what_is_missing(tmp_path, capsys):
    blind = write_checkpoint(tmp_path / "blind")
    assert main(["ask", "--model", str(blind), QUESTION]) == 1
    assert "It lacks the vision encoder (vision_encoder/)" in capsys.readouterr().err


def test_ctrl_c_ends_the_stream(seeing):
    """The line that was begun ends, and the status is 130."""
    command = [sys.executable, "-W", "ignore", "-m", "strands_cosmos3", "ask", "--device", "cpu"]
    command += ["--model", str(seeing["silu"]), "--max-tokens", "100000", QUESTION]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        errors="replace",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out.endswith("\n")
    label, *said = err.splitlines()
    assert "random weights" in label
    assert said == ["strands-cosmos3: interrupted."]
