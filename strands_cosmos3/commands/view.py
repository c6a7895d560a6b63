"""``strands-cosmos3 view``: rollouts in the browser while they happen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from strands_cosmos3.checks import whole_number
from strands_cosmos3.commands.progress import WaitNotice
from strands_cosmos3.commands.rollout import Listeners, RolloutCommand
from strands_cosmos3.errors import ConfigError, Cosmos3Error, ResourceNotFoundError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.options import option
from strands_cosmos3.types import Outcome, Rollout
from strands_cosmos3.view.controls import ControlPanel, LiveControls

_WAIT_S = 0.2
_OUTCOME_S = 1.5


@dataclass(frozen=True)
class ViewCommand(RolloutCommand):
    """Watch rollouts in the browser, live.

    The page shows the arm, its commanded and achieved paths, cameras, predicted video and counters.

    It takes every option of rollout, runs one episode after another in real time, and serves the
    page to this machine only. Ctrl-C brings the arm to rest and ends the command. The exit status
    does not depend on success; use rollout for that.
    """

    episodes: int = 0
    """Number of episodes; 0 runs until Ctrl-C. After the last one the page stays until Ctrl-C."""
    view: bool = option(False, hidden=True)
    page_port: int = 8080
    """TCP port of the page; 0 is any free one."""
    page_address: str = "127.0.0.1"
    """Interface of the page. Any but loopback needs --expose, because the page has no password."""
    expose: bool = False
    """Let other machines open the page."""
    page_origin: tuple[str, ...] = ()
    """Origins of other web pages that may show this one, e.g. https://robots.example. All others
    are refused.
    """
    no_cameras: bool = False
    """Leave the camera frames out; rendering them takes most of the time."""
    play: Path | None = None
    """Play back recorded episodes instead: a dataset's folder, or the .npz of a rollout. An .npz
    does not name its robot; give --robot unless it is a panda's.
    """
    episode: int = 0
    """For --play: the first episode of the dataset to show."""
    leave: bool = False
    """Exit after the last episode instead of keeping the page."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("sim", "view", "data") if self.play else (*super().extras, "view")

    @cached_property
    def controls(self) -> LiveControls:
        """What the page's visitors ask for."""
        return LiveControls()

    def run(self) -> int:
        """Run it; returns 0."""
        if self.play is None:
            super().run()
        else:
            console = Console()
            with WaitNotice(console) as wait:
                self._play(self.play, console, wait)
        return 0

    def _play(self, path: Path, console: Console, wait: WaitNotice) -> None:
        if not path.exists():
            raise ResourceNotFoundError(
                f"--play {str(path)!r} does not exist; give a dataset's folder or a rollout's .npz."
            )
        from strands_cosmos3.robots.catalogue import get_robot
        from strands_cosmos3.sim.interrupt import deferred_interrupt
        from strands_cosmos3.worlds.arms import arm_world

        with needed_by("the live page"):
            from strands_cosmos3.view.playback import play, recorded_episodes, robot_of
        wait.begin(f"loading {path}")
        robot = robot_of(path, get_robot(self._robot))
        scene = arm_world(self._world).scene(robot, arm=self.arm.arm_model)
        with self._open_page(scene) as page:
            wait.end()
            console.print(f"open [bold]{page.url}[/bold] (Ctrl-C ends)")
            with deferred_interrupt() as interrupt:
                for n, recorded in enumerate(recorded_episodes(path, scene, self.episode), 1):
                    play(page, scene, recorded, lambda: interrupt.requested)
                    if n == self.episodes or interrupt.requested:
                        break
                while not (self.leave or interrupt.requested):
                    time.sleep(_WAIT_S)

    def _check(self) -> None:
        if self.episodes < 0:
            raise ConfigError(f"--episodes must be 0 (until Ctrl-C) or more, got {self.episodes}.")
        port = self.policy.service.port
        if port is not None and self.policy.backend != "service":
            raise ConfigError(
                f"--port {port} is the port of a policy server (--backend service); the page's is "
                f"--page-port {port}."
            )
        whole_number(self.page_port, "--page-port", 0, 65535)
        self._check_options()

    def _seeds(self) -> Iterable[int]:
        """Yield the first seed and, after each episode, the one that the page asks for or the
        next.
        """
        seed = self.seed
        ended = 0
        while True:
            yield seed
            asked = self.controls.next_scene(seed)
            if asked is None:
                ended += 1
                if ended == self.episodes or self._stopped_while_shown():
                    return
            seed = seed + 1 if asked is None else asked

    def _stopped_while_shown(self) -> bool:
        """Leave the outcome on the page for a moment; return whether Ctrl-C was pressed
        meanwhile.
        """
        from strands_cosmos3.sim.interrupt import deferred_interrupt

        until_s = time.monotonic() + _OUTCOME_S
        with deferred_interrupt() as interrupt:
            while time.monotonic() < until_s and not (
                interrupt.requested or self.controls.ends_episode
            ):
                time.sleep(_WAIT_S / 4)
        return interrupt.requested

    def _episode(self, *args: Any) -> Rollout:
        """Run an episode; an instruction of the page that the policy refuses only now gives way
        to the one before.
        """
        try:
            return super()._episode(*args)
        except Cosmos3Error as error:
            if not self.controls.fall_back(error):
                raise
        return super()._episode(*args)

    def _goes_on(self) -> bool:
        return self.controls.ends_episode

    @property
    def _task(self) -> str | None:
        task = super()._task
        asked = self.controls.instruction
        if task is None or not asked:
            return task
        return self._world.task_of(asked, self._robot) or task

    @property
    def _policy_instruction(self) -> str:
        return self.controls.instruction or super()._policy_instruction

    @property
    def _latency(self) -> float | Callable[[], float]:
        return 0.0 if self.realtime else lambda: self.controls.latency_s

    @property
    def _wants_prediction(self) -> bool:
        return True

    def _open_page(self, scene: Any) -> Any:
        """Open the page of a scene."""
        with needed_by("the live page"):
            from strands_cosmos3.view.page import LivePage
        return LivePage(
            scene.model,
            self.page_address,
            self.page_port,
            self.expose,
            origins=self.page_origin,
            robot=scene.robot.name,
        )

    @contextmanager
    def _listeners(self, session: Any, policy: Any, console: Console) -> Iterator[Listeners]:
        from strands_cosmos3.sim.interrupt import deferred_interrupt
        from strands_cosmos3.worlds.arms import arm_world

        with needed_by("the live page"):
            from strands_cosmos3.view.live import LiveView
        world = arm_world(self._world)
        controls = self.controls
        language = policy.info.language
        robot = session.robot
        task = super()._task

        def check(instruction: str) -> None:
            if language is not None:
                language.understand(instruction)
            judged = world.task_of(instruction, self._robot) or task
            if judged is not None:  # raises where the scene has nothing to judge
                world.judge(judged, robot.scene, instruction)

        controls.latency_s = self.latency
        controls.check = check
        suggestions = world.suggestions(self._robot, language) if policy.reads_instruction else ()
        sentences = [sentence for sentence in suggestions if not controls.refusal(sentence)]
        with (
            self._open_page(robot.scene) as page,
            LiveView(
                robot,
                page,
                self._backend,
                not self.no_cameras,
                controls,
                scores=lambda: {
                    limit: policy.last_rollout[limit.score]
                    for limit in policy.info.scores
                    if limit.score in policy.last_rollout
                },
            ) as live,
        ):
            panel = ControlPanel(
                page.server.gui, controls, sentences, self._policy_instruction, self.realtime
            )
            console.print(f"open [bold]{page.url}[/bold] (Ctrl-C ends)")
            outcomes: list[Outcome] = []

            def begin(instruction: str) -> None:
                live.begin(instruction)
                panel.update()

            def end(episode: Rollout) -> None:
                outcomes.append(episode.outcome)
                live.end(episode)
                controls.took(episode)
                panel.update()

            yield Listeners(begin, lambda session: live.on_tick(session.robot), live, end)
            panel.close()
            with deferred_interrupt() as interrupt:
                while not (self.leave or interrupt.requested or Outcome.INTERRUPTED in outcomes):
                    time.sleep(_WAIT_S)
