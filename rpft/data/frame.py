"""Find answers in a rendered chat by what is known to stand around messages, character by character.

    opening     question     prompt               lead   answer   tail        opening
    \\n<|user|>  Hi           <|end|>\\n<|assistant|>       Yo       <|end|>     \\n<|user|> ...

What stands between two messages is learned from turns whose spans are known, for each pair of roles. A further
turn is found where exactly these words stand around exactly its messages, from the end of the answer before on.
"""

from __future__ import annotations

from typing import Any

from rpft.data.messages import Chat, is_plain
from rpft.data.render import Span


class Frame:
    """What is known of the words around the messages of one chat, whose text is ``text``."""

    def __init__(self, text: str, chat: Chat, special_tokens: list[str]) -> None:
        self._text = text
        self._messages = chat.messages
        self._special_tokens = special_tokens
        self._between: dict[tuple[str, str], str] = {}
        """By the roles of two messages; on the side of an answer it ends at what the model says."""
        self._around: dict[str, tuple[str, str]] = {}
        """(lead, tail) of what the model says around an answer, by the role of the message before."""
        self._ends: dict[int, int] = {}
        """Where the last known answers end."""

    def follow(self, turn: int) -> Span | None:
        """The span of an answer after one that is known, if only known words stand before, in and after it."""
        previous = self._answer_before(turn)
        place = self._ends.get(previous)
        if place is None or turn + 1 >= len(self._messages):
            return None
        for message in range(previous + 1, turn):
            if not _is_printed(self._messages[message]):
                return None
            words, after = self._words(message - 1), self._words(message)
            if words is None or after is None or not self._text.startswith(words, place):
                return None
            place = self._printed(message, place + len(words), after)
            if place is None:
                return None
        words, after = self._words(turn - 1), self._words(turn)
        if words is None or after is None or not self._text.startswith(words, place):
            return None
        span = self._answer(turn, place + len(words))
        return span if span is not None and self._text.startswith(after, span[1]) else None

    def answer_from(self, turn: int, start: int) -> Span | None:
        """The span of an answer that starts at ``start``, if known words stand around it, a special token last.

        Without such a token a shorter end could stand where a longer one does.
        """
        span = self._answer(turn, start)
        if span is None or not any(self._text.endswith(token, *span) for token in self._special_tokens if token):
            return None
        return span

    def learn(self, turn: int, span: Span) -> None:
        """Takes the words around an answer whose span is known."""
        previous = self._answer_before(turn)
        start = self._ends.get(previous)
        if start is not None and all(map(_is_printed, self._messages[previous + 1 : turn])):
            self._learn_between(previous, turn, self._text[start : span[0]])
        self._ends = {turn: span[1]}
        if _is_printed(self._messages[turn]):
            around = _split(self._text[slice(*span)], self._messages[turn]["content"])
            if around is not None:
                self._around[self._role(turn - 1)] = around

    def _learn_between(self, previous: int, turn: int, text: str) -> None:
        words = []
        for message in range(previous + 1, turn):
            parts = _split(text, self._messages[message]["content"])
            if parts is None:
                return
            before, text = parts
            words.append(before)
        for message, learned in zip(range(previous, turn), [*words, text], strict=True):
            self._between[self._role(message), self._role(message + 1)] = learned

    def _answer(self, turn: int, start: int) -> Span | None:
        around = self._around.get(self._role(turn - 1))
        if around is None or not _is_printed(self._messages[turn]):
            return None
        lead, tail = around
        if not self._text.startswith(lead, start):
            return None
        end = self._printed(turn, start + len(lead), tail)
        return (start, end + len(tail)) if end is not None else None

    def _printed(self, message: int, place: int, after: str) -> int | None:
        """Where a message ends that starts at ``place``, if it stands there and ``after`` follows."""
        for printed in _printings(self._messages[message]["content"]):
            if self._text.startswith(printed, place) and self._text.startswith(after, place + len(printed)):
                return place + len(printed)
        return None

    def _words(self, message: int) -> str | None:
        """What is known to stand between a message and the next."""
        return self._between.get((self._role(message), self._role(message + 1)))

    def _role(self, message: int) -> str:
        return self._messages[message]["role"] if message >= 0 else ""

    def _answer_before(self, turn: int) -> int:
        return next((i for i in range(turn - 1, -1, -1) if self._messages[i]["role"] == "assistant"), -1)


def _is_printed(message: dict[str, Any]) -> bool:
    """Whether a message is nothing but text, all of which a template prints."""
    return is_plain(message) and bool(message["content"]) and "</think>" not in message["content"]


def _printings(content: str) -> list[str]:
    """A text as templates print it: as it is, or without the blanks around it."""
    stripped = content.strip()
    return [content] if stripped == content else [content, stripped]


def _split(text: str, content: str) -> tuple[str, str] | None:
    """What stands before and after a content that stands in a text once."""
    for printed in _printings(content):
        if printed and text.count(printed) == 1:
            before, _, after = text.partition(printed)
            return before, after
    return None
