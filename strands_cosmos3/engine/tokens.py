"""Tokenise captions: the text tokenizer's chat template, then ``<|im_end|>`` and
``<|vision_start|>``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from strands_cosmos3.errors import LayoutError
from strands_cosmos3.resources import contained, require_file

TOKENIZER_FOLDER = "text_tokenizer"
_MAX_FILE_BYTES = 32 << 20
_LOADING = threading.Lock()
_CLOSING = ("<|im_end|>", "<|vision_start|>")
SYSTEM_PROMPT = "You are a helpful assistant who will generate videos from a give prompt."
"""The text that diffusers puts before a caption where ``model_index.json`` says
``default_use_system_prompt`` (its spelling).
"""


class PromptTokenizer:
    """The text tokenizer of a checkpoint: its folder ``text_tokenizer/``, or a hub repository.

    Code in the folder is never run; links out of the checkpoint, pipes and files over 32 MiB are
    refused. Raises LayoutError if the tokenizer cannot be read, or lacks a chat template or one of
    the two closing tokens.
    """

    def __init__(self, name_or_path: str | Path):
        _require_contained(Path(name_or_path))
        try:
            self._tokenizer: Any = _load(str(name_or_path))
            vocabulary = self._tokenizer.get_vocab()
        except Exception as error:  # whatever transformers and tokenizers raise for their files
            reason = f"{type(error).__name__}: {error}".encode(
                "ascii", "backslashreplace"
            ).decode()[:300]
            raise LayoutError(
                f"{str(name_or_path)!r} holds no readable tokenizer ({reason}); download it again."
            ) from None
        missing = [token for token in _CLOSING if token not in vocabulary]
        if missing or not self._tokenizer.chat_template:
            lacking = ", ".join(missing) or "a chat template"
            raise LayoutError(
                f"the tokenizer in {str(name_or_path)!r} lacks {lacking}; is it Cosmos 3's "
                "text_tokenizer?"
            )
        self._closing = [vocabulary[token] for token in _CLOSING]

    def ids(self, caption: str, system_prompt: bool = False) -> torch.Tensor:
        """[1, S] ids of a caption as the only user message, after :data:`SYSTEM_PROMPT` if
        asked.
        """
        messages = [{"role": "system", "content": SYSTEM_PROMPT}] if system_prompt else []
        text = self._tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": caption}],
            tokenize=False,
            add_generation_prompt=True,
            add_vision_id=False,
        )
        encoded = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([[*encoded, *self._closing]])


def _load(name_or_path: str) -> Any:
    """One at a time: transformers imports its parts on demand, which fails in two threads at
    once.
    """
    with _LOADING:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)


def _require_contained(folder: Path) -> None:
    root = folder.parent if folder.name == TOKENIZER_FOLDER else folder
    for path in (folder, *folder.rglob("*")) if folder.is_dir() else ():
        contained(path, root, "checkpoint", LayoutError)
        if not path.is_dir():
            require_file(path, LayoutError, _MAX_FILE_BYTES)
