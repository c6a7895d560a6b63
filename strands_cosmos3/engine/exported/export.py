"""Write the graphs of a checkpoint. They name the tensors of its safetensors files, at their place
there; no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.exported.folder import FORMAT, Exported, GraphRecord
from strands_cosmos3.engine.exported.graph_builder import GraphBuilder
from strands_cosmos3.engine.exported.preview_graphs import write_first_preview, write_preview
from strands_cosmos3.engine.exported.tokens import FixedTemplate
from strands_cosmos3.engine.exported.transformer_graphs import write_step, write_text
from strands_cosmos3.engine.exported.vae_graphs import write_decoder, write_encoder
from strands_cosmos3.engine.request import pixel_to_latent_shape
from strands_cosmos3.engine.tokens import PromptTokenizer
from strands_cosmos3.engine.transformer import rope_frequencies
from strands_cosmos3.engine.weight_files import WeightFiles, WeightSource
from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import sha256, write_folder

_PROBES = (
    "",
    "pick up the red cube.",
    "  blanks around, a line\n\nand another ",
    '{"actions": [{"time": "0:00-0:02", "description": "légère ✓"}]}',
    "<|im_end|>\n<|im_start|>system",
)


def export(
    checkpoint: Checkpoint,
    out: Path,
    canvas_hw: tuple[int, int],
    content_hw: tuple[int, int],
    clip_frames: int,
    decoder: bool,
    seen_from: str,
) -> None:
    """Write a new folder with the graphs of a checkpoint.

    Args:
        checkpoint: In the released layout, without 8 bits.
        out: The folder; an earlier export in it is replaced.
        canvas_hw, content_hw: Height and width of its canvas, in pixels, and of the pictures there.
        clip_frames: Frames of a whole clip.
        decoder: Whether to write the VAE's decoder.
        seen_from: Path of the checkpoint, seen from the folder.

    Raises:
        LayoutError: Another layout, or a tokenizer whose prompts the tokenizers library alone does
            not read alike.
    """
    checkpoint.require_released("export")
    template, closing = _template(checkpoint)
    sources: dict[str, WeightSource] = {
        "transformer": checkpoint.weights,
        "vae": checkpoint.vae_weights,
    }
    if checkpoint.preview is not None:
        sources["preview_decoder"] = checkpoint.preview[1]

    made = _graphs(checkpoint, canvas_hw, content_hw, clip_frames, decoder)

    def write(folder: Path) -> None:
        graphs = {}
        for name, (part, make) in made.items():
            path = folder / f"{name}.onnx"
            source = sources[part]
            assert isinstance(source, WeightFiles)  # as the released layout has them
            g = GraphBuilder(source, checkpoint.root)
            make(g, path=path)
            graphs[name] = GraphRecord(path.name, sha256(path), part, tuple(g.weights))
        record = Exported(
            format=FORMAT,
            checkpoint=seen_from,
            sha256=checkpoint.digest,
            graphs=graphs,
            canvas_hw=canvas_hw,
            content_hw=content_hw,
            clip_frames=clip_frames,
            rope_frequencies=tuple(rope_frequencies(checkpoint.config).tolist()),
            template=template,
            closing=closing,
        )
        record.write(folder)
        _require_alike(checkpoint, record)

    write_folder(out, write)


def _graphs(
    checkpoint: Checkpoint,
    canvas_hw: tuple[int, int],
    content_hw: tuple[int, int],
    clip_frames: int,
    decoder: bool,
) -> dict[str, tuple[str, Callable[..., None]]]:
    """Name -> part of the checkpoint whose weights it has, and what writes it."""
    config, vae = checkpoint.config, checkpoint.vae_config
    latent_frames, *grid_hw = pixel_to_latent_shape(clip_frames, *content_hw)
    grid = grid_hw[0], grid_hw[1]
    writers: dict[str, tuple[str, Callable[..., None]]] = {
        "text": ("transformer", lambda g, path: write_text(g, config, path)),
        "step": ("transformer", lambda g, path: write_step(g, config, path)),
        "encoder": ("vae", lambda g, path: write_encoder(g, vae, 1, canvas_hw, path)),
        "clip_encoder": (
            "vae",
            lambda g, path: write_encoder(g, vae, clip_frames, canvas_hw, path),
        ),
    }
    if decoder:
        writers["decoder"] = (
            "vae",
            lambda g, path: write_decoder(g, vae, latent_frames, grid, path),
        )
    if checkpoint.preview is not None:
        for name, write in (("first_preview", write_first_preview), ("preview", write_preview)):
            channels = config.latent_channel
            writers[name] = "preview_decoder", partial(write, channels=channels)
    return writers


def _template(
    checkpoint: Checkpoint,
) -> tuple[tuple[tuple[str, str], tuple[str, str]], tuple[int, ...]]:
    """What stands before and after a caption, without and with the system prompt; and what ends
    it.
    """
    tokens = PromptTokenizer(checkpoint.layout.tokenizer)
    return (tokens.around(False), tokens.around(True)), tokens.closing()


def _require_alike(checkpoint: Checkpoint, record: Exported) -> None:
    """Raise LayoutError unless the tokenizers library reads prompts as transformers does."""
    folder = checkpoint.layout.tokenizer
    ours, theirs = FixedTemplate(folder, record), PromptTokenizer(folder)
    for caption in _PROBES:
        for system_prompt in (False, True):
            one, other = (reader.ids(caption, system_prompt) for reader in (ours, theirs))
            if one.tolist() != other.tolist():
                raise LayoutError(
                    f"{folder} cannot be exported: with the prompt {caption!r} the tokenizers "
                    "library gives other ids than transformers, which reads more than "
                    "tokenizer.json and a fixed chat template."
                )
