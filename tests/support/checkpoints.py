"""Training checkpoints of other contents than rpft writes now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpft.train.checkpoint import content_digest


@contextmanager
def rewritten(state: Path) -> Iterator[dict[str, Any]]:
    """Gives what ``state``, a state.json, holds, and writes what becomes of it with a checksum that is right."""
    content = json.loads(state.read_text())
    del content["sha256"]
    yield content
    state.write_text(json.dumps({**content, "sha256": content_digest(content)}))
