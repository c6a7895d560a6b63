"""``strands-cosmos3 doctor``: check what works on this machine, and print a remedy for what does
not.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strands_cosmos3 import __version__
from strands_cosmos3.commands.files import require_writable
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import Cosmos3Error, MissingDependencyError
from strands_cosmos3.extras import EXTRAS, OF_BACKEND, needed_by, pip_command
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.resources import load_json, write_json

OK, ABSENT, BROKEN = "ok", "absent", "broken"
_MARKS = {OK: "[green]ok[/green]", ABSENT: "[yellow]absent[/yellow]", BROKEN: "[red]broken[/red]"}
_Check = Callable[[], str | tuple[str, str]]
"""Returns what was found, with a remedy if something optional is missing; an exception means that
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

    extras: ClassVar[tuple[str, ...]] = ()
    """Extras of the package that it needs."""

    def run(self) -> int:
        """Run all checks and print a table."""
        require_writable(self.json, (".json",), "--json")
        console = Console(highlight=False, soft_wrap=True)
        table = Table(box=None, show_header=False)
        findings = [_try(*check) for check in _CHECKS]
        console.print(f"strands-cosmos3 {__version__}, Python {platform.python_version()}")
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.state != OK and finding.remedy else ""
            table.add_row(_MARKS[finding.state], finding.what, escape(finding.detail + remedy))
        console.print(table, soft_wrap=False)
        console.print("Extras:")
        for name, extra in EXTRAS.items():
            mark = _MARKS[ABSENT if extra.absent else OK]
            console.print(f"  {mark:27} {name:9} {extra.enables}")
            if extra.absent:
                console.print(f"{'':18}{escape(pip_command([name]))}")
        if self.json is not None:
            report = {"version": __version__, "findings": [vars(finding) for finding in findings]}
            write_json(self.json, report)
        broken, absent = (
            [finding.what for finding in findings if finding.state == state]
            for state in (BROKEN, ABSENT)
        )
        missing = [what for what in absent if what in _OF_A_CHECKPOINT]
        verdict = "the main job can run: strands-cosmos3 rollout"
        if broken:
            verdict = f"the main job cannot run: {', '.join(broken)}"
        elif missing:
            verdict = (
                "the main job can run without a checkpoint: strands-cosmos3 rollout --backend "
                f"scripted (absent: {', '.join(missing)})"
            )
        console.print(verdict)
        return int(bool(broken))


def _try(what: str, required: bool, check: _Check) -> Finding:
    """Run one check. An exception becomes a finding."""
    state = BROKEN if required else ABSENT
    try:
        with needed_by(what):
            found = check()
    except MissingDependencyError as error:
        return Finding(what, state, "not installed", str(error).partition(": ")[2])
    except (Cosmos3Error, ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        return Finding(what, state, f"{type(error).__name__}: {error}", _REMEDIES.get(what, ""))
    return Finding(what, OK, found) if isinstance(found, str) else Finding(what, ABSENT, *found)


def _package(name: str) -> _Check:
    def check() -> str:
        import_module(name)
        return version(name)

    return check


def _data() -> str:
    from strands_cosmos3.actions.stats import load_action_stats
    from strands_cosmos3.resources import resource

    stats = sorted(path.stem for path in resource("stats").glob("*.json"))
    for name in stats:
        load_action_stats(name)
    return f"{len(stats)} statistics, {resource('assets')}"


def _kinematics() -> str:
    import numpy as np

    from strands_cosmos3.control.ik import MinkIKBridge
    from strands_cosmos3.robots.model import load_panda
    from strands_cosmos3.robots.panda import HOME_Q, dh_forward

    q_rad = HOME_Q + 0.2 * np.sin(np.linspace(0, np.pi / 2, 33))[:, None]
    bridge = MinkIKBridge(load_panda())
    start = np.zeros(bridge.model.nq)
    poses = dh_forward(q_rad[1:])
    start[bridge.q_address] = q_rad[0]
    worst_m = max(
        bridge.solve(poses, start, None, method).residual_m.max() for method in ("auto", "mink")
    )
    return f"both methods within {worst_m * 1e3:.1e} mm on the embedded panda"


def _limits() -> str:
    from strands_cosmos3.robots.catalogue import is_present, packaged_robots

    assumed = {
        robot.name: {rate for limb in robot.limbs for rate in limb.limits.assumed}
        for robot in packaged_robots().values()
        if is_present(robot)
    }
    names = [f"{name} ({', '.join(sorted(rates))})" for name, rates in assumed.items() if rates]
    published = ", ".join(name for name, rates in assumed.items() if not rates)
    return f"all published for {published}; assumed: {', '.join(names)}"


def _gl() -> str:
    import mujoco

    from strands_cosmos3.sim.render import Renderer
    from strands_cosmos3.sim.scene import Scene

    scene = Scene()
    data = mujoco.MjData(scene.model)
    mujoco.mj_step(scene.model, data, nstep=60)
    with Renderer(scene.model) as renderer:
        picture = renderer.render(data, "exterior_1")
        backend = renderer.backend
    if int(picture.max()) - int(picture.min()) < 10:
        raise RuntimeError(f"backend {backend!r} renders an empty image")
    return f"{backend}: simulated 0.1 s, rendered an image of 320 x 180"


def _film() -> str:
    import tempfile

    import numpy as np

    from strands_cosmos3.films import VideoWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        with VideoWriter(path, 15) as writer:
            writer.write(np.zeros((180, 320, 3), np.uint8))
        return f"H.264 through PyAV {version('av')}, {path.stat().st_size} bytes"


def _wire() -> str:
    import numpy as np

    from strands_cosmos3.serving.codec import decode, encode

    import_module("strands_cosmos3.serving.server")
    picture = np.zeros((360, 640, 3), np.uint8)
    if not np.array_equal(decode(encode(picture)), picture):
        raise RuntimeError("an encoded image is not decoded to the same image")
    return (
        f"websockets {version('websockets')}, msgpack {version('msgpack')}: encoded and decoded "
        "an image"
    )


def _display() -> str | tuple[str, str]:
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not display:
        return "no DISPLAY", "only rollout --view needs one; --video works without"
    return display or sys.platform


def _gpus() -> str | tuple[str, str]:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return "none that torch can use", "not needed for simulation"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _hub_cache() -> str | tuple[str, str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    models = sorted(
        path.name.removeprefix("models--").replace("--", "/")
        for path in Path(HF_HUB_CACHE).glob("models--*")
    )
    if not models:
        return f"no models in {HF_HUB_CACHE}", "the bundled policy needs none"
    return f"{HF_HUB_CACHE}: {', '.join(models)}"


def _bundled() -> str | tuple[str, str]:
    label = load_json(embedded_checkpoint() / "checkpoint.json")["strands_cosmos3"]["label"]
    engine = PolicyOptions().bundled_backend
    if any(EXTRAS[extra].absent for extra in OF_BACKEND[engine]):
        return "nothing that runs it is installed", pip_command(["onnx"])
    package = {"onnx": "onnxruntime", "native": "torch"}[engine]
    return f"{label}; backend {engine} runs it ({package} {version(package)})"


def _menagerie() -> tuple[str, str]:
    default = "~/.cache/robot_descriptions"
    cache = Path(os.environ.get("ROBOT_DESCRIPTIONS_CACHE") or default).expanduser()
    folder = cache / "mujoco_menagerie" / "franka_emika_panda"
    if folder.is_dir():
        return str(folder), ""
    return f"not in {cache}", "only load_model('menagerie') needs it, and downloads it from GitHub"


_OF_A_CHECKPOINT = ("embedded policy",)
"""Checks of what a rollout without ``--backend`` needs in addition."""
# name, whether a rollout needs it, check
_CHECKS: tuple[tuple[str, bool, _Check], ...] = (
    ("python", True, lambda: f"{sys.executable}, {os.cpu_count()} cores"),
    ("mujoco", True, _package("mujoco")),
    ("mink", True, _package("mink")),
    ("packaged data", True, _data),
    ("robots' limits", False, _limits),
    ("inverse kinematics", True, _kinematics),
    ("rendering", True, _gl),
    ("films", True, _film),
    ("plots", False, _package("matplotlib")),
    ("policy wire", False, _wire),
    *(
        (name, False, _package(name))
        for name in ("ray", "viser", "pyarrow", "peft", "onnxruntime", "torch")
    ),
    ("display", False, _display),
    ("embedded policy", False, _bundled),
    ("GPUs", False, _gpus),
    ("hub cache", False, _hub_cache),
    ("Menagerie's models", False, _menagerie),
)
_REMEDIES = {
    "packaged data": "reinstall strands-cosmos3",
    "rendering": "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "films": pip_command(["sim"]),
    "embedded policy": "reinstall strands-cosmos3; any other backend works without it",
    "GPUs": "not needed for simulation",
}
