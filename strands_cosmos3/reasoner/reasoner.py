"""Ask a Cosmos 3 checkpoint about pictures and films."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer

from strands_cosmos3.checks import typed
from strands_cosmos3.engine.checkpoint import Checkpoint, locate
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import Dtype
from strands_cosmos3.engine.preflight import choose_dtype, torch_device
from strands_cosmos3.engine.variants import EYES
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.reasoner.loading import load_model
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.reasoner.pixels import Film
from strands_cosmos3.reasoner.prompts import PromptWriter

if TYPE_CHECKING:
    from strands_cosmos3.reasoner.forms import Form

__all__ = ["Answer", "AskOptions", "Film", "Reasoner"]


@dataclass(frozen=True)
class Answer:
    """What a reasoner wrote.

    Args:
        text: The answer.
        finished: Whether it ended by itself; otherwise the limit of tokens cut it off.
        prompt_tokens, tokens: Number of tokens of the question with its pictures, and of the
            answer.
        value: What the JSON says, where a schema was given, else None.
    """

    text: str
    finished: bool
    prompt_tokens: int
    tokens: int
    value: Any = None


class Reasoner:
    """A checkpoint that answers questions about pictures and films in words.

    Create it with :meth:`from_pretrained`, or beside an engine with :meth:`beside`. It answers one
    question at a time.

    Attributes:
        model: transformers' model.
        prompts: Writer of its inputs.
        label: What the checkpoint says of itself, e.g. that its weights are random, or None.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any):
        self.model = model
        self.label: str | None = checkpoint.metadata.get("label")
        self.prompts = PromptWriter(checkpoint.layout, model.config.model_type)
        top = checkpoint.layout.reasoner
        name = "generation_config.json"
        end_ids = top.read(name).get("eos_token_id") if top.has(name) else None
        ends = self.prompts.tokenizer.eos_token_id if end_ids is None else end_ids
        self._ends: list[int] = ends if isinstance(ends, list) else [ends]

    @classmethod
    @typed()
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | Dtype | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        verify: bool = True,
    ) -> Reasoner:
        """Load text tower, head and eyes of a checkpoint; nothing is copied on disk.

        Args:
            path_or_repo_id: A folder in the released layout, or a hub repository.
            device: ``cpu``, ``cuda`` or ``cuda:N``; None is the CPU.
            dtype: Of weights and hidden states, as for an engine; None is bfloat16 on CUDA and
                float32 on a CPU.
            revision, local_files_only: Options of a hub repository.
            verify: Whether to compare files with the recorded digests.

        Raises:
            CheckpointError: It has no eyes or no head, which the message names, is damaged, or
                does not fit the device; see the subclasses.
        """
        where = torch_device(device or "cpu")
        folder = locate(path_or_repo_id, revision, local_files_only, also=EYES)
        checkpoint = Checkpoint.open(folder)
        if verify:
            checkpoint.verify()
        dtype = choose_dtype(dtype, where, checkpoint.config)
        return cls(checkpoint, load_model(checkpoint, where, dtype))

    @classmethod
    @typed()
    def beside(cls, engine: Cosmos3Engine) -> Reasoner:
        """A reasoner that shares an engine's text tower in memory, on its device and in its dtype;
        only head, eyes and the rest of the last layer are read.

        Raises:
            CheckpointError: As :meth:`from_pretrained`.
            ConfigError: The engine keeps its text tower in 8 bits, or elsewhere.
        """
        if engine.options.quantize_text or engine.options.offload_text:
            raise ConfigError(
                "an engine with quantize_text or offload_text cannot share its text tower; load "
                "the reasoner by itself."
            )
        text_weights = dict(engine.transformer.text.named_parameters())
        return cls(
            engine.checkpoint,
            load_model(engine.checkpoint, engine.device, engine.dtype, text_weights),
        )

    @typed()
    def ask(
        self,
        question: str,
        images: Sequence[Any] = (),
        videos: Sequence[str | Path | Film] = (),
        *,
        options: AskOptions | None = None,
        schema: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer a question.

        Args:
            question: The question, or a task, in words.
            images: Pictures, in the order in which the question counts them: paths, PIL images or
                arrays [H, W, 3], uint8 or floating in [0, 1].
            videos: Films: paths, or :class:`Film`. Two frames a second are read, unless the
                checkpoint says otherwise, the first and the last among them.
            options: How it is answered; None is greedily.
            schema: A JSON schema, which the answer then follows.
            on_text: Called with each part of the answer as it is written.

        Raises:
            InputError: The question or schema is unusable, or a picture or film cannot be read.
            ResourceNotFoundError: There is no such file.
            AnswerError: The limit of tokens cut off an answer of a form.
            MissingDependencyError: ``schema`` needs llguidance, which is not installed.
        """
        options = options or AskOptions()
        form = None if schema is None else self._form(schema)
        inputs = self.prompts.inputs(question, images, videos)
        prompt: int = inputs["input_ids"].shape[1]
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            ids = self.model.generate(
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                generation_config=_generation(options, self._ends),
                logits_processor=LogitsProcessorList([] if form is None else [form]),
                streamer=None if on_text is None else _Stream(self.prompts.tokenizer, on_text),
            )
        written = ids[0, prompt:].tolist()
        text = self.prompts.tokenizer.decode(written, skip_special_tokens=True)
        finished = bool(written) and written[-1] in self._ends
        value = None if form is None else form.value(text)
        return Answer(text, finished, prompt, len(written), value)

    def _form(self, schema: Mapping[str, Any]) -> Form:
        with needed_by("an answer that follows a JSON schema"):
            from strands_cosmos3.reasoner.forms import Form
        scored = self.model.config.text_config.vocab_size
        return Form(schema, self.prompts.tokenizer, scored, self._ends)


class _Stream(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def _generation(options: AskOptions, ends: list[int]) -> GenerationConfig:
    drawn = options.temperature > 0
    chance = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=options.max_tokens,
        do_sample=drawn,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **(chance if drawn else {}),
    )
