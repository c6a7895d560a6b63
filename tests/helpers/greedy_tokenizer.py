"""Stands in for a tokenizer or a template that takes all it can: the process that reads them, with
its limits, but what it does is bounded where they fail.
"""

from __future__ import annotations

import time
from typing import Any

from strands_cosmos3.engine import token_worker


class Panic(BaseException):
    """As Rust's panics are no Exceptions either."""


def answer(messages: list[dict[str, str]], **request: Any) -> dict[str, Any]:
    match messages[-1]["content"]:
        case "take memory":
            bytearray(token_worker.MEMORY_BYTES)  # of zeros, which nothing touches
        case "take time":
            while time.process_time() < 20:
                pass
        case "take panic":
            raise Panic("not an Exception")
        case "take exit":
            raise SystemExit(3)
    return {"ids": [1, 2], "closing": [3, 4], "eos_token": "<|im_end|>"}


token_worker._answer = answer
token_worker.main()
