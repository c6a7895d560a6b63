"""An engine of this package as a backend, whatever runs its networks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.model_input import ModelInput, as_pictures
from strands_cosmos3.backends.options import BackendOptions
from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.engine.inference import Inference
from strands_cosmos3.engine.novelty import NovelPictureWarning
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.films import Sound
from strands_cosmos3.monitors import ScoreLimit
from strands_cosmos3.types import ActionChunk, Mode, Request

if TYPE_CHECKING:
    from strands_cosmos3.parallel.rank_engine import RankGroupEngine

NOVELTY = ScoreLimit(
    "novelty",
    1.0,
    "novel_pictures",
    "the camera picture is unlike any that this checkpoint was trained on (novelty {score:.2f}; 1 "
    "is the 99.9 % quantile of its validation pictures): do not trust its actions. Compare the "
    "scene with the checkpoint's card. Further such pictures are counted (novel_pictures).",
    NovelPictureWarning,
)
"""Dissimilarity of a picture to those of training
(:class:`~strands_cosmos3.engine.novelty.Novelty`).
"""


class EngineBackend(Backend):
    """Answers with a loaded engine.

    Args:
        engine: The engine; it is closed with the backend.
        options: How to sample.
        name: Name shown to users.
        processing: Arguments of the processor that makes the engine's requests, beside those of the
            checkpoint and of ``options``.

    Raises:
        ContractError: Nobody states the checkpoint's action space.
    """

    def __init__(
        self,
        engine: Inference | RankGroupEngine,
        options: BackendOptions,
        name: str = "native",
        processing: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.engine = engine
        checkpoint = engine.checkpoint
        language = engine.checkpoint.language
        self.info = BackendInfo(
            name=name,
            modes=tuple(Mode),
            action_space=checkpoint.require_space(),
            replan_rows=checkpoint.replan_rows,
            chunk_rows=checkpoint.chunk_rows,
            prefix_rows=checkpoint.prefix_rows,
            language=language,
            example_instruction=Backend.info.example_instruction
            if language is None
            else language.example,
            scores=() if checkpoint.novelty_rmse is None else (NOVELTY,),
            sound=engine.predicts_sound,
        )
        self._processing = processing
        self._answers_digest = options.engine.answers_digest
        self._input = ModelInput(checkpoint, options, processing)
        self._futures_apart = (
            checkpoint.future_from_actions and options.sampling.policy_frames is None
        )

    def with_options(self, options: BackendOptions) -> EngineBackend:
        """Return a backend of the same engine that samples otherwise."""
        return EngineBackend(self.engine, options, self.info.name, self._processing)

    @property
    def model_sha256(self) -> str:
        return self._answers_digest(self.engine.checkpoint.digest)

    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> NDArray[np.uint8]:
        """Return the checkpoint's composite of a rig's views; released policies have
        cosmos-framework's.
        """
        return self._input.compose(views, rig)

    def engine_requests(
        self, requests: Sequence[Request], recorded: bool = False
    ) -> list[Cosmos3ActionRequest]:
        """Return requests as the engine reads them; ``recorded``: sampled as the checkpoint
        records, whatever the options. Errors: as :meth:`infer`.
        """
        return self._input(requests, self.info.name, recorded, self.engine.decodes_video)

    def infer(self, request: Request) -> ActionChunk:
        """Return the chunk for a request.

        Raises:
            BackendError: The request has no picture, or a longer action prefix than the checkpoint
                was trained with.
            ActionSpaceError: The request is for another action space than the checkpoint's.
        """
        return self.infer_batch((request,))[0]

    def infer_batch(self, requests: Sequence[Request]) -> list[ActionChunk]:
        """Return the chunk for each request; those of equal shape and schedule share a pass. Errors
        as :meth:`infer`.

        Where the checkpoint predicts futures from actions, a second pass does: the same rows come
        with and without a video or a sound.
        """
        filmed = [
            i
            for i, request in enumerate(requests)
            if self._futures_apart
            and request.mode is Mode.POLICY
            and (request.sound or (self.engine.decodes_video and request.decode_frames != 0))
        ]
        plain = [
            replace(request, decode_frames=0, sound=False) if i in filmed else request
            for i, request in enumerate(requests)
        ]
        chunks = [
            self._chunk(request, engine_request, result)
            for request, (engine_request, result) in zip(plain, self._results(plain), strict=True)
        ]
        futures = [
            replace(
                requests[i],
                mode=Mode.FORWARD_DYNAMICS,
                conditioning_actions=chunks[i].action,
                action_prefix=None,
                prompt="",
            )
            for i in filmed
        ]
        for i, (_, result) in zip(filmed, self._results(futures, recorded=True), strict=True):
            timing: Counter[Any] = Counter(chunks[i].timing)
            timing.update(_milliseconds(result))
            chunks[i] = replace(chunks[i], timing=timing, **_perceived(result))
        return chunks

    def _results(
        self, requests: Sequence[Request], recorded: bool = False
    ) -> list[tuple[Cosmos3ActionRequest, dict[str, Any]]]:
        """Return the engine's request and its result for each request."""
        engine_requests = self.engine_requests(requests, recorded)
        results: dict[int, dict[str, Any]] = {}
        for key in dict.fromkeys(each.batch_key for each in engine_requests):
            alike = [i for i, each in enumerate(engine_requests) if each.batch_key == key]
            batch = [engine_requests[i] for i in alike]
            results |= dict(zip(alike, self.engine.step_batch(batch), strict=True))
        return [(each, results[i]) for i, each in enumerate(engine_requests)]

    def _chunk(
        self, request: Request, engine_request: Cosmos3ActionRequest, result: Mapping[str, Any]
    ) -> ActionChunk:
        return ActionChunk(
            np.asarray(result["action"][0], np.float64),
            request.action_space,
            request.embodiment,
            fps=engine_request.fps,
            seed=request.seed,
            timing=_milliseconds(result),
            quantiles=self._input.quantiles(request),
            scores={
                limit.score: result[limit.score]
                for limit in self.info.scores
                if limit.score in result
            },
            **_perceived(result),
        )

    def close(self) -> None:
        """Free the weights; calling it twice is harmless."""
        self.engine.close()


def _perceived(result: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted video and sound of a result, as a chunk has them."""
    pixels, waveform = result.get("pixels"), result.get("waveform")
    return {
        "video": None if pixels is None else as_pictures(pixels),
        "sound": None if waveform is None else Sound(waveform[0].numpy(), result["sample_rate"]),
    }


def _milliseconds(result: Mapping[str, Any]) -> dict[str, float]:
    return {f"{part}_ms": ms for part, ms in result["timing"].items()}
