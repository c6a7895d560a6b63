"""How a reasoner answers. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from strands_cosmos3.checks import seed_number, typed_fields, whole_number, within


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """How an answer is written.

    Raises:
        InputError: A value is out of its range.
    """

    max_tokens: int = 1024
    """Tokens after which the answer is cut off."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; above, tokens are drawn, the higher the rarer ones."""
    top_p: float = 1.0
    """With a temperature: draw among the likeliest tokens that share this probability."""
    seed: int = 0
    """With a temperature: seed of what is drawn."""

    def __post_init__(self) -> None:
        typed_fields(self)
        whole_number(self.max_tokens, "max_tokens", 1)
        within(self.temperature, "temperature", 0, 100)
        within(self.top_p, "top_p", 0, 1)
        seed_number(self.seed)
