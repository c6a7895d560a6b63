"""Datasets of small episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.small_episodes import fill, spec
from strands_cosmos3.datasets import DatasetWriter


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(lengths: list[int], name: str = "set", first: int = 0, **options: Any) -> Path:
        with DatasetWriter(tmp_path / name, spec(), **options) as writer:
            fill(writer, lengths, first)
        return tmp_path / name

    return make
