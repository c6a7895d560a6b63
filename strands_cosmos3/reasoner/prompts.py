"""A question with pictures and films as the inputs of transformers' model, by its own processor.

The marks that a chat template puts around a film are left out: inside, each time of the film has
its own. So do transformers 5.23's processor of Edge, and 4.57's of Qwen3-VL, which is Nano's;
5.23's of Qwen3-VL leaves them around the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image
from transformers import (
    AutoTokenizer,
    Cosmos3EdgeImageProcessorPil,
    Cosmos3EdgeProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
)

from strands_cosmos3.engine.formats.layout import Layout
from strands_cosmos3.engine.frames import read_frames
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.reasoner.pixels import Film, FilmProcessor


class _Unchecked:
    """A processor whose video processor is :class:`FilmProcessor`, none of transformers'."""

    def check_argument_for_proper_class(self, *_: object) -> None:
        """Take every part as it is."""


class _OfNano(_Unchecked, Qwen3VLProcessor):
    pass


class _OfEdge(_Unchecked, Cosmos3EdgeProcessor):
    pass


_KINDS = {
    "cosmos3_omni": (_OfNano, Qwen2VLImageProcessorPil),
    "cosmos3_edge": (_OfEdge, Cosmos3EdgeImageProcessorPil),
}


class PromptWriter:
    """Writes the inputs of a model.

    Args:
        layout: The checkpoint's folder.
        kind: Its reasoner's type of model.

    Attributes:
        tokenizer: transformers' tokenizer, with a chat template.
        processor: transformers' processor.

    Raises LayoutError if a file is missing or unreadable.
    """

    def __init__(self, layout: Layout, kind: str):
        top = layout.reasoner
        films = "video_preprocessor_config.json"
        film_config = top.read(films) if top.has(films) else {}
        processor, image_processor = _KINDS[kind]
        folder = top.root if top.has("tokenizer_config.json") else layout.tokenizer
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            pictures = image_processor.from_pretrained(top.root)
            self.processor: Any = processor(
                pictures, self.tokenizer, FilmProcessor(pictures, film_config)
            )
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise LayoutError(
                f"{top.root}: transformers cannot read tokenizer or preprocessor_config.json "
                f"({error}); download them again."
            ) from None

    def inputs(
        self, question: str, images: Sequence[Any] = (), videos: Sequence[str | Path | Film] = ()
    ) -> Mapping[str, Any]:
        """Inputs of the model, by name, for a question about pictures and films, which come first,
        in their order.

        Raises:
            InputError: The question is empty or holds a token that stands for pixels, or a picture
                or film cannot be read.
            ResourceNotFoundError: There is no such file.
            LayoutError: The chat template has no place for pictures.
        """
        text = self._conversation(question, len(images), len(videos))
        films = [self.processor.video_processor.read(film) for film in videos]
        try:
            return self.processor(
                text=[text],
                images=[_rgb(image) for image in images] or None,
                videos=[frames for frames, _ in films] or None,
                video_metadata=[metadata for _, metadata in films],
                # a template may write the first token itself
                add_special_tokens=not text.startswith(self.tokenizer.bos_token or "\0"),
                return_mm_token_type_ids=True,
                return_tensors="pt",
            )
        except ValueError as error:  # such as a side 200 times the other
            raise InputError(f"a picture or film cannot be read: {error}") from None

    def _conversation(self, question: str, images: int, videos: int) -> str:
        image, video = self.processor.image_token, self.processor.video_token
        if not question.strip() or image in question or video in question:
            raise InputError(f"a question is words, without {image} and {video}; got {question!r}.")
        content = [{"type": "image"}] * images + [{"type": "video"}] * videos
        content += [{"type": "text", "text": question}]
        try:
            text: str = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise LayoutError(f"the chat template cannot write a question ({error}).") from None
        if (text.count(image), text.count(video)) != (images, videos):
            raise LayoutError(
                "the chat template has no place for pictures and films; take chat_template.jinja "
                "from the release of these weights."
            )
        start, end = self.processor.vision_start_token, self.processor.vision_end_token
        return text.replace(start + video + end, video)


def _rgb(image: Any) -> Image.Image:
    frames = read_frames(image)
    if len(frames) != 1:
        raise InputError(f"a picture is one frame, got {len(frames)}; pass a clip as a film.")
    scale = 1 if frames.dtype == np.uint8 else 255
    return Image.fromarray((frames[0] * scale).round().astype(np.uint8))
