"""How a model that was trained on rows is asked, and with which token it ends its answers."""

from __future__ import annotations

from typing import Any

from rpft.data.encode import Encoder
from rpft.data.loader import DataSettings
from rpft.data.mask import render_with_spans
from rpft.data.messages import Chat
from rpft.data.render import ChatRenderer, merge_system
from rpft.errors import UserError

_QUESTION, _ANSWER = "Ping", "Pong"
_WHERE = "the prompt"


class Asking:
    """Prompts as the rows of a run were rendered: the same template, variables, date and begin token."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._encoder = Encoder(tokenizer)
        self._renderer = ChatRenderer(
            tokenizer, settings.chat_template, settings.template_kwargs, settings.template_date
        )

    @property
    def is_chat(self) -> bool:
        """Whether there is a chat template; without one a prompt is a text to go on with."""
        return bool(self._settings.chat_template or self._tokenizer.chat_template)

    def ids(self, prompt: str, system: str | None = None) -> list[int]:
        """The tokens that ask ``prompt``. UserError where there is no place for ``system``."""
        if not self.is_chat:
            if system is not None:
                raise UserError("a system message needs a chat template, and the tokenizer has none")
            return self._encode(prompt)
        chat = _chat(prompt, system)
        if self._settings.system_role == "merge":
            chat = merge_system(chat, _WHERE)
        return self._encode(self._renderer.render(chat, _WHERE, prompt=True))

    def end_ids(self) -> list[int]:
        """The tokens that end an answer: the tokenizer's end of text, and what the template ends a turn with."""
        ends = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        tail = self._tail_of_a_turn() if self.is_chat else ""
        if tail in self._encoder.special_tokens:
            ends.append(self._tokenizer.convert_tokens_to_ids(tail))
        return list(dict.fromkeys(ends))

    def _tail_of_a_turn(self) -> str:
        """What the template prints behind an answer that the model has to say, too."""
        chat, special = _chat(_QUESTION, None, _ANSWER), self._encoder.special_tokens
        try:
            text, spans = render_with_spans(chat, "assistant", self._renderer, special, _WHERE)
        except UserError:  # a template that no answer can be found in has taught no end either
            return ""
        return text[slice(*spans[-1])].rpartition(_ANSWER)[2].strip() if spans else ""

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode([text], [[]], [False])[0].ids.tolist()


def _chat(question: str, system: str | None, answer: str | None = None) -> Chat:
    turns = [("system", system), ("user", question), ("assistant", answer)]
    messages = [{"role": role, "content": text} for role, text in turns if text is not None]
    return Chat(messages, [message["role"] == "assistant" for message in messages])
