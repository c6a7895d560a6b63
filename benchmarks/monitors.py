"""The input monitors: what they cost an inference, and with episodes of the bundled policy and the
expert on our table also how many faults of the views they name, and what they name without one.

A fault is put into the views that an episode shows; the episode itself goes on with sound ones.
"""

from __future__ import annotations

import io
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import report
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.input_monitor import InputMonitor
from strands_cosmos3.monitors import InputWarning
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Request
from strands_cosmos3.worlds.table.expert import ScriptedBackend
from strands_cosmos3.worlds.world import Session, Start, get_world

Views = Mapping[str, NDArray[np.uint8]]
_HW = 180, 320
_CONDITIONS = (
    "",
    "light=0.6",
    "",
    "table=parquet",
    "",
    "camera=1",
    "",
    "crowded",
    "",
    "table=white",
    "",
    "cubes=32",
    "",
    "close",
    "",
    "mount=5",
)
_TASKS = {"expert": ("pick", "reach", "place", "stack"), "bundled": ("pick", "reach", "place")}
_NAMED_WITHIN = 2  # inferences


@dataclass
class Seen:
    """An inference: its request, its views, and the rows that answered it, if joint angles."""

    request: Request
    views: Views
    plan: JointTrajectory | None = None


class _Expert(ScriptedBackend):
    """The expert, of whose pictures the monitors are shown."""

    info = replace(ScriptedBackend.info, requires_images=True)


class _Recorded(Cosmos3Policy):
    """Keeps what its monitors were shown."""

    seen: list[Seen]

    def _look(self, observation: Observation, request: Request) -> None:
        self.seen.append(Seen(request, observation.images))
        super()._look(observation, request)

    def _solved(
        self, request: Request, chunk: Any, observation: Observation, infer_ms: float
    ) -> JointTrajectory | ActionChunk:
        plan = super()._solved(request, chunk, observation, infer_ms)
        self.seen[-1].plan = plan if isinstance(plan, JointTrajectory) else None
        return plan


def run(calls: int = 400, episodes: int = 0, seed: int = 0) -> dict[str, Any]:
    """Time the monitors; with episodes, put faults into what these show.

    Args:
        calls: Calls to time.
        episodes: Episodes on the table, half of them the expert's; each takes a few seconds.
        seed: Of the first episode.
    """
    figures: dict[str, Any] = {"calls": calls, "look_ms": report.quantiles(_cost_ms(calls))}
    if not episodes:
        return figures
    named: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    false: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    world = get_world("table")
    with world.open() as session, ExitStack() as opened:
        policies = [
            opened.enter_context(_policy(session, backend)) for backend in (_Expert(), None)
        ]
        for i in range(episodes):
            source, tasks = list(_TASKS.items())[i % 2]
            task = tasks[i // 2 % len(tasks)]
            condition = _CONDITIONS[i // 2 % len(_CONDITIONS)]
            change = world.variation.change(condition) if condition else {}
            instruction = world.instruction(task, seed + i)
            session.reset(Start(task, seed + i, seed + i, instruction, world.variation(**change)))
            policy = policies[i % 2]
            policy.seen = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InputWarning)
                rollout = session.run(policy)
            events = [name for name in InputMonitor.counters if rollout.counters[name]]
            false.update(events)
            kind = f"{condition or 'nominal'}, {rollout.outcome}"
            ended[kind] += 1
            false[f"stalled ({kind})"] += rollout.counters["stalled"] > 0
            faults = dict(_faults(policy.seen, np.random.default_rng([seed + i, 1])))
            tried.update(list(faults))
            named.update(fault for fault, hit in faults.items() if hit)
            missed = [fault for fault, hit in faults.items() if not hit]
            if events or missed:
                report.progress(
                    f"episode {i} ({source}, {task}, {kind}): named {events}, missed {missed}"
                )
            if i % 20 == 19:
                report.progress(f"monitors: {i + 1} of {episodes} episodes")
    return figures | {
        "episodes": dict(ended),
        "events_of_sound_inputs": {name: n for name, n in false.items() if n},
        "faults_named": {name: f"{named[name]} of {tried[name]}" for name in sorted(tried)},
    }


def _policy(session: Session, backend: Any) -> _Recorded:
    return _Recorded(
        backend=backend, options=session.policy_options(), **session.policy_arguments()
    )


def _cost_ms(calls: int) -> list[float]:
    """CPU time of looking at three views of 180 x 320 of an arm that moves, with a state."""
    embodiment = get_embodiment("droid")
    assert embodiment.rig is not None
    rng = np.random.default_rng(0)
    shown = [
        {name: rng.integers(0, 256, (*_HW, 3), np.uint8) for name in embodiment.rig.views}
        for _ in range(8)
    ]
    requests = [
        Request(
            embodiment,
            embodiment.action_space("joint_pos"),
            "pick",
            32,
            np.full(7, 0.05 * i),
            1.0,
            t_motion_s=0.5 * i,
        )
        for i in range(calls)
    ]
    monitor = InputMonitor()
    rows = np.arange(1, 33)[:, None] / 150 + np.zeros(7)
    row_times_s = np.arange(1, 33) / 15
    spent_ms: list[float] = []
    for i, request in enumerate(requests):
        started_s = time.thread_time()
        monitor.look(request, shown[i % len(shown)])
        monitor.follow(rows + 0.05 * i, row_times_s)
        spent_ms.append((time.thread_time() - started_s) * 1e3)
    return spent_ms


def _faults(seen: list[Seen], rng: np.random.Generator) -> Iterator[tuple[str, bool]]:
    """Faults of the views by name, and whether the monitor names them in time."""
    views = list(seen[0].views)
    victim = views[int(rng.integers(len(views)))]
    other = views[(views.index(victim) + 1) % len(views)]
    middle = int(rng.integers(1, len(seen)))
    black = np.zeros((*_HW, 3), np.uint8)
    grey = (128 + rng.normal(0, 2, black.shape)).astype(np.uint8)

    def put(change: Callable[[Views], NDArray[np.uint8]]) -> Callable[[Views], Views]:
        return lambda shown: {**shown, victim: change(shown)}

    def encoded(shown: Views) -> NDArray[np.uint8]:
        file = io.BytesIO()
        Image.fromarray(frozen_at[0]).save(file, "JPEG", quality=int(rng.integers(70, 96)))
        return np.asarray(Image.open(file))

    frozen_at = [seen[0].views[victim]]
    at_once: dict[str, tuple[str, Callable[[Views], Views]]] = {
        "black": ("camera_constant", put(lambda shown: black)),
        "grey": ("camera_constant", put(lambda shown: grey)),
        "copied": ("camera_copied", put(lambda shown: shown[other])),
    }
    for name, (event, change) in at_once.items():
        yield name, _named(seen, 0, change, event)
    for first in (0, middle):
        when = "first" if first == 0 else "middle"
        frozen_at[0] = seen[first].views[victim]
        if not _moves(seen, first):
            continue
        for how, change in (("", lambda shown: frozen_at[0]), ("_anew", encoded)):
            yield f"frozen{how}_{when}", _named(seen, first, put(change), "camera_frozen", True)
    turned: dict[str, tuple[str, Callable[[Views], Views]]] = {
        "swapped": ("camera_swapped", lambda s: {**s, victim: s[other], other: s[victim]}),
        "upside_down": ("camera_upside_down", put(lambda s: s[victim][::-1, ::-1])),
        "channels": ("camera_channels", put(lambda s: s[victim][..., ::-1])),
    }
    for name, (event, change) in turned.items():
        yield f"{name}_middle", _named(seen, middle, change, event)


def _hand_m(one: Seen) -> NDArray[np.float64]:
    return next(iter(one.request.limb_poses.values()))[:3, 3]


def _moves(seen: list[Seen], first: int) -> bool:
    """Whether the hand moves by 2 cm after an inference, and is asked twice after that."""
    return _deadline(seen, first, True) < len(seen)


def _deadline(seen: list[Seen], first: int, moving: bool) -> int:
    """The last inference at which a fault that begins at one is named in time."""
    begun = first
    if moving:
        away = [float(np.linalg.norm(_hand_m(one) - _hand_m(seen[first]))) for one in seen[first:]]
        begun += next((i for i, far in enumerate(away) if far > 0.02), len(seen))
    return begun + _NAMED_WITHIN - 1


def _named(
    seen: list[Seen],
    first: int,
    change: Callable[[Views], Views],
    event: str,
    moving: bool = False,
) -> bool:
    """Whether the monitor names an event in time, of views that change from one inference on."""
    monitor = InputMonitor()
    last = min(_deadline(seen, first, moving), len(seen) - 1)
    for i, one in enumerate(seen[: last + 1]):
        shown = one.views if i < first else change(one.views)
        if event in [name for name, _ in monitor.look(one.request, shown)]:
            return True
    return False


if __name__ == "__main__":
    report.run(run)
