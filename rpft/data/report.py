"""What became of the rows of a source: counts, reasons, and where to look."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rpft.data.sources import Format

_MOST_PLACES = 5


@dataclass
class SourceReport:
    """What became of the rows of one source.

    rows = trained_rows + the sum of dropped. ``trimmed`` counts chats whose messages after the last answer
    were taken off, ``cut`` the kept rows that truncation shortened. tokens and trained_tokens are of the kept
    rows; a preference pair is one row with the tokens of both sides. ``notes`` counts what was done or seen in
    rows that were kept. ``places`` holds, for each reason of dropped, cut and note, the first rows that it met.
    """

    path: str
    format: Format = "auto"
    rows: int = 0
    trained_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    trimmed: int = 0
    cut: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Counts a row that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self._place(reason, where)

    def note(self, what: str, where: str, count: int = 1) -> None:
        """Counts something about a row that a person should know of."""
        self.notes[what] = self.notes.get(what, 0) + count
        self._place(what, where)

    def shorten(self, where: str) -> None:
        """Counts a row that was cut."""
        self.cut += 1
        self._place("cut", where)

    def add(self, other: SourceReport) -> None:
        """Counts what a later part of the same source had."""
        self.format = other.format
        for name in ("rows", "trained_rows", "trimmed", "cut", "tokens", "trained_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.dropped, other.dropped), (self.notes, other.notes)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        for reason, places in other.places.items():
            for where in places:
                self._place(reason, where)

    def _place(self, reason: str, where: str) -> None:
        known = self.places.setdefault(reason, [])
        if len(known) < _MOST_PLACES:
            known.append(where)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``SourceReport(**...)`` is the way back."""
        return asdict(self)
