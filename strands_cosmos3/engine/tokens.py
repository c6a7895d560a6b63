"""Tokenise captions: the text tokenizer's chat template, then ``<|im_end|>`` and
``<|vision_start|>``.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from strands_cosmos3.engine import token_worker
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.errors import InputError, LayoutError, ShapeError
from strands_cosmos3.resources import contained, require_file

TOKENIZER_FOLDER = "text_tokenizer"
_MAX_FILE_BYTES = 32 << 20
_ASKING = threading.Lock()
_WORKERS: dict[int, subprocess.Popen[str]] = {}  # by process: a fork needs one of its own
_NUMBERS = itertools.count()
_KEPT_CAPTIONS = 64
_PLACE = "the caption"
_CLOSING = ("<|im_end|>", "<|vision_start|>")
SYSTEM_PROMPT = "You are a helpful assistant who will generate videos from a give prompt."
"""The text that diffusers puts before a caption where ``model_index.json`` says
``default_use_system_prompt`` (its spelling).
"""


@runtime_checkable
class Tokens(Protocol):
    """Reads prompts."""

    def ids(self, caption: str, system_prompt: bool = False) -> Array:
        """[1, S] ids of a caption; see :class:`PromptTokenizer`."""
        ...


class PromptTokenizer:
    """The text tokenizer of a checkpoint: its folder ``text_tokenizer/``, or a hub repository.

    Code in the folder is never run; links out of the checkpoint, pipes and files over 32 MiB are
    refused. Its files and template are read in a process with 2 GiB of memory and 10 s of
    processor time. Raises LayoutError if the tokenizer cannot be read, or lacks a chat template or
    one of the two closing tokens.
    """

    def __init__(self, name_or_path: str | Path):
        _require_contained(Path(name_or_path))
        self._name = str(name_or_path)
        self._number = next(_NUMBERS)
        # a control loop asks the same again with every chunk
        self._numbers_of = lru_cache(_KEPT_CAPTIONS)(self._read)
        self.ids("pick up the red cube.")

    def ids(self, caption: str, system_prompt: bool = False) -> Array:
        """[1, S] ids of a caption as the only user message, after :data:`SYSTEM_PROMPT` if
        asked; an array of NumPy.

        Raises InputError for more than 8192 tokens, LayoutError if the template fails.
        """
        return np.array([self._numbers_of(caption, system_prompt)], np.int64)

    def around(self, system_prompt: bool) -> tuple[str, str]:
        """What the chat template puts before a caption and after it."""
        before, _, after = self._answer(_PLACE, system_prompt)["text"].partition(_PLACE)
        return before, after

    def closing(self) -> tuple[int, ...]:
        """Ids of the closing tokens."""
        return tuple(self._answer(_PLACE, False)["closing"])

    def _read(self, caption: str, system_prompt: bool) -> list[int]:
        answer = self._answer(caption, system_prompt)
        return [*answer["ids"], *answer["closing"]]

    def _answer(self, caption: str, system_prompt: bool) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}] if system_prompt else []
        answer = _asked(
            tokenizer=self._name,
            number=self._number,
            messages=[*messages, {"role": "user", "content": caption}],
            closing=_CLOSING,
            cpu_s=token_worker.CPU_S,
        )
        if answer.get("tokens"):
            raise InputError(
                f"the prompt has {answer['tokens']} tokens; at most {token_worker.MOST_TOKENS} are "
                "taken: shorten it."
            )
        if "error" in answer:
            raise LayoutError(
                f"{self._name!r} holds no readable tokenizer with a chat template "
                f"({answer['error']}); is it Cosmos 3's text_tokenizer? Download it again."
            )
        stated = {"eos_token": answer["eos_token"]}
        require_computed("text_tokenizer/tokenizer_config.json", stated)
        closing = dict(zip(_CLOSING, answer["closing"], strict=True))
        if missing := [token for token, number in closing.items() if number is None]:
            raise LayoutError(
                f"the tokenizer in {self._name!r} lacks {', '.join(missing)}; is it "
                "Cosmos 3's text_tokenizer?"
            )
        return answer


def token_ids(ids: Array, mask: Array | None, name: str, vocab: int) -> tuple[int, ...]:
    """The ids of a prompt whose mask is not 0; raises ShapeError unless it is [S] or [1, S],
    InputError unless 0..vocab - 1.
    """
    flat = ids.reshape(-1)
    if ids.ndim > 2 or (ids.ndim == 2 and ids.shape[0] != 1):
        raise ShapeError(f"{name} must be [S] or [1, S], got {list(ids.shape)}.")
    if mask is not None:
        counts = mask.reshape(-1)
        if len(counts) != len(flat):
            raise ShapeError(f"the mask of {name} has {len(counts)} values for {len(flat)} ids.")
        flat = flat[counts != 0]
    values = tuple(int(i) for i in flat.tolist())
    if not values or not all(0 <= i < vocab for i in values):
        raise InputError(
            f"{name} must hold at least one id, all of them 0..{vocab - 1} "
            "(the model's vocabulary)."
        )
    return values


def _asked(**request: Any) -> dict[str, Any]:
    """The worker's answer. One that ended, or whose answer nobody waits for, is replaced."""
    with _ASKING:
        line = ""
        worker = _WORKERS.get(os.getpid()) or _started()
        try:
            print(json.dumps(request), file=worker.stdin, flush=True)
            line = worker.stdout.readline() if worker.stdout else ""
        except BrokenPipeError:
            pass
        finally:
            if not line:
                worker.kill()
                _end_worker()
    limits = f"{token_worker.CPU_S} s or {token_worker.MEMORY_BYTES >> 30} GiB"
    return json.loads(line or json.dumps({"error": f"it took more than {limits}"}))


def _started() -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    worker = subprocess.Popen(
        (sys.executable, "-P", token_worker.__file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        process_group=0,  # Ctrl-C is for the program alone
    )
    _WORKERS[os.getpid()] = worker
    return worker


@atexit.register
def _end_worker() -> None:
    if worker := _WORKERS.pop(os.getpid(), None):
        worker.communicate()


def _require_contained(folder: Path) -> None:
    root = folder.parent if folder.name == TOKENIZER_FOLDER else folder
    for path in (folder, *folder.rglob("*")) if folder.is_dir() else ():
        contained(path, root, "checkpoint", LayoutError)
        if not path.is_dir():
            require_file(path, LayoutError, _MAX_FILE_BYTES)
