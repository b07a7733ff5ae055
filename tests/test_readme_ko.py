"""README.ko.md is README.md in Korean: the same shape, commands, recipe, figures and links."""

from __future__ import annotations

import re
from pathlib import Path

from support.docs import ROOT, blocks, headings, links

ENGLISH, KOREAN = ROOT / "README.md", ROOT / "README.ko.md"


def without_comments(text: str) -> list[str]:
    return [line.split(" # ")[0].rstrip() for line in text.splitlines()]


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "")
    return text


def test_the_headings_have_the_same_levels() -> None:
    assert [level for level, _ in headings(KOREAN)] == [level for level, _ in headings(ENGLISH)]


def test_commands_and_recipe_are_the_same_but_for_comments() -> None:
    english, korean = blocks(ENGLISH), blocks(KOREAN)
    assert [block.language for block in korean] == [block.language for block in english]
    for ours, theirs in zip(korean, english, strict=True):
        assert without_comments(ours.text) == without_comments(theirs.text)


def test_the_links_are_the_same_but_for_the_one_to_the_other_language() -> None:
    assert [link for link in links(KOREAN) if link != "README.md"] == [
        link for link in links(ENGLISH) if link != "README.ko.md"
    ]
    assert "README.md" in links(KOREAN)
    assert "README.ko.md" in links(ENGLISH)


def test_tables_and_lists_are_of_the_same_length() -> None:
    for start in ("|", "* "):
        counts = [sum(line.startswith(start) for line in prose(page).splitlines()) for page in (KOREAN, ENGLISH)]
        assert counts[0] == counts[1], start


def test_the_figures_are_the_same() -> None:
    """Every number with a thousands comma or a decimal point, and those before a unit."""
    found = [sorted(re.findall(r"\d+,\d{3}|\d+\.\d+|\d+(?= GiB)", prose(page))) for page in (KOREAN, ENGLISH)]
    assert found[0] == found[1]


def test_what_stands_in_code_is_the_same() -> None:
    codes = [set(re.findall(r"`([^`\n]+)`", prose(page))) for page in (KOREAN, ENGLISH)]
    assert codes[0] == codes[1]


def test_it_is_korean() -> None:
    text = re.sub(r"\[[^\]]*\]\([^)]*\)|`[^`]*`", "", prose(KOREAN))
    letters = re.findall(r"[^\W\d_]", text)
    assert sum("가" <= letter <= "힣" for letter in letters) > 0.6 * len(letters)
