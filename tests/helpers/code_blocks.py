"""The code blocks of README and docs, with what is said above each: why it is not run, or what
it stands in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "sh", "toml", "yaml", "text", ""}
_FENCE = re.compile(
    r"(?:<!--\s*not run(?: by tests)?:\s*(?P<reason>.*?)\s*-->\n+)?"
    r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    @property
    def is_shell(self) -> bool:
        return self.language in ("sh", "")

    @property
    def commands(self) -> list[str]:
        """Its shell commands, without comments, one a line."""
        whole = self.code.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.splitlines())
        return [
            " ".join(part.split()) for line in lines for part in line.split(" && ") if part.strip()
        ]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text[: match.start("code")].count("\n")
            found.append(Block(page, line, match["language"], match["code"], match["reason"]))
    return found
