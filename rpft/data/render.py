"""Render chats to text with the tokenizer's chat template, and say which row a template refused."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jinja2

from rpft.data.messages import Chat, is_plain
from rpft.data.templates import PINNED_DATE, compile_template, pin_date
from rpft.errors import UserError

Span = tuple[int, int]

_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# U+FDD0 is a Unicode noncharacter: text that people exchange never holds it.
_OPEN, _CLOSE = "\ufdd0generation\ufdd0", "\ufdd0endgeneration\ufdd0"


_NOT_VARIABLES = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""Arguments of ``apply_chat_template`` that are no variables of a template, or are rows'."""


class ChatRenderer:
    """A tokenizer's chat template, or the one given in its place.

    ``chat_template`` is the text of a jinja template; None takes the tokenizer's own. It is first looked
    at when a chat is rendered: text rows need no template. ``kwargs`` are further variables of the template;
    ``day`` (YYYY-MM-DD) is what it prints for today.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        kwargs: Mapping[str, Any] | None = None,
        day: str = PINNED_DATE,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = dict(kwargs or {})
        for name in _NOT_VARIABLES & self._kwargs.keys():
            raise UserError(
                f"data.template_kwargs: {name} is given by the rows and by other keys of data, and cannot be a"
                " variable of the template here. Remove it."
            )
        self._day = day
        self._variables = {**tokenizer.special_tokens_map, **self._kwargs}
        self._is_compiled_alike: dict[str, bool] = {}
        self._always_prompts: dict[tuple[str, str], bool] = {}
        self.prints_date = False
        """Whether a template that was used asks for today's date."""

    def has_marks(self, chat: Chat) -> bool:
        """Whether the template marks what the assistant says with ``{% generation %}``."""
        return _has_mark(self._template(chat))

    def render(self, chat: Chat, where: str, *, stop: int | None = None, prompt: bool = False) -> str:
        """The text of ``chat.messages[:stop]``, with the generation prompt after it if ``prompt``.

        Raises UserError naming ``where`` when the template refuses the messages.
        """
        template, messages = self._template(chat), chat.messages[:stop]
        if stop is not None and chat.tools is None and all(map(is_plain, messages)):
            compiled = self._compiled(template, chat, where)
            if compiled is not None:
                return self._guarded(lambda: self._quickly(compiled, messages, prompt), messages, where)
        return self._apply(template, messages, chat.tools, where, prompt)

    def always_prompts(self, chat: Chat, turn: int, prompt: str) -> bool:
        """Whether the template prints ``prompt``, which stands before a turn, without being asked for one."""
        key = self._template(chat), chat.messages[turn - 1]["role"]
        if key not in self._always_prompts:
            self._always_prompts[key] = self.render(chat, "", stop=turn) == prompt
        return self._always_prompts[key]

    def _compiled(self, template: str, chat: Chat, where: str) -> jinja2.Template | None:
        """The template as compiled here, for beginnings of a chat; None where it prints otherwise than elsewhere.

        ``apply_chat_template`` copies and looks through all that it is given, which takes longer than rendering.
        What is trained never rests on this alone: a beginning counts where the whole text, which transformers
        renders, has it.
        """
        compiled = compile_template(template)
        alike = self._is_compiled_alike.get(template)
        if alike is None:
            messages = chat.messages[:1]
            try:
                alike = self._quickly(compiled, messages, True) == self._apply(
                    template, messages, None, where, True
                )
            except Exception:
                return None  # This chat says nothing of how they compare.
            self._is_compiled_alike[template] = alike
        return compiled if alike else None

    def _quickly(self, compiled: jinja2.Template, messages: list[dict[str, Any]], prompt: bool) -> str:
        return compiled.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self._variables
        )

    def render_marked(self, chat: Chat, where: str) -> tuple[str, list[Span]]:
        """The text of a chat, and the character spans inside the template's generation marks."""
        # The template itself prints a sentinel at each mark, inside the block, so that the spans hold
        # wherever the block stands (in a macro, under a filter). The empty `if` keeps the blank control of
        # the original tag.
        template = _with_sentinels(self._template(chat))
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
        text, asks_for_date = pin_date(self._unpinned(chat), self._day)
        self.prints_date |= asks_for_date
        return text

    def _unpinned(self, chat: Chat) -> str:
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
        return self._guarded(
            lambda: self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._kwargs,
            ),
            messages,
            where,
        )

    def _guarded(self, rendering: Callable[[], str], messages: list[dict[str, Any]], where: str) -> str:
        try:
            return rendering()
        except jinja2.TemplateSyntaxError as error:
            whose = "data.chat_template" if self._chat_template else "of the tokenizer in model.path"
            raise UserError(
                f"The chat template ({whose}) is not valid jinja, line {error.lineno}: {error.message}. Correct"
                " it, or name another in data.chat_template"
            ) from error
        except Exception as error:
            # A template is a program that meets the row's own values: whatever it raises is about this row.
            advice = _MERGE_ADVICE if any(m["role"] == "system" for m in messages) else ""
            if any("tool_calls" in message for message in messages):
                advice = f"{advice} {_CALLS_ADVICE}".lstrip()
            said = str(error).rstrip(". ")
            raise UserError(f"{where}: the chat template refused this row: {said}. {advice}".rstrip()) from error


_MERGE_ADVICE = "If the template has no system role, set data.system_role: merge, or take the system message out."
_CALLS_ADVICE = (
    "Tool calls need a template that prints them: set one in data.chat_template, or remove the row. Some templates"
    " want `arguments` as the text of an object, most as an object."
)


@functools.lru_cache(maxsize=16)
def _has_mark(template: str) -> bool:
    return _MARK.search(template) is not None


@functools.lru_cache(maxsize=16)
def _with_sentinels(template: str) -> str:
    return _MARK.sub(_with_sentinel, template)


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
        calls = message.get("tool_calls", ())
        for call in calls:
            name = call.get("function", call).get("name")
            if not isinstance(name, str) or name not in text:
                raise UserError(f"{where}: the chat template leaves the tool call {name!r} out. {_CALLS_ADVICE}")
        if role == "assistant" and (message["content"] or "").rpartition("</think>")[2].strip() not in text:
            beside = " that stands beside a tool call" if calls else ""
            raise UserError(
                f"{where}: the chat template leaves out or changes what the assistant says{beside}. Give a"
                " template that prints it in data.chat_template, or correct the row."
            )


def count_removed_thoughts(chat: Chat, text: str) -> int:
    """How many messages have reasoning that the rendered text lacks."""
    return sum(thought not in text for thought in map(_thought, chat.messages) if thought)


def _thought(message: dict[str, Any]) -> str:
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(key), str):
            return message[key].strip()
    content = message["content"]
    if message["role"] != "assistant" or not content or "</think>" not in content:
        return ""
    return content.partition("</think>")[0].rpartition("<think>")[2].strip()


def with_empty_content(chat: Chat) -> Chat | None:
    """The chat with an empty text in place of a null beside tool calls; None where there is none.

    Templates differ in which of the two they take, and newer versions of transformers take nulls out.
    """
    if all(message["content"] is not None for message in chat.messages):
        return None
    return replace(chat, messages=[{**m, "content": ""} if m["content"] is None else m for m in chat.messages])


def with_plain_arguments(chat: Chat, text: str) -> Chat | None:
    """The chat with arguments of tool calls as objects, where ``text`` has them as JSON within JSON; else None.

    OpenAI's format writes arguments as the text of a JSON object. Templates that expect an object print such a
    text with quotes and backslashes, which no model is meant to say.
    """
    if not any("tool_calls" in message for message in chat.messages):
        return None
    found = False
    messages = []
    for message in chat.messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, str) and _is_quoted_in(text, arguments):
                plain = {**function, "arguments": json.loads(arguments)}
                call = {**call, "function": plain} if "function" in call else plain
                found = True
            calls.append(call)
        messages.append({**message, "tool_calls": calls} if calls else message)
    return replace(chat, messages=messages) if found else None


def _is_quoted_in(text: str, arguments: str) -> bool:
    if json.dumps(arguments) not in text and json.dumps(arguments, ensure_ascii=False) not in text:
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


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
