"""The page on PyPI: README.md with relative links made absolute, because PyPI does not have the
repository's files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        source = metadata["urls"]["Source"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source)}


def absolute(text: str, source: str) -> str:
    """Return Markdown with the targets of relative links and pictures below the repository
    ``source``.
    """
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)([^)]+)", rf"\1{source}/raw/main/\2", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)([^)]+)", rf"\1{source}/blob/main/\2", text)
