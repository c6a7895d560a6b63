"""``strands-cosmos3 view``: rollouts in the browser while they happen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from strands_cosmos3.commands.rollout import Rollout, Watch
from strands_cosmos3.errors import ConfigError, MissingDependencyError
from strands_cosmos3.types import Outcome
from strands_cosmos3.types import Rollout as Episode

_WAIT_S = 0.2


@dataclass(frozen=True)
class View(Rollout):
    """Watch rollouts on a live web page: the arm, its commanded and achieved paths, cameras, predicted world, counters.

    It takes every option of rollout, runs one episode after another in real time, and serves the page to this machine
    alone. Ctrl-C brings the arm to rest and ends it. The exit status judges nothing; use rollout for that.
    """

    episodes: int = 0
    """How many episodes to run; 0 goes on until Ctrl-C. After the last one the page stays until Ctrl-C."""
    view: Annotated[bool, tyro.conf.Suppress] = False
    page_port: int = 8080
    """TCP port of the page; 0 takes any free one."""
    page_address: str = "127.0.0.1"
    """Interface of the page. Any other than loopback needs --expose: the page has no password."""
    expose: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Let other machines look."""
    no_cameras: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Leave the cameras' frames out; drawing them costs most of the time."""
    play: Path | None = None
    """Instead of running anything, show recorded episodes: a dataset's folder, or the .npz of a rollout."""
    episode: int = 0
    """For --play: the first episode of the dataset to show."""
    leave: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End after the last episode instead of keeping the page."""

    def run(self) -> int:
        """Run it; returns 0."""
        if self.play is None:
            super().run()
        else:
            self._play(self.play)
        return 0

    def _play(self, path: Path) -> None:
        Stage = _stage()
        from strands_cosmos3.sim.scene import Scene
        from strands_cosmos3.view.playback import play, recorded_episodes

        scene, console = Scene(arm=self.arm_model), Console()
        with Stage(scene.model, self.page_address, self.page_port, self.expose) as stage:
            console.print(f"open [bold]{stage.url}[/bold] (Ctrl-C ends)")
            try:
                for n, recorded in enumerate(recorded_episodes(path, self.episode), 1):
                    play(stage, scene, recorded)
                    if n == self.episodes:
                        break
                while not self.leave:
                    time.sleep(_WAIT_S)
            except KeyboardInterrupt:
                return

    def _check(self) -> None:
        if self.episodes < 0:
            raise ConfigError(f"--episodes must be 0 (until Ctrl-C) or more, got {self.episodes}.")
        self._check_options()

    def _seeds(self) -> Iterable[int]:
        return itertools.count(self.seed) if self.episodes == 0 else super()._seeds()

    @property
    def _wants_world(self) -> bool:
        return True

    @contextmanager
    def _watched(self, robot: Any, console: Console) -> Iterator[Watch]:
        Stage = _stage()
        from strands_cosmos3.view.live import LiveView

        with (
            Stage(robot.scene.model, self.page_address, self.page_port, self.expose) as stage,
            LiveView(robot, stage, str(self.backend), not self.no_cameras) as live,
        ):
            console.print(f"open [bold]{stage.url}[/bold] (Ctrl-C ends)")
            outcomes: list[Outcome] = []

            def end(episode: Episode) -> None:
                outcomes.append(episode.outcome)
                live.end(episode)

            yield Watch(live.begin, live.on_tick, live, end)
            while not self.leave and Outcome.INTERRUPTED not in outcomes:
                try:
                    time.sleep(_WAIT_S)
                except KeyboardInterrupt:
                    break


def _stage() -> Any:
    """The page's class, where viser is installed."""
    try:
        from strands_cosmos3.view.stage import Stage
    except ImportError as error:
        raise MissingDependencyError(f"the live page needs viser ({error}): pip install 'strands-cosmos3[view]'.") from None
    return Stage
