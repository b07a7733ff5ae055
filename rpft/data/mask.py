"""Find the characters of a rendered chat that the model is trained to say.

A template with ``{% generation %}`` marks says it itself. Otherwise the span of an assistant turn is derived
by rendering prefixes of the chat::

    messages[:i] + generation prompt   <|user|>Hi<|end|>\\n<|assistant|>
    messages[:i+1]                     <|user|>Hi<|end|>\\n<|assistant|>Yo<|end|>\\n
                                                                       ^^^^^^^^^ trained

so what is trained is what the model has to say after the prompt it gets at inference, its end-of-turn token
included and the blanks that the template prints after that token excluded. Templates that render an earlier
turn otherwise than a last one (reasoning taken out, another end token) break a prefix; the missing end of the
turn is then found with a probe: the whole chat with only this answer replaced. What stands before and after
the probe stands before and after the answer. A turn that neither way finds exactly is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rpft.data.frame import Frame
from rpft.data.messages import Chat
from rpft.data.render import ChatRenderer, Span, refuse_left_out, with_empty_content, with_plain_arguments
from rpft.errors import UserError

TrainOn = Literal["assistant", "last_assistant", "all", "completion"]

_PROBE = "\ufdd0probe\ufdd0"


def render_with_spans(
    chat: Chat, train_on: TrainOn, renderer: ChatRenderer, special_tokens: list[str], where: str
) -> tuple[str, list[Span]]:
    """The text of a chat and its trained character spans, in order.

    ``special_tokens`` are the texts of the tokenizer's special tokens. Raises UserError naming ``where`` when
    the spans cannot be told exactly.
    """
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if train_on == "all":
        chosen = [i for i, trained in enumerate(chat.trainable) if not trained]
        if set(chosen) - set(answers):
            raise UserError(
                f"{where}: with data.train_on: all, `train: false` may stand on assistant messages only."
            )
    else:
        chosen = [i for i in _asked(train_on, chat, answers) if chat.trainable[i]]
    try:
        text, spans = _spans_of(chosen, answers, chat, renderer, special_tokens, where)
    except UserError:
        spelled = with_empty_content(chat)
        if spelled is None:
            raise
        chat = spelled
        text, spans = _spans_of(chosen, answers, chat, renderer, special_tokens, where)
    plain = with_plain_arguments(chat, text)
    if plain is not None:
        chat = plain
        text, spans = _spans_of(chosen, answers, chat, renderer, special_tokens, where)
    refuse_left_out(chat, text, where)
    return text, _complement(spans, len(text)) if train_on == "all" else spans


def _asked(train_on: TrainOn, chat: Chat, answers: list[int]) -> list[int]:
    """The answers that ``train_on`` asks for."""
    if train_on == "assistant":
        return answers
    if train_on == "last_assistant":
        return answers[-1:]
    start = chat.completion_from
    if start is None:
        # Without a completion of its own, a chat's is all that is said after the last question, calls of tools
        # too.
        start = max((i for i, message in enumerate(chat.messages) if message["role"] == "user"), default=-1) + 1
    return [i for i in answers if i >= start]


def _spans_of(
    wanted: list[int],
    answers: list[int],
    chat: Chat,
    renderer: ChatRenderer,
    special_tokens: list[str],
    where: str,
) -> tuple[str, list[Span]]:
    if not wanted or not renderer.has_marks(chat):
        text = renderer.render(chat, where)
        return text, _derive_all(wanted, answers, text, chat, renderer, special_tokens, where)
    text, spans = renderer.render_marked(chat, where)
    if wanted == answers:
        return text, spans
    if len(spans) != len(answers):
        raise UserError(
            f"{where}: the template marks {len(spans)} spans for {len(answers)} assistant messages, so "
            "single messages cannot be chosen: use data.train_on: assistant without `train: false`."
        )
    return text, [spans[answers.index(i)] for i in wanted]


def _derive_all(
    wanted: list[int],
    answers: list[int],
    text: str,
    chat: Chat,
    renderer: ChatRenderer,
    special_tokens: list[str],
    where: str,
) -> list[Span]:
    """The spans of the wanted turns: by prefixes where nothing else tells, by what is known of the chat elsewhere.

    Rendering two prefixes for every turn would take time quadratic in the number of turns.
    """
    if not wanted:
        return []
    frame = Frame(text, chat, special_tokens)
    spans: dict[int, Span] = {}
    # The last answer first: where a template prints all alike, it says how the others end.
    for turn in [answers[-1], *answers[:-1]]:
        span = frame.follow(turn) if turn != answers[-1] else None
        if span is None:
            span = _derive(turn, text, chat, renderer, special_tokens, where, frame) if turn in wanted else None
        if span is not None:
            frame.learn(turn, span)
            spans[turn] = span
    lost = next((turn for turn in wanted if turn not in spans), None)
    if lost is not None:
        raise UserError(
            f"{where}: what the assistant says in message {lost} cannot be found exactly in the rendered "
            "chat, because the chat template prints that turn in another way when messages follow or change. "
            "Mark the answer with {% generation %} ... {% endgeneration %} in data.chat_template, or set "
            "data.train_on: last_assistant or `train: false` on this message."
        )
    return [spans[turn] for turn in wanted]


def _derive(
    turn: int,
    text: str,
    chat: Chat,
    renderer: ChatRenderer,
    special_tokens: list[str],
    where: str,
    frame: Frame | None = None,
) -> Span | None:
    """The span of a turn by renderings of the chat, fewer with a frame; None where they give no exact place."""
    prompt = _prompt_before(turn, chat, renderer, where)
    if prompt is not None and not text.startswith(prompt):
        prompt = None
    if prompt is not None:
        if frame is not None and (span := frame.answer_from(turn, len(prompt))):
            return span
        last = turn == len(chat.messages) - 1
        upto = text if last else _prefix(chat, renderer, where, stop=turn + 1)
        if upto is not None and upto.startswith(prompt):
            said = _without_template_blanks(upto[len(prompt) :], chat.messages[turn])
            if text.startswith(said, len(prompt)):
                end = len(prompt) + len(said)
                if last and renderer.always_prompts(chat, turn, prompt):
                    probed = _probe(turn, text, chat, renderer, special_tokens, where)
                    if probed is not None and prompt.endswith(text[probed[1] :]):
                        end = probed[1]  # What follows is the prompt for an answer that nobody gives.
                return len(prompt), end
    probed = _probe(turn, text, chat, renderer, special_tokens, where)
    if probed is None:
        return None
    start, end = probed
    return (len(prompt), end) if prompt is not None and len(prompt) <= end else (start, end)


def _prompt_before(turn: int, chat: Chat, renderer: ChatRenderer, where: str) -> str | None:
    # A chat of nothing, or of a system message alone, is what many templates cannot render.
    if turn == 0 or chat.messages[turn - 1]["role"] == "system":
        return None
    return _prefix(chat, renderer, where, stop=turn, prompt=True)


def _prefix(chat: Chat, renderer: ChatRenderer, where: str, *, stop: int, prompt: bool = False) -> str | None:
    try:
        return renderer.render(chat, where, stop=stop, prompt=prompt)
    except UserError:
        return None  # The whole chat did render: this template only refuses the prefix.


def _without_template_blanks(said: str, message: dict[str, Any]) -> str:
    """Cut the blanks after the end-of-turn token; without such a token they are the only end there is."""
    stripped = said.rstrip()
    answer = (message["content"] or "").rstrip()
    if answer and stripped.endswith(answer):
        before = stripped[: -len(answer)]
        if not before.endswith(answer):  # else the answer is the text of the token itself
            return said
    return stripped


def _probe(
    turn: int, text: str, chat: Chat, renderer: ChatRenderer, special_tokens: list[str], where: str
) -> Span | None:
    messages = list(chat.messages)
    messages[turn] = {"role": "assistant", "content": _PROBE}
    try:
        probed = renderer.render(replace(chat, messages=messages), where)
    except UserError:
        return None
    head, found, tail = probed.partition(_PROBE)
    if not found or _PROBE in tail or len(head) + len(tail) > len(text):
        return None
    if not text.startswith(head) or not text.endswith(tail):
        return None
    after = tail.lstrip()
    ends = [token for token in special_tokens if token and after.startswith(token)]
    if not ends:
        return None
    end = len(text) - len(after) + len(max(ends, key=len))
    return len(head), end


def _complement(spans: list[Span], length: int) -> list[Span]:
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
