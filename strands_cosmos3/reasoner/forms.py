"""Answers that follow a JSON schema: at every step only tokens that can still lead to one are
allowed, by llguidance's table of the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import torch
from transformers import LogitsProcessor

from strands_cosmos3.errors import AnswerError, InputError
from strands_cosmos3.resources import shown


class Form(LogitsProcessor):
    """A processor of scores that allows only what follows a JSON schema, for one answer.

    Args:
        schema: The schema. A model that is not sure of itself can write blanks for ever, so the
            answer has none between its parts.
        tokenizer: transformers' tokenizer, a fast one.
        vocabulary: Number of tokens that the model scores.
        ends: Ids of the tokens that end an answer.

    Raises InputError if it is no schema, or says something that cannot be enforced.
    """

    def __init__(
        self, schema: Mapping[str, Any], tokenizer: Any, vocabulary: int, ends: Sequence[int]
    ):
        compact: Any = {"whitespace_flexible": False}
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=compact
            )
            table = llguidance.hf.from_tokenizer(tokenizer, vocabulary, list(ends))
            if problem := llguidance.LLMatcher.validate_grammar(grammar, table):
                raise ValueError(problem.strip())
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{shown(schema)} cannot be enforced as a JSON schema: {error}"
            ) from None
        self._matcher = llguidance.LLMatcher(table, grammar)
        self._allowed = llguidance.numpy.allocate_token_bitmask(1, vocabulary)
        self._prompt = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, vocabulary] in which what is not allowed next is minus infinity."""
        self._prompt = self._prompt or input_ids.shape[1]
        if input_ids.shape[1] > self._prompt:
            self._matcher.consume_token(int(input_ids[0, -1]))
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._allowed)
        masked = scores.float().cpu().numpy()
        llguidance.numpy.apply_token_bitmask_inplace(masked, self._allowed)
        return torch.from_numpy(masked).to(scores.device)

    def value(self, text: str) -> Any:
        """The value of an answer. Raises AnswerError if it ended too early to be one."""
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise AnswerError(
                f"the answer was cut off by the limit of tokens (max_tokens): {shown(text)}"
            ) from None
