"""LIBERO's pictures: as policies are trained on them, and as people see the scene.

robosuite returns pictures with the bottom row first. Everybody trains on pictures turned by 180
degrees, which are upright but mirrored left to right (cosmos-framework ``closed_loop_eval.py``
396-397, openpi ``main.py`` 115-122, lerobot ``LiberoProcessorStep``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""View -> robosuite's camera, in the order in which they stand side by side (cosmos-framework
``closed_loop_eval.py`` 404).
"""


def as_trained(rendered: Picture) -> Picture:
    """Return a rendered picture [H, W, 3] turned by 180 degrees: upright and mirrored."""
    return np.ascontiguousarray(rendered[::-1, ::-1])


def as_seen(rendered: Picture) -> Picture:
    """Return a rendered picture upright and not mirrored."""
    return np.ascontiguousarray(rendered[::-1])


def side_by_side(views: dict[str, Picture]) -> Picture:
    """Return the views in one picture [H, 2 W, 3], third person left, wrist right."""
    return np.concatenate([views[name] for name in CAMERAS], axis=1)
