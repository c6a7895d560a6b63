"""The engine that runs exported graphs with ONNX Runtime, on arrays of NumPy.

Shape suffixes: R requests of a pass, B their branches, b those whose prompts have one length, N
generation tokens; C F H W latent channels, frames, height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.denoising import Pass
from strands_cosmos3.engine.exported.folder import Exported, open_exported
from strands_cosmos3.engine.exported.sessions import Graph, Weights
from strands_cosmos3.engine.exported.tokens import FixedTemplate
from strands_cosmos3.engine.inference import Inference
from strands_cosmos3.engine.latents import LatentScale
from strands_cosmos3.engine.novelty import Novelty
from strands_cosmos3.engine.options import DecodeVideo, EngineOptions
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.engine.sampler import Schedule
from strands_cosmos3.engine.sequence import TEMPORAL_COMPRESSION, Rope, rotations
from strands_cosmos3.engine.text_cache import TextKV
from strands_cosmos3.errors import ConfigError, InputError, ShapeError

F32 = NDArray[np.float32]
_DEFAULTS = EngineOptions()
_WIDE = 1024
"""Width from which a product is worth several threads."""


class OnnxEngine(Inference):
    """Cosmos 3 action inference with exported graphs.

    Create it with :meth:`from_exported`. It serves one call at a time.

    Attributes:
        options: How it computes.
        tokens: What reads prompts.
    """

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, record: Exported, options: EngineOptions
    ):
        self.options = options
        self.tokens = FixedTemplate(checkpoint.layout.tokenizer, record)
        self._record = record
        self._graph = lru_cache(None)(partial(self._opened, folder))
        self._weights = {
            "transformer": checkpoint.weights,
            "vae": checkpoint.vae_weights,
            "preview_decoder": None if checkpoint.preview is None else checkpoint.preview[1],
        }
        self._frequencies = np.array(record.rope_frequencies, np.float32)
        self._scale = LatentScale(checkpoint.vae_config, np.empty(0, np.float32))
        knows = checkpoint.novelty_rmse is not None and "first_preview" in record.graphs
        first = (lambda latents: self._run("first_preview", latents)) if knows else None
        novelty = Novelty(first, checkpoint.novelty_rmse)
        super().__init__(checkpoint, np.empty(0), options.text_cache_bytes, novelty)
        decoder = self._decoder(options.decode_video)
        wanted = ["text", "step", "encoder", *(["first_preview"] if knows else []), *decoder]
        for name in wanted:
            self._graph(name)
        self._decoder_names = decoder

    @classmethod
    def from_exported(
        cls,
        model: str | Path,
        options: EngineOptions = _DEFAULTS,
        action_space: str | None = None,
    ) -> OnnxEngine:
        """Open the graphs of a checkpoint.

        Args:
            model: The checkpoint whose graphs lie beside its weights, or the folder of the graphs.
            options: Its execution provider, ``decode_video`` and ``text_cache_bytes`` count.
            action_space: Action space, if neither the checkpoint's name nor its metadata states it.

        Raises:
            CheckpointError: There are no graphs, or they are of another checkpoint; see the
                subclasses.
            ConfigError: ONNX Runtime lacks the provider, or pixels are wanted and no decoder was
                exported.
        """
        folder, record, checkpoint = open_exported(model, action_space)
        return cls(checkpoint, folder, record, options)

    @property
    def decodes_video(self) -> bool:
        return bool(self._decoder_names)

    @property
    def processing(self) -> Mapping[str, Any]:
        """Arguments of the processor that makes its requests."""
        return {"tokens": self.tokens, "device": "numpy"}

    def close(self) -> None:
        """Free sessions and prompts; nothing can be called afterwards."""
        self.text_cache.clear()
        self._graph.cache_clear()
        self._closed = True

    def _decoder(self, wanted: DecodeVideo) -> list[str]:
        """The graphs that make pixels."""
        if not wanted:
            return []
        names = ["first_preview", "preview"] if wanted == "preview" else ["decoder"]
        if not {*names} <= self._record.graphs.keys():
            graphs = self._record.graphs
            other = "preview" if "preview" in graphs else "True" if "decoder" in graphs else None
            raise ConfigError(
                f"decode_video={wanted!r}: the export of {self.checkpoint.root} has no graph of "
                "that decoder"
                + (f"; it has the one of decode_video={other}" if other else "")
                + ". Export it with --decoder, or use backend='native'."
            )
        return names

    def _opened(self, folder: Path, name: str) -> Graph:
        record = self._record.graphs[name]
        source = self._weights[record.part]
        assert source is not None  # the digest says that the checkpoint is the exported one
        threads = 0 if self.config.hidden_size >= _WIDE else 1
        return Graph(folder, record, Weights(source), self.options.execution_provider, threads)

    def _run(self, name: str, *arrays: NDArray[Any]) -> F32:
        return self._graph(name)(*arrays)[0]

    def _encoded(self, pixels: F32) -> F32:
        frames, *hw = pixels.shape[2:]
        if tuple(hw) != self._record.canvas_hw:
            raise ShapeError(
                f"pixels are {hw} (H, W), and the graphs were exported for "
                f"{list(self._record.canvas_hw)}; export them again with --canvas {hw[0]},{hw[1]}."
            )
        whole = self._record.clip_frames
        if frames > whole:
            raise InputError(
                f"{frames} frames are given, and the graphs were exported for clips of {whole}; "
                f"export them again with --rows {frames - 1}, or use backend='native'."
            )
        if frames == 1:
            return self._scale.normalised(self._run("encoder", pixels))
        latents = self._run("clip_encoder", _lengthened(pixels, whole))
        return self._scale.normalised(latents[:, :, : (frames - 1) // TEMPORAL_COMPRESSION + 1])

    def _rope(self, positions_3N: F32) -> Rope:
        cos_Nd, sin_Nd = rotations(positions_3N, self._frequencies, self.config)
        half = self.config.head_dim // 2  # ONNX turns both halves of a head by one table
        return cos_Nd[:, :half], sin_Nd[:, half:]

    def _read_prompt(self, ids: tuple[int, ...], rope: Rope) -> TextKV:
        arrays = self._graph("text")(np.array([ids], np.int64), *(table[None] for table in rope))
        keys_values = (array[0] for array in arrays)
        return TextKV(tuple(zip(keys_values, keys_values, strict=True)))

    def _heads(self, domains: Sequence[int]) -> NDArray[np.int64]:
        last = self.config.num_embodiment_domains - 1
        if max(domains) > last:
            raise InputError(f"domain {max(domains)}: this checkpoint has 0..{last}.")
        return np.array(domains, np.int64)

    def _times(self, schedule: Schedule) -> F32:
        return np.array(schedule.timesteps, np.float32)[:, None]

    def _velocity(
        self, of: Pass, tokens: Sequence[F32], time: F32, noisy_RN1: F32, groups: list[slice]
    ) -> list[F32]:
        wanted = [np.arange(group.start, group.stop) for group in groups]
        parts: list[Sequence[F32]] = []
        first = 0
        for text in of.texts:
            branches = np.arange(first, first + len(text.layers[0][0]))
            members = branches % len(of.members)
            own = [array[members] for array in (*tokens, noisy_RN1, of.heads)]
            ropes = [table[branches] for table in of.rope]
            memory = [array for layer in text.layers for array in layer]
            *state, noisy, domains = own
            parts.append(
                self._graph("step")(*state, time, noisy, *ropes, domains, *wanted, *memory)
            )
            first += len(branches)
        return [np.concatenate(of_stream) for of_stream in zip(*parts, strict=True)]

    def _pixels(self, latents_1CFHW: F32, frames: int) -> F32:
        record = self._record
        if "preview" in self._decoder_names:
            latents = np.ascontiguousarray(latents_1CFHW)
            start = latents[:, :, :1]
            first = self._novelty_of.decoded(start)
            pixels = self._run("first_preview", start) if first is None else first
            if latents.shape[2] > 1:
                pixels = self._run("preview", latents, pixels)
        else:
            whole, *grid = pixel_to_latent_shape(record.clip_frames, *record.content_hw)
            if [*latents_1CFHW.shape[3:]] != grid:
                raise ShapeError(
                    f"latents are {list(latents_1CFHW.shape[3:])} (H, W), and the decoder was "
                    f"exported for {grid}, pictures of {list(record.content_hw)}."
                )
            latents = _lengthened(latents_1CFHW, whole)
            pixels = self._run("decoder", self._scale.raw(latents))
        return np.clip((pixels[:, :, :frames] + 1) * np.float32(0.5), 0, 1)


def _lengthened(frames: F32, count: int) -> F32:
    """So many frames, of which the last is repeated: that changes no earlier latent or picture."""
    index = np.minimum(np.arange(count), frames.shape[2] - 1)
    return frames[:, :, index]
