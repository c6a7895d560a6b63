"""Requests from the live page, queued for the control thread, and the part of the page that makes
them.
"""

from __future__ import annotations

import html
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.types import Rollout

SPEEDS = {"1/4 x": 0.25, "1/2 x": 0.5, "1 x": 1.0, "2 x": 2.0, "4 x": 4.0}
"""Names of the speeds on the page -> simulated seconds per second."""
LATENCIES_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
"""Inference durations on the page; 0 stops the simulation for each inference."""
_LONGEST_INSTRUCTION = 200  # characters
_OUTCOMES_SHOWN = 12
_MARKS = {
    True: ("&#10003;", "#2f9e5b"),
    False: ("&#10007;", "#cf3a32"),
    None: ("&#8226;", "#6b7280"),
}


@dataclass(eq=False)
class LiveControls:
    """Requests of the page's visitors, which the command that runs the episodes reads between two
    ticks.

    Attributes:
        instruction: The one asked for on the page; empty before the first.
        paused, speed, latency_s: As they are to be now; a latency of 0 stops the simulation for
            each inference.
        message: The error of the instruction refused last, else empty.
        check: Raises Cosmos3Error for an instruction to refuse.
        outcomes: Success and description of each episode that ended by itself.
    """

    instruction: str = ""
    message: str = ""
    paused: bool = False
    speed: float = 1.0
    latency_s: float = 0.0
    check: Callable[[str], None] = lambda instruction: None
    outcomes: list[tuple[bool | None, str]] = field(default_factory=list)
    _ends_episode: bool = False
    _keeps_scene: bool = False
    _before: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refusal(self, text: str) -> str:
        """Return why an instruction is refused; empty if it is not."""
        if len(text) > _LONGEST_INSTRUCTION:
            return f"an instruction has at most {_LONGEST_INSTRUCTION} characters, got {len(text)}."
        try:
            self.check(text)
        except Cosmos3Error as error:
            return str(error)
        return ""

    def ask(self, text: str) -> None:
        """Have the present episode end and one with this instruction begin on the same scene,
        unless it is refused.
        """
        self.message = self.refusal(text)
        if self.message:
            return
        with self._lock:
            self._before = self.instruction if self._before is None else self._before
            self.instruction = text
            self._ends_episode = True
            self._keeps_scene = True
            self.paused = False

    def start_over(self) -> None:
        """Have the present episode end, and the next scene begin."""
        with self._lock:
            self._ends_episode = True
            self.paused = False
            self.message = ""

    def set_speed(self, name: str) -> None:
        """Set the speed, one of :data:`SPEEDS`; any other name is ignored."""
        self.speed = SPEEDS.get(name, self.speed)

    def set_latency(self, seconds: float) -> None:
        """Set the duration of an inference; one beyond :data:`LATENCIES_S` is ignored."""
        if math.isfinite(seconds) and 0 <= seconds <= LATENCIES_S[-1]:
            self.latency_s = float(seconds)

    @property
    def ends_episode(self) -> bool:
        """Whether the present episode is to end."""
        return self._ends_episode

    def next_scene(self, seed: int) -> int | None:
        """Return the seed of the episode that the page asked for, after one with ``seed``; None
        if it asked for none.
        """
        with self._lock:
            asked = self._ends_episode
            same = self._keeps_scene
            self._ends_episode = self._keeps_scene = False
        return (seed if same else seed + 1) if asked else None

    def took(self, rollout: Rollout) -> None:
        """Note an episode; one that the page ended does not count."""
        if self._ends_episode and not rollout.success:
            return
        ended = f"seed {rollout.seed}: {rollout.outcome}, {rollout.duration_s:.1f} s"
        text = f"{rollout.instruction or 'no instruction'}, {ended}"
        self.outcomes.append((rollout.success, text))
        if not self._ends_episode:
            self._before = None

    def fall_back(self, error: Cosmos3Error) -> bool:
        """Return to the instruction before, if the policy refuses the new one only when asked;
        return whether there is one.
        """
        with self._lock:
            if self._before is None:
                return False
            self.message = str(error)
            self.instruction = self._before
            self._before = None
        return True

    def tally(self) -> str:
        """Return the successes so far as text, e.g. ``"3 of 4 episodes succeeded"``."""
        judged = [success for success, _ in self.outcomes if success is not None]
        if judged:
            return f"{sum(judged)} of {len(judged)} episodes succeeded"
        if self.outcomes:
            return f"{len(self.outcomes)} episodes, none judged by a task"
        return "no episode has ended yet"


class ControlPanel:
    """The page's controls, on top of its panel.

    Args:
        gui: viser's interface of the page.
        controls: Where requests go.
        sentences: Suggested instructions; empty if the instruction does not shape the actions.
        instruction: Text to begin with.
        in_real_time: Whether latency and speed are those of wall-clock time, so that neither can be
            set.
    """

    def __init__(
        self,
        gui: Any,
        controls: LiveControls,
        sentences: Sequence[str],
        instruction: str = "",
        in_real_time: bool = False,
    ):
        self._controls = controls
        self._asking = gui.add_folder("Ask for something", order=-4, visible=bool(sentences))
        self._episode = gui.add_folder("Episode", order=-3)
        self._tally = gui.add_html("", order=-2)
        with self._asking:
            with gui.add_form(None) as form:
                hint = (
                    "The scene starts again with this instruction. What the policy does not "
                    "understand is refused."
                )
                self.text = gui.add_text("instruction", instruction, hint=hint)
                run = gui.add_button("Run", icon=None, hint=hint)
            self.examples = gui.add_dropdown(
                "suggestions", ["choose one", *sentences], hint="Sentences that this policy knows."
            )
            self._message = gui.add_html("")
        run.on_click(lambda _: form.submit())
        form.on_submit(lambda _: self._ask(self.text.value))
        self.examples.on_update(self._choose)
        with self._episode:
            hint = (
                "Stop the clock; let it go on; end this episode and start the next one, with other "
                "cube positions."
            )
            buttons = gui.add_button_group("clock", ("Pause", "Resume", "Reset"), hint=hint)
            self.speed_menu = gui.add_dropdown(
                "speed",
                list(SPEEDS),
                initial_value="1 x",
                disabled=in_real_time,
                hint="Simulated time per wall-clock time, at most.",
            )
            self.latency_slider = gui.add_slider(
                "latency (s)",
                0.0,
                LATENCIES_S[-1],
                0.05,
                min(controls.latency_s, LATENCIES_S[-1]),
                disabled=in_real_time,
                hint="Simulated duration of an inference; the arm follows its chunk meanwhile. 0 "
                "stops the clock.",
            )
        buttons.on_click(lambda event: self._press(event.target.value))
        self.speed_menu.on_update(lambda event: controls.set_speed(str(event.target.value)))
        self.latency_slider.on_update(lambda event: controls.set_latency(float(event.target.value)))
        self.update()

    def close(self) -> None:
        """Take the controls off the page; the tally stays."""
        self._asking.visible = self._episode.visible = False

    def _ask(self, text: str) -> None:
        self._controls.ask(text)
        self.update()

    def _choose(self, event: Any) -> None:
        if event.target.value in list(event.target.options)[1:]:
            self.text.value = event.target.value
            self._ask(event.target.value)

    def _press(self, button: str) -> None:
        if button == "Reset":
            self._controls.start_over()
        else:
            self._controls.paused = button == "Pause"
        self.update()

    def update(self) -> None:
        """Show the controls' present state."""
        controls = self._controls
        self._message.content = (
            '<div id="refusal" role="alert" style="padding:2px 10px '
            '8px;font-size:13px;color:#b3261e">'
            f"{html.escape(controls.message)}</div>"
        )
        marks = "".join(_mark(*ended) for ended in controls.outcomes[-_OUTCOMES_SHOWN:])
        self._tally.content = (
            '<div id="tally" style="padding:4px 10px 8px;font-size:13px">'
            f'<b>{html.escape(controls.tally())}</b> <span style="font-size:16px">{marks}</span>'
            f"{'<b>The clock is stopped.</b>' if controls.paused else ''}</div>"
        )


def _mark(success: bool | None, description: str) -> str:
    sign, colour = _MARKS[success]
    return (
        f'<span title="{html.escape(description)}" '
        f'style="color:{colour};margin-right:5px;cursor:help">{sign}</span>'
    )
