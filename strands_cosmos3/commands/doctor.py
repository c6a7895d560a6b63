"""``strands-cosmos3 doctor``: check what works on this machine, and print a remedy for what does
not.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strands_cosmos3 import __version__
from strands_cosmos3.commands.files import require_writable, write_json
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import Cosmos3Error, MissingDependencyError
from strands_cosmos3.extras import EXTRAS, needed_by, pip_command

OK, ABSENT, BROKEN = "ok", "absent", "broken"
_MARKS = {OK: "[green]ok[/green]", ABSENT: "[yellow]absent[/yellow]", BROKEN: "[red]broken[/red]"}
_Check = Callable[[], tuple[str, str]]
"""Returns what was found, and a remedy if something optional is missing; an exception means that
it does not work.
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    what: str
    state: str  # ok, absent (optional and missing) or broken (required and not working)
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and say how to fix what does not work.

    It imports the dependencies, and solves, simulates, renders and encodes something small.
    The exit status is 1 if something that a rollout needs is broken.
    """

    json: Path | None = None
    """Write the findings (.json)."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs: none."""
        return ()

    def run(self) -> int:
        """Run all checks and print a table."""
        require_writable(self.json, (".json",), "--json")
        console = Console()
        findings = [_try(*check) for check in _CHECKS]
        console.print(
            f"strands-cosmos3 {__version__}, Python {platform.python_version()}", highlight=False
        )
        console.print(_table(findings))
        _print_extras(console)
        if self.json is not None:
            write_json(
                self.json,
                {"version": __version__, "findings": [vars(finding) for finding in findings]},
            )
        broken = [finding.what for finding in findings if finding.state == BROKEN]
        missing = [
            finding.what
            for finding in findings
            if finding.what in _OF_A_CHECKPOINT and finding.state != OK
        ]
        verdict = "the main job can run: strands-cosmos3 rollout"
        if broken:
            verdict = f"the main job cannot run: {', '.join(broken)}"
        elif missing:
            verdict = (
                "the main job can run without a checkpoint: strands-cosmos3 rollout --backend "
                "scripted "
            )
            verdict += f"(absent: {', '.join(missing)})"
        console.print(verdict)
        return int(bool(broken))


def _try(what: str, required: bool, check: _Check, remedy: str) -> Finding:
    """Run one check. An exception becomes a finding."""
    try:
        with needed_by(what):
            detail, own_remedy = check()
    except MissingDependencyError as error:
        return Finding(
            what, BROKEN if required else ABSENT, "not installed", str(error).partition(": ")[2]
        )
    except (Cosmos3Error, ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        return Finding(
            what, BROKEN if required else ABSENT, f"{type(error).__name__}: {error}", remedy
        )
    return Finding(what, ABSENT if own_remedy else OK, detail, own_remedy)


def _package(name: str) -> _Check:
    def check() -> tuple[str, str]:
        import_module(name)
        return version(name), ""

    return check


def _data() -> tuple[str, str]:
    from strands_cosmos3.actions.stats import load_action_stats
    from strands_cosmos3.resources import resource

    stats = sorted(path.stem for path in resource("stats").glob("*.json"))
    for name in stats:
        load_action_stats(name)
    return f"{len(stats)} statistics, {resource('assets')}", ""


def _arm() -> tuple[str, str]:
    import mujoco

    from strands_cosmos3.robots.model import load_panda

    model = load_panda()
    mujoco.mj_step(model, mujoco.MjData(model), nstep=60)
    return (
        f"embedded panda: {model.nq} joints, {model.nbody} bodies, {1 / model.opt.timestep:.0f} Hz",
        "",
    )


def _kinematics() -> tuple[str, str]:
    import numpy as np

    from strands_cosmos3.control.ik import MinkIKBridge
    from strands_cosmos3.robots.model import load_panda
    from strands_cosmos3.robots.panda import HOME_Q, dh_forward

    q_rad = HOME_Q + 0.2 * np.sin(np.linspace(0, np.pi / 2, 33))[:, None]
    bridge = MinkIKBridge(load_panda())
    start, poses = np.zeros(bridge.model.nq), dh_forward(q_rad[1:])
    start[bridge.q_address] = q_rad[0]
    worst = max(
        float(bridge.solve(poses, start, None, method).residual_m.max())
        for method in ("auto", "mink")
    )
    return f"both methods within {worst * 1e3:.1e} mm", ""


def _limits() -> tuple[str, str]:
    from strands_cosmos3.robots.catalogue import is_present, packaged_robots

    assumed = {
        robot.name: {rate for limb in robot.limbs for rate in limb.limits.assumed}
        for robot in packaged_robots().values()
        if is_present(robot)
    }
    names = [f"{name} ({', '.join(sorted(rates))})" for name, rates in assumed.items() if rates]
    return (
        f"all published for {', '.join(name for name in assumed if not assumed[name])}; "
        f"assumed: {', '.join(names)}",
        "",
    )


def _gl() -> tuple[str, str]:
    import mujoco

    from strands_cosmos3.sim.render import Renderer
    from strands_cosmos3.sim.scene import Scene

    scene = Scene()
    data = mujoco.MjData(scene.model)
    mujoco.mj_forward(scene.model, data)
    with Renderer(scene.model) as renderer:
        picture = renderer.render(data, "exterior_1")
        backend = renderer.backend
    if int(picture.max()) - int(picture.min()) < 10:
        raise RuntimeError(f"backend {backend!r} renders an empty image")
    return f"{backend}: rendered an image of 320 x 180", ""


def _film() -> tuple[str, str]:
    import tempfile

    import numpy as np

    from strands_cosmos3.sim.record import VideoWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        with VideoWriter(path, 15) as writer:
            writer.write(np.zeros((180, 320, 3), np.uint8))
        return f"H.264 through PyAV {version('av')}, {path.stat().st_size} bytes", ""


def _wire() -> tuple[str, str]:
    import numpy as np

    from strands_cosmos3.serving.codec import decode, encode

    import_module("strands_cosmos3.serving.server")
    picture = np.zeros((360, 640, 3), np.uint8)
    if not np.array_equal(decode(encode(picture)), picture):
        raise RuntimeError("an encoded image is not decoded to the same image")
    return (
        f"websockets {version('websockets')}, msgpack {version('msgpack')}: encoded and decoded "
        "an image",
        "",
    )


def _display() -> tuple[str, str]:
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not display:
        return "no DISPLAY", "only rollout --view needs one; --video works without"
    return display or sys.platform, ""


def _gpus() -> tuple[str, str]:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return "none that torch can use", "not needed for simulation"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())), ""


def _hub_cache() -> tuple[str, str]:
    home = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    models = sorted(
        path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*")
    )
    if not models:
        return f"no models in {cache}", "none needed: the bundled policy is part of the package"
    return f"{cache}: {', '.join(models)}", ""


def _bundled() -> tuple[str, str]:
    return json.loads((embedded_checkpoint() / "checkpoint.json").read_text())["strands_cosmos3"][
        "label"
    ], ""


def _menagerie() -> tuple[str, str]:
    cache = Path(
        os.environ.get("ROBOT_DESCRIPTIONS_CACHE")
        or Path("~/.cache/robot_descriptions").expanduser()
    )
    found = cache / "mujoco_menagerie" / "franka_emika_panda"
    if not found.is_dir():
        return (
            f"not in {cache}",
            "only load_model('menagerie') needs it, and downloads it from GitHub",
        )
    return str(found), ""


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False)
    for finding in findings:
        detail = finding.detail + (
            f"; {finding.remedy}" if finding.state != OK and finding.remedy else ""
        )
        table.add_row(_MARKS[finding.state], finding.what, escape(detail))
    return table


def _print_extras(console: Console) -> None:
    """Print what each extra enables, and below those that are missing the command that installs
    them.
    """
    console.print("Extras:")
    for name, extra in EXTRAS.items():
        console.print(
            f"  {_MARKS[ABSENT if extra.absent else OK]:27} {name:7} {extra.enables}",
            highlight=False,
            soft_wrap=True,
        )
        if extra.absent:
            console.print(f"{'':18}{escape(pip_command([name]))}", highlight=False, soft_wrap=True)


_OF_A_CHECKPOINT = ("torch", "embedded policy")
"""Checks of what a rollout without ``--backend`` needs in addition."""
# name, whether a rollout needs it, check, remedy
_CHECKS: tuple[tuple[str, bool, _Check, str], ...] = (
    ("python", True, lambda: (f"{sys.executable}, {os.cpu_count()} cores", ""), ""),
    ("mujoco", True, _package("mujoco"), ""),
    ("mink", True, _package("mink"), ""),
    ("packaged data", True, _data, "reinstall strands-cosmos3"),
    ("arm model", True, _arm, ""),
    ("robots' limits", False, _limits, ""),
    ("inverse kinematics", True, _kinematics, ""),
    ("rendering", True, _gl, "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri"),
    ("films", True, _film, pip_command(["sim"])),
    ("plots", False, _package("matplotlib"), ""),
    ("policy wire", False, _wire, ""),
    ("ray", False, _package("ray"), ""),
    ("viser", False, _package("viser"), ""),
    ("pyarrow", False, _package("pyarrow"), ""),
    ("peft", False, _package("peft"), ""),
    ("display", False, _display, ""),
    ("torch", False, _package("torch"), ""),
    (
        "embedded policy",
        False,
        _bundled,
        "reinstall strands-cosmos3; any other backend works without it",
    ),
    ("GPUs", False, _gpus, "not needed for simulation"),
    ("hub cache", False, _hub_cache, ""),
    ("Menagerie's models", False, _menagerie, ""),
)
