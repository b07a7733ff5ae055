"""Render chats to text with the tokenizer's chat template, and say which row a template refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jinja2

from rpft.data.formats import Chat
from rpft.errors import UserError

Span = tuple[int, int]

_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# U+FDD0 is a Unicode noncharacter: text that people exchange never holds it.
_OPEN, _CLOSE = "\ufdd0generation\ufdd0", "\ufdd0endgeneration\ufdd0"


class ChatRenderer:
    """A tokenizer's chat template, or the one given in its place.

    ``chat_template`` is the text of a jinja template; None takes the tokenizer's own. It is first looked
    at when a chat is rendered: text rows need no template.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def has_marks(self, chat: Chat) -> bool:
        """Whether the template marks what the assistant says with ``{% generation %}``."""
        return _MARK.search(self._template(chat)) is not None

    def render(self, chat: Chat, where: str, *, stop: int | None = None, prompt: bool = False) -> str:
        """The text of ``chat.messages[:stop]``, with the generation prompt after it if ``prompt``.

        Raises UserError naming ``where`` when the template refuses the messages.
        """
        return self._apply(self._template(chat), chat.messages[:stop], chat.tools, where, prompt)

    def render_marked(self, chat: Chat, where: str) -> tuple[str, list[Span]]:
        """The text of a chat, and the character spans inside the template's generation marks."""
        # The template itself prints a sentinel at each mark, inside the block, so that the spans hold
        # wherever the block stands (in a macro, under a filter). The empty `if` keeps the blank control of
        # the original tag.
        template = _MARK.sub(_with_sentinel, self._template(chat))
        marked = self._apply(template, chat.messages, chat.tools, where, prompt=False)
        pieces = re.split(f"({_OPEN}|{_CLOSE})", marked)
        spans: list[Span] = []
        length, begin = 0, 0
        for piece in pieces:
            if piece == _OPEN:
                begin = length
            elif piece == _CLOSE:
                spans.append((begin, length))
            else:
                length += len(piece)
        text = "".join(piece for piece in pieces if piece not in (_OPEN, _CLOSE))
        if text != self.render(chat, where):
            raise UserError(
                f"{where}: the chat template prints another text when its generation marks are read, so what "
                "the assistant said cannot be found. Move {% generation %} to stand directly around the "
                "answer in data.chat_template, or remove it."
            )
        return text, spans

    def _template(self, chat: Chat) -> str:
        if self._chat_template is not None:
            return self._chat_template
        if not self._tokenizer.chat_template:
            raise UserError(
                "The tokenizer has no chat template, and the data holds chats: set data.chat_template to a "
                "jinja template, or use the tokenizer of an instruct model."
            )
        try:
            return self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:
            raise UserError(
                "The tokenizer has several chat templates and none is named default: set data.chat_template."
            ) from error

    def _apply(
        self, template: str, messages: list[dict[str, Any]], tools: list[Any] | None, where: str, prompt: bool
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"The chat template (data.chat_template) is not valid jinja, line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:
            # A template is a program that meets the row's own values: whatever it raises is about this row.
            advice = _MERGE_ADVICE if any(m["role"] == "system" for m in messages) else ""
            if any("tool_calls" in message for message in messages):
                advice = f"{advice} {_CALLS_ADVICE}".lstrip()
            said = str(error).rstrip(". ")
            raise UserError(f"{where}: the chat template refused this row: {said}. {advice}".rstrip()) from error


_MERGE_ADVICE = "If the template has no system role, set data.system_role: merge, or take the system message out."
_CALLS_ADVICE = "Tool calls need a template that prints them: set one in data.chat_template, or remove the row."


def _with_sentinel(mark: re.Match[str]) -> str:
    left, end, right = mark.groups(default="")
    if end:
        return f"{{%{left} if true %}}{{{{ '{_CLOSE}' }}}}{{% endif %}}{{% endgeneration {right}%}}"
    return f"{{%{left} generation %}}{{{{ '{_OPEN}' }}}}{{% if true %}}{{% endif {right}%}}"


def refuse_left_out(chat: Chat, text: str, where: str) -> None:
    """Raise UserError when the rendered text lacks something that the chat says.

    Templates drop without a word what they do not know: a system role, tool calls, or all content when they
    expect it as a list of parts.
    """
    for message in chat.messages:
        role = message["role"]
        if role in ("system", "user") and message["content"].strip() not in text:
            advice = _MERGE_ADVICE if role == "system" else "Give a template for text in data.chat_template."
            raise UserError(f"{where}: the chat template leaves the {role} message out. {advice}")
        for call in message.get("tool_calls", ()):
            name = call.get("function", call).get("name")
            if not isinstance(name, str) or name not in text:
                raise UserError(f"{where}: the chat template leaves the tool call {name!r} out. {_CALLS_ADVICE}")


def merge_system(chat: Chat, where: str) -> Chat:
    """Put the text of every system message in front of the user message that follows it."""
    messages, trainable, waiting = [], [], []
    for message, trained in zip(chat.messages, chat.trainable, strict=True):
        if message["role"] == "system":
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*waiting, message["content"]])}
            waiting = []
        messages.append(message)
        trainable.append(trained)
    if waiting:
        raise UserError(f"{where}: no user message follows the system message that it could be merged into.")
    return replace(chat, messages=messages, trainable=trainable)
