"""Hostile input at random: frames, checkpoints and command lines. `make test-hostile` runs the
long form too.
"""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from helpers.hostile_checkpoints import spoil
from helpers.memory import peak_rss_growth
from helpers.serving import Echo, observation, picture
from strands_cosmos3.cli import main
from strands_cosmos3.errors import CheckpointError, UnknownNameError
from strands_cosmos3.serving.codec import encode
from strands_cosmos3.serving.served import Message, ServedPolicy, Session
from test_malformed_flags import COMMANDS, places  # noqa: F401 - a fixture

SHORT, LONG = "short", pytest.param("long", marks=pytest.mark.slow)
LITTLE = 200 << 20
ENDLESS_S = 30
ODD = (
    None,
    True,
    -1,
    2**63,
    float("nan"),
    float("inf"),
    "",
    "x\0\x1b[31m",
    b"\xff",
    [],
    {},
    [[]],
    {"a": {"b": []}},
)
ARRAYS = (
    np.zeros(0),
    np.full(7, np.nan),
    np.zeros((3, 7)),
    np.ones(8, np.float32),
    np.uint8(3),
    np.zeros((1, 4097, 3), np.uint8),
)


@pytest.fixture
def endless_fails():
    """An alarm that each case sets anew: nothing may take longer than :data:`ENDLESS_S`, also on
    a busy machine.
    """

    def fail(*_):
        raise AssertionError(f"still busy after {ENDLESS_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    yield lambda: signal.alarm(ENDLESS_S)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def hostile_frame(rng):
    """A good request with a strange value, key, length or byte."""
    message = observation(**{"observation/image": picture(16, 16), "cosmos3/request_id": 1})
    for _ in range(rng.randrange(3)):
        message[rng.choice([*message, "video", "endpoint", "session_id"])] = rng.choice(
            ODD + ARRAYS
        )
    frame = bytearray(encode(message))
    for _ in range(rng.randrange(4)):
        match rng.randrange(3):
            case 0:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case 1:
                del frame[rng.randrange(len(frame)) :]
            case _:
                frame[:0] = rng.randbytes(3)
        frame = frame or bytearray(1)
    return frame.decode("latin-1") if rng.random() < 0.02 else bytes(frame)


@pytest.mark.parametrize("form", [SHORT, LONG])
def test_frames(form, endless_fails, caplog):
    rng, served = random.Random(form), ServedPolicy(Echo(), "droid", "joint_pos")
    grown, good = peak_rss_growth(), encode(observation())
    outcomes = {"ok": 0, "error": 0, "reset": 0}
    for _ in range(10_000 if form == "long" else 500):
        endless_fails()
        (answer,) = served.answer([Message(hostile_frame(rng), Session(), 0.0)])
        outcomes[answer.outcome] += 1
        assert isinstance(answer.frame, bytes) or answer.frame.isprintable()
        caplog.clear()
    assert served.answer([Message(good, Session(), 0.0)])[0].outcome == "ok", (
        "other clients are served"
    )
    assert min(outcomes["ok"], outcomes["error"]) > 20, outcomes
    assert grown() < LITTLE


@pytest.mark.parametrize("form", [SHORT, LONG])
def test_checkpoints(form, endless_fails, tmp_path):
    torch = pytest.importorskip("torch")
    from recipes.random_checkpoint import write_checkpoint
    from strands_cosmos3.engine.checkpoint import Checkpoint
    from strands_cosmos3.engine.tokens import PromptTokenizer
    from strands_cosmos3.engine.vae import WanVae

    rng, good = random.Random(form), write_checkpoint(tmp_path / "good", digests=True)
    grown, refused = peak_rss_growth(), 0
    for _ in range(500 if form == "long" else 15):
        folder = Path(shutil.copytree(good, tmp_path / "c"))
        done = [spoil(folder, rng) for _ in range(rng.randrange(1, 3))]
        endless_fails()
        try:
            checkpoint = Checkpoint.open(folder)
            checkpoint.verify()
            WanVae(
                checkpoint.vae_config,
                checkpoint.vae_weights,
                torch.device("cpu"),
                torch.float32,
                False,
            )
            PromptTokenizer(folder / "text_tokenizer")
        except (CheckpointError, UnknownNameError):
            refused += 1
        except Exception as error:
            pytest.fail(f"{done}: {type(error).__name__}: {error!s:.200}")
        shutil.rmtree(folder)
    assert refused > 5
    assert grown() < LITTLE


@pytest.mark.parametrize("form", [SHORT, LONG])
def test_command_lines(form, endless_fails, places, capsys):  # noqa: F811
    rng = random.Random(form)
    for _ in range(2000 if form == "long" else 20):
        name = rng.choice(list(COMMANDS))
        good, flags = COMMANDS[name]
        arguments = [name, *good]
        for flag in rng.sample(list(flags), min(len(flags), rng.randrange(1, 4))):
            arguments += [flag, rng.choice(flags[flag])]
        if rng.random() < 0.3:
            arguments.insert(
                rng.randrange(len(arguments) + 1),
                rng.choice(["\x1b[31m", "-", "--", "--x=1", "é" * 500, "--=", " "]),
            )
        for key, place in places.items():
            arguments = [argument.replace(f"{{{key}}}", place) for argument in arguments]
        endless_fails()
        try:
            status = main(arguments)
        except SystemExit as end:  # tyro's
            status = end.code
        except Exception as error:
            pytest.fail(f"{arguments}: {type(error).__name__}: {error!s:.200}")
        said = capsys.readouterr().err
        assert status in (1, 2), (arguments, status)
        assert "Traceback" not in said, arguments
