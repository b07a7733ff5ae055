"""Pages that rpft writes, read as HTML and laid out by a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="NO BROWSER: the page's layout is not checked; install chromium"
)

_NEVER_CLOSED = ("meta", "input", "br", "wbr", "img")


class _Balanced(HTMLParser):
    """Reads a page and holds every element to being closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in _NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole_and_alone(text: str) -> None:
    """The page needs no other file and no script; every element is closed, every id is there once."""
    alone = re.sub(r"src='data:image/svg\+xml;base64,[A-Za-z0-9+/=]*'", "", text)
    assert not re.search(r"https?://|<script|<link|src=|url\(|@import", alone)
    assert alone.count("<img") == text.count("src='data:")
    reader = _Balanced()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))


def visible(text: str) -> str:
    """What the page says, tags taken out."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))


def in_browser(text: str, folder: Path, width: int, dark: bool = False) -> Any:
    """What a browser whose window is ``width`` pixels wide leaves as JSON in the title of the page ``text``."""
    assert BROWSER is not None
    copy = folder / "copy.html"
    copy.write_text(text, encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [*scheme, f"--window-size={width},1200", "--dump-dom", copy.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"<title>(\{.*?\})</title>", ran.stdout)
    assert found is not None, ran.stderr
    return json.loads(found.group(1))
