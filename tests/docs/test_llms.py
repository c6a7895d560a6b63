"""``llms.txt`` names every page of the documentation once, and nothing that is not there."""

import re

from helpers.code_blocks import ROOT


def test_every_page_is_listed_once():
    linked = re.findall(r"^- \[[^]]+\]\(([^)#]+)\)", (ROOT / "llms.txt").read_text(), re.MULTILINE)
    assert len(set(linked)) == len(linked)
    assert [name for name in linked if not (ROOT / name).is_file()] == []
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(linked) == set()
