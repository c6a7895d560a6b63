"""Both engines on one request: how far their answers differ, and how long each part takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strands_cosmos3.embodiments import Embodiment, Sampling
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.exported.engine import OnnxEngine
from strands_cosmos3.engine.exported.folder import open_exported
from strands_cosmos3.engine.inference import Inference
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor
from strands_cosmos3.engine.request import Cosmos3ActionRequest

_COMPARED = ("action", "video", "pixels", "novelty")


@dataclass(frozen=True)
class Comparison:
    """What two engines answer.

    Args:
        differences: Largest difference of each result.
        milliseconds: Part -> the medians of its times in both engines, exported graphs first; of
            the text tower only the first call counts.
    """

    differences: Mapping[str, float]
    milliseconds: Mapping[str, tuple[float, float]]


def compare(
    folder: Path, embodiment: Embodiment, picture_hw: tuple[int, int], rows: int, runs: int
) -> Comparison:
    """Answer one request with both engines ``runs`` times, of a picture of noise.

    Args:
        folder: Of exported graphs.
        embodiment: Whose rows are asked for.
        picture_hw: Height and width of the picture.
        rows: Of the chunk.
    """
    _, record, checkpoint = open_exported(folder)
    films = "preview" if "preview" in record.graphs else "decoder" in record.graphs
    options = EngineOptions(decode_video=films)
    processor = {
        "embodiment": embodiment,
        "height": record.canvas_hw[0],
        "width": record.canvas_hw[1],
        "action_chunk_size": rows,
    }
    with OnnxEngine.from_exported(folder, options) as exported:
        ours = _answers(exported, picture_hw, {**processor, **exported.processing}, runs)
    make: Any = Cosmos3Engine.from_pretrained
    with make(checkpoint.root, options=options, action_space=checkpoint.action_space) as engine:
        theirs = _answers(engine, picture_hw, processor, runs)
    return Comparison(
        {
            name: float(np.abs(np.asarray(ours[0][name]) - np.asarray(theirs[0][name])).max())
            for name in _COMPARED
            if name in ours[0]
        },
        {part: (_median(ours, part), _median(theirs, part)) for part in ours[0]["timing"]},
    )


def _answers(
    engine: Inference, picture_hw: tuple[int, int], processing: Mapping[str, Any], runs: int
) -> list[dict[str, Any]]:
    request = _request(engine, picture_hw, **processing)
    return [engine.step(request) for _ in range(runs)]


def _request(
    engine: Inference, picture_hw: tuple[int, int], embodiment: Embodiment, **processing: Any
) -> Cosmos3ActionRequest:
    checkpoint = engine.checkpoint
    space = embodiment.action_space(checkpoint.action_space)
    processor = Cosmos3PolicyProcessor.for_checkpoint(
        checkpoint, domain_name=embodiment.name, action_space=space.name, **processing
    )
    noise = np.random.RandomState(0).randint(0, 256, (*picture_hw, 3), np.uint8)
    raw_input: dict[str, Any] = {"task": "pick up the red cube", "images": noise}
    if space.state_row:
        raw_input["state"] = np.zeros(space.width)
    elif checkpoint.state_row is not None:
        raw_input["state"] = checkpoint.state_row.mean
    sampling = checkpoint.resolve_sampling(embodiment, space.name, Sampling())
    return processor.preprocess(raw_input).request(sampling)


def _median(answers: list[dict[str, Any]], part: str) -> float:
    times = [answer["timing"][part] for answer in answers]
    return times[0] if part == "text" else statistics.median(times)
