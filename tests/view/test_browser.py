"""The page in a real browser: `make test-browser` installs Chromium and runs this; `pytest -m
slow tests/view`.
"""

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
from strands_cosmos3.view.page import MEANINGS

pytestmark = pytest.mark.slow
CHROMIUM = find()


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[str]:
    """A `view` from the command line; Ctrl-C must end it cleanly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strands_cosmos3.cli", "view", *request.param, "--page-port", "0"],
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


@pytest.mark.parametrize("page", [("--backend", "scripted", "--task", "stack")], indirect=True)
def test_the_page_shows_an_arm_that_moves_and_counts(page: str, tmp_path: Path):
    assert CHROMIUM is not None, (
        "no Chromium: `make test-browser` and `make test-slow` install it (apt-get install "
        "chromium)"
    )
    with Browser(CHROMIUM, tmp_path / "home") as browser:
        browser.open(page)
        browser.wait(
            "document.querySelector('canvas') !== null && document.getElementById('status') !== "
            "null"
        )
        browser.wait("document.getElementById('status').innerText.includes('RUNNING')")
        time.sleep(8.0)  # the meshes arrive, the first frames are drawn
        pictures, texts = [], []
        for _ in range(4):
            pictures.append(browser.picture())
            texts.append(browser.text("status"))
            time.sleep(4.0)
        width = int(
            browser.evaluate("document.querySelector('canvas').getBoundingClientRect().width")
        )
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
    assert all("chunk inference" in text and re.search(r"chunks\s+\d+", text) for text in texts), (
        texts
    )
    assert "stack" in texts[0]


FIELD = (
    "[...document.querySelectorAll('input')].find(e => e.type === 'text' && "
    "e.value.includes('cube'))"
)


def button(name: str) -> str:
    return f"[...document.querySelectorAll('button')].find(e => e.innerText === {name!r})"


@pytest.mark.parametrize("page", [("--seed", "2")], indirect=True)
def test_a_typed_instruction_is_carried_out_by_the_bundled_policy(page: str, tmp_path: Path):
    """What it does not know is refused on the page, and the old episode goes on; the blue cube is
    picked up.

    The screenshot of the documentation, docs/live_page.webp, is this test's page.png.
    """
    assert CHROMIUM is not None, (
        "no Chromium: `make test-browser` and `make test-slow` install it (apt-get install "
        "chromium)"
    )
    with Browser(CHROMIUM, tmp_path / "home") as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1360,
            height=1180,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.open(page)
        browser.wait(f"document.getElementById('refusal') !== null && {FIELD} !== undefined")
        browser.wait("document.getElementById('status').innerText.includes('RUNNING')")
        browser.write(FIELD, "pick up the yellow cube")
        browser.wait("document.getElementById('refusal').innerText.includes('yellow')")
        assert "pick or reach" in browser.text("refusal") or "reach or pick" in browser.text(
            "refusal"
        )
        assert "pick up the red cube" in browser.text("status")
        Image.fromarray(browser.picture()).save(tmp_path / "refused.png")
        browser.write(FIELD, "pick up the blue cube")
        browser.wait(
            "document.getElementById('status').innerText.includes('pick up the blue cube')"
        )
        assert browser.text("refusal") == ""
        browser.click(button("Pause"))
        browser.wait("document.getElementById('tally').innerText.includes('The clock is stopped.')")
        time.sleep(2.0)  # the last figures arrive
        stood = browser.text("status")
        time.sleep(4.0)
        assert browser.text("status") == stood
        browser.click(button("Resume"))
        ended = (
            "[...document.querySelectorAll('#tally span[title]')].find(e => "
            "e.title.startsWith('pick up the blue cube'))"
        )
        browser.wait(f"{ended} !== undefined")
        Image.fromarray(browser.picture()).save(tmp_path / "page.png")
        assert "success" in browser.evaluate(f"{ended}.title")
        assert "succeeded" in browser.text("tally")
        tooltip = (
            "[...document.querySelectorAll('#status span[title]')].find(e => "
            "e.innerText.startsWith('chunks')).title"
        )
        assert browser.evaluate(tooltip) == MEANINGS["chunks"]
        assert re.search(r"novelty\s+\d\.\d\d \(limit 1\)", browser.text("status"))
        errors = browser.errors
    assert not errors, errors
