"""The page in a real browser: `make test-browser` installs Chromium and runs this; `pytest -m slow tests/view`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.browser import Browser, find

pytestmark = pytest.mark.slow
CHROMIUM = find()


@pytest.fixture
def page() -> Iterator[str]:
    """A `view` of the scripted expert, from the command line; Ctrl-C must end it cleanly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strands_cosmos3.cli", "view", "--backend", "scripted", "--task", "stack", "--page-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            break
    else:
        pytest.fail("view ended without naming its page")
    yield match[0]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest


def reddish(picture: np.ndarray) -> np.ndarray:
    red, green, blue = (picture[..., k].astype(int) for k in range(3))
    return (red > 120) & (red > green + 60) & (red > blue + 60)


def test_the_page_shows_an_arm_that_moves_and_counts(page: str, tmp_path: Path):
    assert CHROMIUM is not None, "no Chromium: `make test-browser` and `make test-slow` install it (apt-get install chromium)"
    with Browser(CHROMIUM, tmp_path / "home") as browser:
        browser.open(page)
        browser.wait("document.querySelector('canvas') !== null && document.getElementById('status') !== null")
        browser.wait("document.getElementById('status').innerText.includes('RUNNING')")
        time.sleep(8.0)  # the meshes arrive, the first frames are drawn
        pictures, texts = [], []
        for _ in range(4):
            pictures.append(browser.picture())
            texts.append(browser.text("status"))
            time.sleep(4.0)
        width = int(browser.evaluate("document.querySelector('canvas').getBoundingClientRect().width"))
        errors = browser.errors
    for k, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"page{k}.png")
    assert not errors, errors
    views = [picture[:, : min(width, 960)].astype(int) for picture in pictures]
    first = views[0]
    assert (first.min(axis=2) > 225).mean() > 0.005, "no white arm"
    wood = (first[..., 0] > first[..., 2] + 12) & (first[..., 0] > 140)
    assert wood.mean() > 0.05, "no table"
    assert reddish(first).sum() > 30, "no red cube"
    changed = [(np.abs(a - b).max(axis=2) > 40).mean() for a, b in pairwise(views)]
    assert max(changed) > 0.004, changed  # the arm's pixels move
    assert max(changed) < 0.5, changed  # and the rest stays
    assert all(re.search(r"RUNNING|STOPP|HOLD", text) for text in texts), texts
    times = [re.search(r"time\s+([\d.]+) s", text)[1] for text in texts]  # type: ignore[index]
    assert len(set(times)) > 1, times
    assert all("chunk inference" in text and re.search(r"chunks\s+\d+", text) for text in texts), texts
    assert "stack" in texts[0]
