"""What stands in the documentation: its pages, their commands, code blocks, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.ko.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

_FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`(?P<text>[^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_PROGRAMS = ("rpft", "python", "make", "pytest")


@dataclass(frozen=True)
class Command:
    """A command line as a page shows it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced block; ``name``: of the file that it is, where the line before it names one."""

    language: str
    text: str
    name: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCED.finditer(text):
        named = re.search(r"`(?P<name>[\w./-]+)`:\n\n\Z", text[: match.start()])
        found.append(Block(match["language"], match["text"], named and named["name"]))
    return found


def commands(page: Path) -> Iterator[Command]:
    """Command lines in blocks and in the text; what has a gap (...) is a form, not a command."""
    text = page.read_text(encoding="utf-8")
    lines = []
    for block in blocks(page):
        if block.language == "sh":
            lines += block.text.replace("\\\n", " ").splitlines()
    prose = _FENCED.sub("", text)
    # Indented blocks hold a command and, after two spaces or more, what it does.
    lines += [re.split(r"\s{2,}", line.strip())[0] for line in prose.splitlines() if line.startswith("    ")]
    lines += [match["text"].replace("\n", " ") for match in _INLINE.finditer(prose)]
    name = str(page.relative_to(ROOT))
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first in _PROGRAMS and rest and "..." not in rest:
            yield Command(name, line.strip())


def headings(page: Path) -> list[tuple[int, str]]:
    """(Level, text) of each."""
    prose = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.+)$", prose, re.MULTILINE)]


def links(page: Path) -> list[str]:
    return [match["target"] for match in _LINK.finditer(_FENCED.sub("", page.read_text(encoding="utf-8")))]


def anchor(heading: str) -> str:
    """As GitHub and mkdocs make it of plain words."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
