"""A judge that watches films: after each episode it is asked whether the film shows success, and
its answer stands beside the simulator's.

A judge is called with a question, frames [F, H, W, 3] uint8 and their rate [1/s], and answers in
words. ``reasoner`` is a Cosmos 3 checkpoint; ``module:name`` makes another one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.digests import file_sha256
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import EvaluationError
from strands_cosmos3.evaluation.plan import Assignment
from strands_cosmos3.evaluation.policies import blamed, made_by, source_sha256
from strands_cosmos3.evaluation.settings import INSTRUCTION, REASONER, Settings
from strands_cosmos3.observe.views import compose
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.worlds import Session

Frames = NDArray[np.uint8]
Answering = Callable[[str, Frames, float], str]
WATCHED_FPS = 2.0
"""Pictures of an episode for each simulated second; the first and the last are among them."""
_WORDS = AskOptions(max_tokens=64)


class WatchingJudge:
    """Watches one episode after the other, and is then asked about it.

    Args:
        answering: The judge.
    """

    def __init__(self, settings: Settings, answering: Answering):
        self._settings = settings
        self._answering = answering
        self._rig = get_embodiment(settings.embodiment).rig
        hz = settings.control_frequency or settings.get_world().control_frequency_hz
        self._every = max(1, round(hz / WATCHED_FPS))
        self._ticks = 0
        self._frames: list[Frames] = []

    def look(self, session: Session) -> None:
        """Take a picture now and then; the ``on_tick`` of a run. Call it once before."""
        if self._ticks % self._every == 0:
            self._frames.append(self._picture(session))
        self._ticks += 1

    def judged(self, assignment: Assignment, session: Session) -> dict[str, str]:
        """Return the question, the answer and what it says (:func:`said_of`) at an episode's end,
        and forget it.
        """
        question = self._settings.question.replace(INSTRUCTION, assignment.goal_instruction)
        frames = np.stack([*self._frames, self._picture(session)])
        self._ticks = 0
        self._frames.clear()
        with blamed(EvaluationError, f"judge {self._settings.judge} raised"):
            answer = str(self._answering(question, frames, WATCHED_FPS))
        return {"question": question, "answer": answer, "said": said_of(answer)}

    def _picture(self, session: Session) -> Frames:
        views = session.draw()
        if self._rig is None:
            return np.concatenate(list(views.values()), axis=1)
        return compose(views, self._rig)


def open_judge(settings: Settings) -> WatchingJudge | None:
    """Return the judge, or None if nobody is asked; CheckpointError or ConfigError if it cannot be
    made.
    """
    if settings.judge is None:
        return None
    if settings.judge != REASONER:
        return WatchingJudge(settings, made_by(settings.judge, "judge"))
    from strands_cosmos3.backends.devices import resolve_device
    from strands_cosmos3.reasoner.reasoner import Film, Reasoner

    device = resolve_device(settings.policy.engine)
    reasoner = Reasoner.from_pretrained(_model(settings), device=device)

    def answer(question: str, frames: Frames, fps: float) -> str:
        return reasoner.ask(question, videos=[Film(frames, fps)], options=_WORDS).text

    return WatchingJudge(settings, answer)


def said_of(answer: str) -> str:
    """Return what an answer says, ``yes`` or ``no``: its first word, or the only one of the two
    that it has; else ``unclear``.
    """
    words = re.findall(r"[a-z]+", answer.lower())
    said = {"yes", "no"} & set(words[:1]) or {"yes", "no"} & set(words)
    return said.pop() if len(said) == 1 else "unclear"


def judge_identity(settings: Settings) -> dict[str, Any]:
    """Return what determines the judge's answers, for an episode's identity; nothing without one.

    Raises a CheckpointError if its checkpoint has no eyes, and a ConfigError if it cannot be
    imported.
    """
    if settings.judge is None:
        return {}
    digest = _sha256(settings.judge, _model(settings))
    return {"judge": {"judge": settings.judge, "question": settings.question, "sha256": digest}}


@lru_cache(maxsize=8)
def _sha256(judge: str, model: str) -> str:
    if judge != REASONER:
        return source_sha256(judge, "judge")
    from strands_cosmos3.engine.checkpoint import Checkpoint, locate
    from strands_cosmos3.engine.senses import require_eyes
    from strands_cosmos3.engine.variants import EYES

    checkpoint = Checkpoint.open(locate(model, also=EYES))
    files = *require_eyes(checkpoint).files, *checkpoint.layout.reasoner.root.glob("*.jinja")
    parts = [checkpoint.digest, *map(file_sha256, sorted(files))]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _model(settings: Settings) -> str:
    return settings.judge_model or str(settings.policy.model)
