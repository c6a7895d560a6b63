"""The web page: a 3D scene with a panel beside it. It does not depend on policies."""

from __future__ import annotations

import html
import io
import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import viser
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, whole_number
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.monitors import ScoreLimit
from strands_cosmos3.resources import Closeable
from strands_cosmos3.sim.scene import Scene
from strands_cosmos3.tables import read_toml
from strands_cosmos3.view.geometry import body_meshes
from strands_cosmos3.view.origins import only_own_pages, require_origins

COMMANDED_RGB = (246, 140, 40)
ACHIEVED_RGB = (40, 150, 235)
_TITLE = "strands_cosmos3"
_TRAIL_M = 0.003
_STATE_RGB = {
    "RUNNING": "#2f9e5b",
    "HOLD": "#d08a12",
    "STOPPING": "#d08a12",
    "STOPPED": "#6b7280",
    "IDLE": "#6b7280",
    "FAULT": "#cf3a32",
    "PLAYBACK": "#2b7fd0",
}
_NO_PREDICTION = "this backend predicts no video"
_PREDICTED = "predicted by the model, not observed"
_BESIDE = "left: observed now; right: predicted by the model for now"
_BLANK = 225
_LINE = (
    '<span style="display:inline-block;width:18px;height:4px;margin:0 6px 3px 0;background:rgb{}">'
    '</span><span style="margin-right:16px">{} path</span>'
)
_LEGEND = (
    '<div style="padding:2px 10px 8px;font-size:13px">'
    f"{_LINE.format(COMMANDED_RGB, 'commanded')}{_LINE.format(ACHIEVED_RGB, 'achieved')}</div>"
)
MEANINGS: Mapping[str, str] = read_toml(Path(__file__).with_name("counters.toml"))
"""What the figures and counters mean, in a sentence each."""


@dataclass(frozen=True)
class Status:
    """Contents of the panel.

    Args:
        state: The executor's state, in capitals.
        instruction: The policy's instruction.
        source: Source of actions, e.g. ``"scripted"``.
        time_s: Simulated time of the episode.
        outcome: The outcome, or empty.
        inference_ms: Wall-clock time of the latest chunk, or None before the first.
        counters: Events by name.
        scores: Those of the latest chunk, by their limits; unusual above them.
    """

    state: str
    instruction: str
    source: str
    time_s: float
    outcome: str = ""
    inference_ms: float | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[ScoreLimit, float] = field(default_factory=dict)

    def to_html(self) -> str:
        """Return this part of the panel; counters that are zero are left out."""
        colour = _STATE_RGB.get(self.state, "#6b7280")
        inference = "-" if self.inference_ms is None else f"{self.inference_ms:.1f} ms"
        figures = {
            "backend": self.source,
            "time": f"{self.time_s:.2f} s",
            "chunk inference": inference,
        }
        for limit, score in self.scores.items():
            figures[limit.score] = f"{score:.2f} (limit {limit.limit:g})"
        unusual = [limit.score for limit, score in self.scores.items() if score > limit.limit]
        happened = {name: str(count) for name, count in self.counters.items() if count}
        return (
            '<div style="padding:4px 10px 8px;font-size:13px;line-height:1.45" id="status">'
            '<div style="margin:0 0 6px"><span '
            f'style="background:{colour};color:white;border-radius:4px;padding:2px 9px;'
            f'font-weight:600;letter-spacing:.04em">{html.escape(self.state)}</span>'
            f'<span style="margin-left:9px">{html.escape(self.outcome)}</span></div>'
            '<div style="font-weight:600;margin-bottom:5px">'
            f"{html.escape(self.instruction) or 'no instruction'}</div>"
            f"<div>{_chips(figures, unusual)}</div><div>{_chips(happened)}</div></div>"
        )


def _chips(values: Mapping[str, str], unusual: Collection[str] = ()) -> str:
    """Names and values in a row, each with its meaning as a tooltip; unusual ones are red."""
    return "".join(
        f'<span title="{html.escape(MEANINGS.get(name, name))}" '
        'style="display:inline-block;margin-right:14px;cursor:help'
        f'{";color:" + _STATE_RGB["FAULT"] + ";font-weight:600" if name in unusual else ""}">'
        f'<span style="opacity:.65">{html.escape(name.replace("_", " "))}</span> '
        f'<span style="font-variant-numeric:tabular-nums">{html.escape(value)}</span></span> '
        for name, value in values.items()
    )


@dataclass(frozen=True)
class Gauge:
    """A figure on the page.

    Args:
        name: Of the joint or gripper.
        value: The figure as text, with its unit.
        filled: Where it lies in its range, 0 to 1; None if the range is not known.
    """

    name: str
    value: str
    filled: float | None


def limb_gauges(scene: Scene, q_rad: F64, gripper: float | F64) -> dict[str, list[Gauge]]:
    """Return the joints of each limb, base first, and its gripper: from joint positions [n] of all
    limbs, and an open fraction, or those [G] of several.
    """
    gauges: dict[str, list[Gauge]] = {}
    openings = np.atleast_1d(gripper).tolist()
    for (name, limb), opening in zip(scene.limbs.items(), openings, strict=True):
        joints = zip(limb.limb.joints, q_rad[limb.columns].tolist(), strict=True)
        gauges[name] = [_joint_gauge(scene.model, joint, q) for joint, q in joints]
        gauges[name].append(Gauge("gripper", f"{100 * opening:.0f} % open", opening))
    return gauges


def _joint_gauge(model: mujoco.MjModel, name: str, q: float) -> Gauge:
    joint = model.joint(name)
    low, high = joint.range.tolist()
    filled = (q - low) / (high - low) if joint.limited and high > low else None
    slides = joint.type == mujoco.mjtJoint.mjJNT_SLIDE
    return Gauge(name, f"{1e3 * q:.1f} mm" if slides else f"{np.rad2deg(q):.1f}°", filled)


def limbs_html(limbs: Mapping[str, Sequence[Gauge]]) -> str:
    """Return the limbs side by side, each a column of gauges under its name."""
    columns = "".join(
        '<div style="flex:1;min-width:0"><div style="font-weight:600;margin-bottom:2px">'
        f"{html.escape(name)}</div>{''.join(map(_gauge_html, gauges))}</div>"
        for name, gauges in limbs.items()
    )
    return (
        '<div id="limbs" style="display:flex;gap:16px;padding:2px 10px 8px;font-size:12px;'
        f'line-height:1.35">{columns}</div>'
    )


def _gauge_html(gauge: Gauge) -> str:
    """A name, a figure, and below them a bar that marks where in its range it lies."""
    mark = ""
    if gauge.filled is not None:
        at = 100 * min(max(gauge.filled, 0.0), 1.0)
        mark = (
            '<div style="height:3px;background:rgba(128,128,128,.25);border-radius:2px;'
            'margin-bottom:2px">'
            f'<div style="position:relative;left:calc({at:.1f}% - '
            '3px);width:6px;height:3px;background:#2b7fd0"></div></div>'
        )
    name = html.escape(gauge.name)
    return (
        f'<div style="display:flex;justify-content:space-between;gap:6px" title="{name}">'
        '<span style="opacity:.75;overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
        f"{name}</span>"
        '<span style="font-variant-numeric:tabular-nums;white-space:nowrap">'
        f"{html.escape(gauge.value)}</span></div>{mark}"
    )


def require_loopback(address: str, expose: bool) -> None:
    """Check the address to serve on.

    Raises:
        ConfigError: It is not loopback and ``expose`` is off, or it is not an IPv4 address.
    """
    try:
        ip = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        raise ConfigError(
            f"{address!r} is not an IP address; use 127.0.0.1, or 0.0.0.0 with --expose."
        ) from None
    if ip.version == 6:
        raise ConfigError(
            f"{address} is an IPv6 address, and the page is served on IPv4; use 127.0.0.1, or "
            "0.0.0.0 with --expose."
        )
    if not ip.is_loopback and not expose:
        raise ConfigError(
            f"{address} can be reached from other machines, and the page has no password; add "
            "--expose to allow that, or "
            "keep 127.0.0.1 and use an ssh tunnel."
        )


class LivePage(Closeable):
    """A page that shows one robot's scene.

    Args:
        model: The scene.
        address: Interface to serve on.
        port: TCP port; 0 takes any free one.
        expose: Whether other machines may open it.
        origins: Origins of other pages that may show this one, e.g. ``https://robots.example``.
        robot: Its name, for the panel.

    Attributes:
        url: Address of the page.

    Raises:
        ConfigError: An interface that is not loopback without ``expose``, or a port in use.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        address: str = "127.0.0.1",
        port: int = 8080,
        expose: bool = False,
        origins: Collection[str] = (),
        robot: str = "",
    ):
        require_loopback(address, expose)
        require_origins(origins)
        port = _free_port(address, whole_number(port, "port", 0, 65535))
        # viser prints a banner
        with only_own_pages(frozenset(origins)), redirect_stdout(io.StringIO()):
            self.server = viser.ViserServer(address, port, label=_TITLE, verbose=False)
        self.url = (
            f"http://{'localhost' if address == '0.0.0.0' else address}:{self.server.get_port()}"
        )
        self._model = model
        self._robot = robot
        self._bodies: dict[int, Any] = {}
        self._lines: dict[str, Any] = {}
        self._open = True
        self._build_scene()
        self._build_panel()

    def _build_scene(self) -> None:
        scene = self.server.scene
        scene.set_up_direction("+z")
        scene.world_axes.visible = False
        scene.configure_default_lights(True, cast_shadow=True)
        scene.set_background_image(_backdrop(), format="jpeg", jpeg_quality=95)
        self.server.initial_camera.position = (1.22, -0.80, 0.66)
        self.server.initial_camera.look_at = (0.28, 0.02, 0.22)
        for n, ((body, rgb), mesh) in enumerate(body_meshes(self._model).items()):
            name = self._model.body(body).name
            if body not in self._bodies:
                self._bodies[body] = scene.add_frame(f"/scene/{name}", show_axes=False)
            scene.add_mesh_simple(
                f"/scene/{name}/{n}", mesh.vertices, mesh.faces, color=rgb, flat_shading=False
            )

    def _build_panel(self) -> None:
        gui = self.server.gui
        gui.configure_theme(control_width="large", show_logo=False, show_share_button=False)
        gui.main_panel.dock_right()
        gui.set_panel_label(_TITLE)
        self._status = gui.add_html("")
        # hidden until there is a picture; a page that opens late is sent updates of it
        picture = partial(gui.add_image, _backdrop(), format="jpeg", visible=False)
        with gui.add_folder("Cameras"):
            self._camera_image = picture(jpeg_quality=88)
        with gui.add_folder(f"Joints of {self._robot}" if self._robot else "Joints"):
            self._limbs = gui.add_html("")
        with gui.add_folder("Predicted beside real"):
            self._world_note = gui.add_markdown(_NO_PREDICTION)
            self._prediction = picture(jpeg_quality=85)
        with gui.add_folder("Legend"):
            gui.add_html(_LEGEND)

    def pose(self, data: mujoco.MjData) -> None:
        """Place every body at its pose in the state, as last forwarded or stepped."""
        with self.server.atomic():
            for body, frame in self._bodies.items():
                frame.position = data.xpos[body].copy()
                frame.wxyz = data.xquat[body].copy()

    def hide(self, name: str) -> None:
        """Hide a body, e.g. one whose pose is not recorded."""
        self._bodies[int(self._model.body(name).id)].visible = False

    def path(self, commanded_m: Sequence[F64], achieved_m: Sequence[F64]) -> None:
        """Draw each limb's commanded path and achieved trail, [N, 3] in the world; one of under
        two points is left out.
        """
        for name, paths, rgb, thickness in (
            ("commanded", commanded_m, COMMANDED_RGB, 2 * _TRAIL_M),
            ("achieved", achieved_m, ACHIEVED_RGB, _TRAIL_M),
        ):
            line = self._lines.pop(name, None)
            pairs = [np.stack([xyz[:-1], xyz[1:]], axis=1) for xyz in paths if len(xyz) > 1]
            segments = np.concatenate([np.empty((0, 2, 3)), *pairs]).astype(np.float32)
            if line is None and len(segments):
                self._lines[name] = self.server.scene.add_line_segments(
                    f"/paths/{name}", segments, rgb, thickness=thickness
                )
            elif line is not None and len(segments):
                self._lines[name] = line
                line.points = segments
            elif line is not None:
                line.remove()

    def limbs(self, limbs: Mapping[str, Sequence[Gauge]]) -> None:
        """Show the joints and the gripper of each limb, by name."""
        self._limbs.content = limbs_html(limbs)

    def cameras(self, views: Mapping[str, NDArray[np.uint8]]) -> None:
        """Show camera frames, [H, W, 3] uint8 by name: the first large, the others below it at
        half its size.
        """
        picture, *rest = views.values()
        if rest:
            strip = np.concatenate([view[::2, ::2] for view in rest], axis=1)
            below = np.full((len(strip), picture.shape[1], 3), 255, np.uint8)
            below[:, : strip.shape[1]] = strip[:, : picture.shape[1]]
            picture = np.concatenate([picture, below])
        self._camera_image.label = ", ".join(name.replace("_", " ") for name in views)
        self._camera_image.image = picture
        self._camera_image.visible = True

    def clear(self) -> None:
        """Remove what an episode has drawn: paths, camera frames and predictions."""
        self.path((), ())
        self.world(None)
        self._camera_image.image = np.full_like(self._camera_image.image, _BLANK)

    def world(
        self,
        frame: NDArray[np.uint8] | None,
        why_none: str = _NO_PREDICTION,
        observed: NDArray[np.uint8] | None = None,
    ) -> None:
        """Show a frame of the predicted video, beside what is observed now if given, or say why
        there is none.
        """
        self._world_note.content = (
            why_none if frame is None else _PREDICTED if observed is None else _BESIDE
        )
        if frame is not None and observed is not None:
            gap = np.full((len(frame), 4, 3), 255, np.uint8)
            frame = np.concatenate([resized(observed, *frame.shape[:2]), gap, frame], axis=1)
        self._prediction.visible = frame is not None
        if frame is not None:
            self._prediction.image = frame

    def status(self, status: Status) -> None:
        """Update the panel."""
        self._status.content = status.to_html()

    def close(self) -> None:
        """Stop serving; closing twice is harmless."""
        if self._open:
            self._open = False
            self.server.flush()
            with redirect_stdout(io.StringIO()):
                self.server.stop()


def resized(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3] at another size; each pixel is the nearest."""
    rows, columns = (
        np.arange(n) * have // n for n, have in zip((height, width), picture.shape, strict=False)
    )
    return picture[rows[:, None], columns]


def _backdrop() -> NDArray[np.uint8]:
    """Return the background, lighter above: [H, W, 3]."""
    shade = np.linspace(238, 205, 90).round().astype(np.uint8)
    return np.broadcast_to(shade[:, None, None], (90, 160, 3))


def _free_port(address: str, port: int) -> int:
    """Return the port if it is free, because viser would silently take another; 0 is any free
    one.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ConfigError(
                f"{address}:{port} is not available ({error.strerror}); choose another --page-port."
            ) from None
        return int(probe.getsockname()[1])
