"""docs/conventions.md names the test that guards each convention, and figures of the code; both
must be true.
"""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest

from helpers.environments import ROOT
from strands_cosmos3.control.ik import _POSTURE_STEP_RAD, POSTURE_GAIN
from strands_cosmos3.control.loop import ANCHOR_TOLERANCE_RAD
from strands_cosmos3.embodiments import RIGS, get_embodiment
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.robots.panda import T_flange_hand, T_hand_tcp, T_link7_flange
from strands_cosmos3.types import WILD_Z

PAGE = (ROOT / "docs/conventions.md").read_text()
GRIPPER = get_robot("panda").limbs[0].gripper


def yaw_deg(T):
    return np.degrees(np.arctan2(T[1, 0], T[0, 0]))


FIGURES = {
    r"(\S+) m along link7's z": [T_link7_flange[2, 3]],
    r"yawed by (\S+) degrees": [yaw_deg(T_flange_hand)],
    r"`tcp` (\S+) m on": [T_hand_tcp[2, 3]],
    r"`hand @ Rz\((\S+) deg\)`": [yaw_deg(get_embodiment("droid").tool_frame.T_parent_cosmos)],
    r"`ANCHOR_TOLERANCE_RAD` \((\S+) rad\)": [ANCHOR_TOLERANCE_RAD],
    r"by (\S+) of the distance a row and at most (\S+) rad": [POSTURE_GAIN, _POSTURE_STEP_RAD],
    r'zero is not "stay"; beyond (\S+) is a fault': [WILD_Z],
    r"beyond \\\|z\\\| = (\S+) is refused": [WILD_Z],
    r"letterboxed to (\d+) x (\d+),": RIGS["droid"].view_hw,
    r"(\S+) m = open": [GRIPPER.opening.open_value],
    r"its tendon actuator \| (\S+) = open": [GRIPPER.command.open_value],
}
"""How the page says a figure -> the code's."""


@pytest.mark.parametrize("said", FIGURES)
def test_every_figure_of_the_page_is_the_code_s(said):
    (match,) = re.finditer(said, PAGE)
    assert [float(figure) for figure in match.groups()] == pytest.approx(list(FIGURES[said]))


def test_no_figure_with_a_fraction_is_unchecked():
    text = re.sub(r"`tests/[^`]*`", "", PAGE)
    for said in FIGURES:
        text = re.sub(said, "", text)
    assert re.findall(r"[^|\n]*?\b\d*\.\d+\b", text) == [
        # an example of a command that is clipped
        " a command beyond open or closed, such as 2.0"
    ]


def test_every_guard_that_the_page_names_exists():
    guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/conventions.md").read_text())
    assert len(guards) > 30
    defined = {
        path: {
            node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")
        }
        for path, _ in guards
    }
    assert not [f"{path}::{name}" for path, name in guards if name not in defined[path]]


def test_every_line_of_its_tables_has_a_guard():
    rows = [
        line
        for line in (ROOT / "docs/conventions.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert not [row for row in rows if "::" not in row and not row.endswith("| guarded by |")]
