"""A figure that several pages give has one source: the model card for success, else
benchmarks/NOTES.md, which has the command and the conditions.
"""

from __future__ import annotations

import re

import pytest

from helpers.environments import ROOT

NOTES = "benchmarks/NOTES.md"
CARD = "assets/table_policy/README.md"


def found(page: str, pattern: str) -> list[tuple[str, ...]]:
    """The groups of each match in a page."""
    return [match.groups() for match in re.finditer(pattern, (ROOT / page).read_text())]


@pytest.mark.parametrize(
    ("source", "pages"),
    [
        (
            (NOTES, r"Of a chunk's (\d+) ms"),
            [
                ("docs/performance.md", r"joint angles takes (\d+) ms"),
                ("docs/bundled_policy.md", r"joint angles takes (\d+) ms"),
            ],
        ),
        (
            (NOTES, r"tracking, slow chunks .*?mean (\S+) mm, max (\S+) mm"),
            [
                ("README.md", r"slow chunks .*?mean (\S+) mm, max (\S+) mm"),
                ("docs/performance.md", r"slow chunks .*?mean (\S+) mm, max (\S+) mm"),
            ],
        ),
        (
            (NOTES, r"tracking, brisk chunks .*?mean (\S+) mm, max (\S+) mm"),
            [
                ("README.md", r"slow chunks .* mm \((\S+), (\S+)\)"),
                ("docs/performance.md", r"brisk chunks .*?mean (\S+) mm, max (\S+) mm"),
            ],
        ),
        (
            (NOTES, r"32-row chunk to 1e-3 mm .*?\| (\S+) ms .*? takes (\S+) times as long"),
            [
                ("README.md", r"32-row chunk.*?\| (\S+) ms .*? takes (\S+) times as long"),
                ("docs/performance.md", r"32-row chunk.*?\| (\S+) ms.*? takes (\S+) times as long"),
            ],
        ),
    ],
    ids=["chunk", "slow", "brisk", "ik"],
)
def test_a_figure_is_that_of_its_source(source, pages):
    (figures,) = found(*source)
    for page in pages:
        assert found(*page) == [figures], page[0]


def success() -> dict[tuple[str, str], str]:
    """(condition, task) -> successes of 200, of the card's tables."""
    rows = found(CARD, r"\| (\S+) \| (reach|pick|place) \| (\d+) of 200 ")
    return {(condition, task): count for condition, task, count in rows}


STATED = {
    "README.md": {
        r"reach, pick and place: (\d+), (\d+) and (\d+) of 200": [
            ("plain", "reach"), ("plain", "pick"), ("plain", "place")
        ],
        r"pick within 7 s: (\d+)": [("limit=7", "pick")],
        r"\| pick (\d+) of 200; (\d+) of 200; ": [("latency=0.4", "pick"), ("camera=2", "pick")],
    },
    NOTES: {
        r"reach, pick and place (\d+), (\d+) and (\d+) of 200; with 0.4 s of latency pick (\d+); "
        r"with the wrist camera 2 cm off (\d+)": [
            ("plain", "reach"), ("plain", "pick"), ("plain", "place"),
            ("latency=0.4", "pick"), ("camera=2", "pick"),
        ],
    },
    "docs/bundled_policy.md": {
        r"\| as it is \| reach, pick, place \| (\d+), (\d+), (\d+) \|": [
            ("plain", "reach"), ("plain", "pick"), ("plain", "place")
        ],
        r"\| within 7 s \| pick \| (\d+) \|": [("limit=7", "pick")],
        r"of latency \| pick \| (\d+), (\d+), (\d+) \|": [
            ("latency=0.2", "pick"), ("latency=0.4", "pick"), ("latency=0.8", "pick")
        ],
        r"whole chunks of 16 rows \| pick \| (\d+)": [("replan=16", "pick")],
        r"white table \| pick \| (\d+), (\d+), (\d+)": [
            ("light=0.5", "pick"), ("table=dark", "pick"), ("table=white", "pick")
        ],
        r"by 2 cm \| pick \| (\d+)": [("camera=2", "pick")],
        r"another cube close by \| pick \| (\d+), (\d+)": [("cubes=32", "pick"), ("close", "pick")],
        r"words that no training had \| pick \| (\d+)": [("paraphrased", "pick")],
        r"than the judged one \| pick \| (\d+),": [("swapped", "pick")],
    },
}  # fmt: skip
"""Page -> how it says the successes -> the card's rows."""


@pytest.mark.parametrize("page", STATED)
def test_success_is_that_of_the_card(page):
    card = success()
    for said, rows in STATED[page].items():
        assert found(page, said) == [tuple(card[row] for row in rows)], said


def test_every_success_of_the_policy_s_page_is_compared():
    """The rows of its one table."""
    table = found("docs/bundled_policy.md", r"(\n\| [^|\n]+ \| (?:reach|pick).*)")
    assert len(table) == len(STATED["docs/bundled_policy.md"])
