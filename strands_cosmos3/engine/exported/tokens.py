"""Prompts read by the tokenizer alone: the text of the chat template comes with the export, which
has compared the ids.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.exported.folder import Exported
from strands_cosmos3.engine.token_worker import MOST_TOKENS
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.resources import require_file

TOKENIZER = "tokenizer.json"
_KEPT_CAPTIONS = 64


class FixedTemplate:
    """Reads prompts with ``text_tokenizer/tokenizer.json`` and an export's template.

    Raises LayoutError if there is no such file.
    """

    def __init__(self, folder: Path, record: Exported):
        require_file(folder / TOKENIZER, LayoutError, hint="Only such a file is read here.")
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._record = record
        # a control loop asks the same again with every chunk
        self._numbers_of = lru_cache(_KEPT_CAPTIONS)(self._read)

    def ids(self, caption: str, system_prompt: bool = False) -> Array:
        """[1, S] ids of a caption as the only user message; InputError for more than 8192."""
        return np.array([self._numbers_of(caption, system_prompt)], np.int64)

    def _read(self, caption: str, system_prompt: bool) -> list[int]:
        before, after = self._record.template[system_prompt]
        text = before + caption + after
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > MOST_TOKENS:
            raise InputError(
                f"the prompt has {len(ids)} tokens; at most {MOST_TOKENS} are taken: shorten it."
            )
        return [*ids, *self._record.closing]
