"""A hook of mkdocs: links of a page that lead out of docs/ become the name of the file they lead to.

On the site there is no such file; in the repository there is, and a test sees to it.
"""

from __future__ import annotations

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return _OUT_OF_DOCS.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link["text"], link["path"]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
