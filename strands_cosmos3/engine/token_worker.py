"""The process that reads a stranger's tokenizer and renders its chat template, with limits of
memory and processor time. :mod:`.tokens` starts it; a request is a line of JSON, so is its answer.
"""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import sys
from typing import Any

MEMORY_BYTES = 2 << 30
CPU_S = 10
MOST_TOKENS = 8192


@functools.lru_cache(maxsize=4)
def _loaded(tokenizer: str, number: int) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)


def _answer(tokenizer: str, number: int, messages: list[dict[str, str]], closing: list[str]) -> Any:
    """The messages as text, their ids, and those of the closing tokens; of unknown ones, None."""
    loaded = _loaded(tokenizer, number)
    vocabulary = loaded.get_vocab()
    text = loaded.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, add_vision_id=False
    )
    if messages[-1]["content"].strip() not in text:
        raise ValueError("the chat template leaves out the caption, or changes it")
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    if len(ids) > MOST_TOKENS:
        return {"tokens": len(ids)}
    known = [vocabulary.get(token) for token in closing]
    return {"text": text, "ids": ids, "closing": known, "eos_token": loaded.eos_token}


def main() -> None:
    """Answer requests until standard input ends."""
    # tokenizers need no torch, and importing it takes seconds
    sys.modules["torch"] = None  # type: ignore[assignment]
    import transformers.models.auto.tokenization_auto  # noqa: F401  # before the clock starts

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin:
        request = json.loads(line)
        spent_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(spent_s) + request.pop("cpu_s"), hard))
        try:
            answer = _answer(**request)
        except BaseException as error:  # a panic of Rust is no Exception
            answer = {"error": ascii(f"{type(error).__name__}: {error}")[1:300]}
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
