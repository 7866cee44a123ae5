"""Conversations rendered by a chat template, with the spans of text that the assistant writes.

A template with `{% generation %}` marks these spans itself. For any other template, a turn begins where the conversation before
it ends when rendered with the generation prompt, and ends with the last special token that the template writes after it: the
server stops there. So the spans are the text that the model has to generate when it is served.

Some templates render a turn differently once others follow it: they drop the reasoning of earlier turns. Such a conversation
becomes several documents, each of which ends with a turn as the model generates it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.platform.errors import SHOWN, UserError, shown
from strata.training.data.finetuning.examples import Chat, Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
# Templates may write today's date. A fixed one makes the same examples the same tokens on every day.
DATE = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday", "%a": "Fri"}
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f' | replace("{code}", "{value}")' for code, value in DATE.items())
    + " }}{%- endmacro +%}"
)
END_OF_TURN_FIX = (
    "Set data.chat_template to a template that ends the assistant's turns with a special token, such as the EOS token: without "
    "one the model would not learn to stop."
)
TEMPLATE_FIX = "Fix the example, or set data.chat_template to another template."


@dataclass(frozen=True)
class Rendered:
    """Text of a document, and the spans [begin, end) that count in the loss, in characters."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    def __init__(self, tokenizer: "PreTrainedTokenizerFast", override: str | None) -> None:
        self._tokenizer, self._override = tokenizer, override
        self._variables: dict[str, Any] = tokenizer.special_tokens_map
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
        self._special = {content for content, special in added.items() if special}
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(self, chat: Chat, example: Example, mask: str) -> list[Rendered]:
        """Documents of a conversation. With the mask `all`, every token counts."""
        if mask == "all":
            text = self._text(chat, len(chat.messages), example)
            return [Rendered(text, ((0, len(text)),))]
        if GENERATION.search(self._source(chat, example)):
            return [self._marked(chat, example)]
        return self._derived(chat, example)

    def _marked(self, chat: Chat, example: Example) -> Rendered:
        """Spans that the template marks. They end with a special token, which may follow the mark."""
        text, spans = self._run(chat, len(chat.messages), example, marks=True)
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) == len(turns):
            spans = [span for span, turn in zip(spans, turns, strict=True) if turn in chat.counted]
        elif tuple(turns) != chat.counted:
            raise example.refusal(
                f"has {len(turns)} turns of the assistant, of which some do not count, but the chat template marks {len(spans)}",
                "Set data.chat_template to a template with one {% generation %} block for each turn of the assistant.",
            )
        one_each = len(spans) == len(chat.counted)
        ended = []
        for number, (begin, end) in enumerate(spans):
            if one_each:
                self._require_rendered(chat.messages[chat.counted[number]], text[begin:end], example)
            if tokens := self._last_tokens(text, begin, end):
                ended.append((begin, tokens[-1].end()))
            elif one_each and (size := self._token_after(chat, chat.counted[number], example)):
                ended.append((begin, end + size))
            else:
                raise self._endless(text[begin:end], example)
        return Rendered(text[: ended[-1][1]] if ended else text, tuple(ended))

    def _token_after(self, chat: Chat, turn: int, example: Example) -> int:
        """Length of the special token after a marked turn, 0 without one. The turn is the last message here: otherwise the token
        could be the beginning of the next."""
        text, spans = self._run(chat, turn + 1, example, marks=True)
        following = self._added.match(text, spans[-1][1]) if spans else None
        return len(following.group()) if following else 0

    def _derived(self, chat: Chat, example: Example) -> list[Rendered]:
        """Spans between a conversation up to a turn and the same with the turn."""
        documents: list[Rendered] = []
        text, spans = "", list[tuple[int, int]]()
        for turn in chat.counted:
            whole = self._text(chat, turn + 1, example)
            begin = self._begin(chat, turn, whole, example)
            end = self._end(chat, turn, whole, begin, example)
            self._require_rendered(chat.messages[turn], whole[begin:end], example)
            if not whole.startswith(text):  # the turns so far are rendered differently now
                documents.append(Rendered(text, tuple(spans)))
                spans = []
            text = whole[:end]
            spans.append((begin, end))
        return [*documents, Rendered(text, tuple(spans))]

    def _begin(self, chat: Chat, turn: int, whole: str, example: Example) -> int:
        if turn == 0:
            raise example.refusal("begins with the assistant, so nothing prompts its first turn", "Add a message before it.")
        prompt = self._text(chat, turn, example, prompt=True)
        if not whole.startswith(prompt):
            common = _common(whole, prompt)
            raise example.refusal(
                f"has a turn of the assistant that does not continue the chat template's generation prompt: "
                f"{prompt[common:][:SHOWN]!r} became {whole[common:][:SHOWN]!r}",
                "Set data.chat_template to a template that marks the turns with {% generation %}.",
            )
        if prompt != self._text(chat, turn, example):
            return len(prompt)
        # The template has no generation prompt: the header ends where turns with another content differ.
        others = [self._text(_with_answer(chat, turn, answer), turn + 1, example) for answer in ("0", "1")]
        return min(_common(whole, other) for other in others)

    def _end(self, chat: Chat, turn: int, whole: str, begin: int, example: Example) -> int:
        tokens = self._last_tokens(whole, begin, len(whole))
        if len(tokens) > 1:  # some templates end a whole conversation with one more token, but not a turn
            continued = self._continued(chat, turn, whole, example)
            cut = _common(whole, continued)
            tokens = [token for token in tokens if token.end() <= cut] or tokens
        if not tokens:
            raise self._endless(whole[begin:], example)
        return tokens[-1].end()

    def _continued(self, chat: Chat, turn: int, whole: str, example: Example) -> str:
        """The conversation with another generation prompt, if the template allows two turns of the assistant in a row."""
        try:
            return self._text(chat, turn + 1, example, prompt=True)
        except UserError:
            return whole

    def _last_tokens(self, text: str, begin: int, end: int) -> list[re.Match[str]]:
        """Special tokens at the end of the text, with only whitespace between and after them. Added tokens that are not special,
        such as `</tool_call>`, end a turn only if no special token does."""
        found: list[re.Match[str]] = []
        for match in reversed(list(self._added.finditer(text, begin, end))):
            if text[match.end() : end].strip():
                break
            found.insert(0, match)
            end = match.start()
        return [match for match in found if match.group() in self._special] or found

    def _endless(self, turn: str, example: Example) -> UserError:
        return example.refusal(f"has a turn of the assistant that no token ends: {turn[-SHOWN:]!r}", END_OF_TURN_FIX)

    def _require_rendered(self, message: Message, text: str, example: Example) -> None:
        """Refuses a turn that the template leaves out, such as a tool call by a template that knows none: the model would learn
        to answer with nothing."""
        names = [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
        if missing := next((name for name in names if name not in text), None):
            raise example.refusal(f"has a call of the tool '{shown(missing)}' that the chat template leaves out", TEMPLATE_FIX)
        if self._added.sub("", message["content"]).strip() and not self._added.sub("", text).strip():
            raise example.refusal("has a turn of the assistant that the chat template leaves out", TEMPLATE_FIX)

    def _text(self, chat: Chat, count: int, example: Example, prompt: bool = False) -> str:
        return self._run(chat, count, example, prompt=prompt)[0]

    def _run(
        self, chat: Chat, count: int, example: Example, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of the first `count` messages, and the spans that the template marks."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._source(chat, example)
        messages: Sequence[Message] = chat.messages[:count]
        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=None if chat.tools is None else list(chat.tools),
                chat_template=(FIXED_DATE + source) if "strftime_now" in source else source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except TemplateSyntaxError as error:
            raise UserError(f"The chat template is not valid Jinja: {error}.", "Correct it (data.chat_template).") from None
        except Exception as error:  # a template is a program of its own: it may raise anything
            raise example.refusal(f"is refused by the chat template: {shown(error, 200)}", TEMPLATE_FIX) from None
        return texts[0], spans[0] if marks else []

    def _source(self, chat: Chat, example: Example) -> str:
        if self._override is None and not self._tokenizer.chat_template:
            raise example.refusal(
                "is a conversation, but the tokenizer has no chat template", "Set data.chat_template to a file with one."
            )
        source: str = self._tokenizer.get_chat_template(self._override, None if chat.tools is None else list(chat.tools))
        return source


def _with_answer(chat: Chat, turn: int, answer: str) -> Chat:
    messages = (*chat.messages[:turn], {"role": "assistant", "content": answer})
    return Chat(messages, (turn,), chat.tools)


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
