"""Loss masks of conversations, by the templates of known model families."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.platform.errors import UserError
from strata.training.data.finetuning.examples import Place, parse
from strata.training.data.finetuning.rendering import Document, Renderer, load_tokenizer

from . import tiny
from .tiny import assistant, user

Load = Callable[..., Any]

TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}
LOSES_CONTENT = tiny.CHATML.replace(
    "{{ message['content'] }}", "{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
)
CONVERSATION = [user("hello"), assistant("I am fine"), user("What is 2 + 2?"), assistant("It is 4.")]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Tokenizer with a template, made once for each."""
    made: dict[Any, Any] = {}

    def loaded(template: str | None, **options: Any) -> Any:
        key = (template, *sorted(options.items()))
        if key not in made:
            made[key] = load_tokenizer(tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, **options))
        return made[key]

    return loaded


def rendered(tokenizer: Any, row: dict[str, Any], kind: Any = "chat", mask: str = "assistant", **more: Any) -> list[Document]:
    [documents] = Renderer(tokenizer, more.get("template"), mask).render([parse(row, kind, Place("a.jsonl", "line", 7))])
    return documents


def counted(tokenizer: Any, documents: list[Document]) -> list[list[str]]:
    """Text of the counted tokens of each document, one string for each run."""
    found = []
    for document in documents:
        runs = groupby(zip(document.mask.tolist(), document.ids.tolist(), strict=True), key=lambda pair: pair[0])
        found.append([tokenizer.decode([token for _, token in run]) for counts, run in runs if counts])
    return found


def whole(tokenizer: Any, document: Document) -> str:
    text: str = tokenizer.decode(document.ids.tolist())
    return text


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (tiny.CHATML, "<|im_end|>"),
        (tiny.CHATML_WITHOUT_PROMPT, "<|im_end|>"),
        (tiny.LLAMA, "<|eot_id|>"),
        (tiny.GEMMA, "<end_of_turn>"),
        (tiny.GENERATION, "<|im_end|>"),
        (tiny.GENERATION_WITHOUT_END, "<|im_end|>"),
        (tiny.PHI, "<|end|>"),
    ],
)
def test_every_turn_counts_with_its_end(load: Load, template: str, end: str, trim_offsets: bool) -> None:
    tokenizer = load(template, trim_offsets=trim_offsets)
    documents = rendered(tokenizer, {"messages": CONVERSATION})
    assert counted(tokenizer, documents) == [[f"I am fine{end}", f"It is 4.{end}"]]
    expected = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    if template != tiny.PHI:  # its tokens take whitespace, which decoding does not restore
        assert expected.rstrip("\n") == whole(tokenizer, documents[0])


def test_mistral_has_no_header(load: Load) -> None:
    tokenizer = load(tiny.MISTRAL)
    documents = rendered(tokenizer, {"messages": CONVERSATION})
    assert counted(tokenizer, documents) == [[" I am fine</s>", " It is 4.</s>"]]
    assert whole(tokenizer, documents[0]).startswith("<s>[INST] hello [/INST] I am fine</s>[INST]")


def test_reasoning_of_earlier_turns_makes_several_documents(load: Load) -> None:
    """The model generates each turn with its reasoning, and sees earlier turns without theirs."""
    tokenizer = load(tiny.QWEN)
    messages = [
        user("hello"),
        assistant("<think>\nhow?\n</think>\n\nI am fine"),
        user("What is 2 + 2?"),
        assistant("It is 4.", reasoning_content="2 + 2"),
        user("thank you"),
        assistant("you"),
    ]
    documents = rendered(tokenizer, {"messages": messages})
    assert counted(tokenizer, documents) == [
        ["<think>\nhow?\n</think>\n\nI am fine<|im_end|>"],
        ["<think>\n2 + 2\n</think>\n\nIt is 4.<|im_end|>"],
        ["<think>\n\n</think>\n\nyou<|im_end|>"],
    ]
    for index, document in zip((1, 3, 5), documents, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        assert whole(tokenizer, document).startswith(prompt)
        assert "how?" not in prompt and "2 + 2\n" not in prompt


def test_tool_calls_count_and_tool_results_do_not(load: Load) -> None:
    tokenizer = load(tiny.QWEN)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        user("weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        assistant("It is rain."),
        user("thank you"),
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    documents = rendered(tokenizer, {"messages": messages, "tools": tools})
    assert counted(tokenizer, documents) == [
        [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nIt is rain.<|im_end|>",
        ]
    ]
    text = whole(tokenizer, documents[0])
    assert text.startswith("<|im_start|>system\n# Tools\n") and "<tool_response>\nrain\n" in text
    assert "thank you" not in text  # nothing after the last counted turn can matter


def test_prompt_of_a_completion_does_not_count(load: Load) -> None:
    for template in (tiny.CHATML, tiny.GENERATION):
        tokenizer = load(template)
        row = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
        assert counted(tokenizer, rendered(tokenizer, row, "completion")) == [["It is 4.<|im_end|>"]]
        row = {"prompt": CONVERSATION[:3], "chosen": CONVERSATION[3:], "rejected": [assistant("How?")]}
        pair = counted(tokenizer, rendered(tokenizer, row, "preference"))
        assert pair == [["It is 4.<|im_end|>"], ["How?<|im_end|>"]]


def test_mask_of_all_tokens(load: Load) -> None:
    tokenizer = load(tiny.CHATML)
    [document] = rendered(tokenizer, {"messages": [*CONVERSATION, user("thank you ")]}, mask="all")
    assert document.mask.all()
    assert whole(tokenizer, document).endswith("thank you <|im_end|>\n")
    [document] = rendered(load(tiny.ENDLESS), {"messages": CONVERSATION}, mask="all")  # needs no end of turn
    assert document.mask.all()


def test_template_of_the_recipe_replaces_the_tokenizers(load: Load) -> None:
    for tokenizer in (load(tiny.LLAMA), load(None)):
        documents = rendered(tokenizer, {"messages": CONVERSATION}, template=tiny.CHATML)
        assert counted(tokenizer, documents) == [["I am fine<|im_end|>", "It is 4.<|im_end|>"]]


def test_whitespace_of_an_answer_counts(load: Load) -> None:
    """Byte-level tokenizers report no characters for a token of spaces. A special token that takes the spaces after it is still
    a header, and the newline of the header merges with those of the answer."""
    answer = "\n\ndef add(a, b):\n        return a  \n"
    tokenizer = load(tiny.CHATML)
    [[text]] = counted(tokenizer, rendered(tokenizer, {"messages": [user("hello"), assistant(answer)]}))
    assert text.endswith(f"{answer}<|im_end|>") and not text.removesuffix(f"{answer}<|im_end|>").strip("\n")
    [document] = rendered(tokenizer, {"messages": [user("hello"), assistant(answer)]})
    assert not document.mask[: whole(tokenizer, document).count("<|im_start|>")].any()
    phi = load(tiny.PHI)
    [document] = rendered(phi, {"messages": [user("hello"), assistant("   It is 4.")]})
    header = document.ids.tolist().index(phi.convert_tokens_to_ids("<|assistant|>"))
    assert not document.mask[: header + 1].any() and document.mask[header + 1 :].all()


def test_weight_0_leaves_a_turn_out(load: Load) -> None:
    messages = [CONVERSATION[0], assistant("I am fine", weight=0), *CONVERSATION[2:]]
    for template in (tiny.CHATML, tiny.GENERATION, tiny.QWEN):
        tokenizer = load(template)
        [[text]] = counted(tokenizer, rendered(tokenizer, {"messages": messages}))
        assert text.endswith("It is 4.<|im_end|>") and "fine" not in text


def test_two_turns_in_a_row(load: Load) -> None:
    tokenizer = load(tiny.CHATML)
    documents = rendered(tokenizer, {"messages": [user("hello"), assistant("I am"), assistant("fine")]})
    assert counted(tokenizer, documents) == [["I am<|im_end|>", "fine<|im_end|>"]]


def test_date_does_not_depend_on_the_day(load: Load) -> None:
    dated = "{%- macro line() %}{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}{% endmacro -%}\n{{ line() }}\n"
    tokenizer = load(dated + tiny.CHATML)
    [document] = rendered(tokenizer, {"messages": CONVERSATION})
    assert whole(tokenizer, document).startswith("26 Jul 2024|2024-07-26\n<|im_start|>")
    plain = load("\n\n" + tiny.CHATML)
    begins = "\n\n{% if strftime_now is defined %}{% endif %}"
    assert whole(plain, rendered(plain, {"messages": CONVERSATION})[0]).startswith("\n\n<|im_start|>")
    assert whole(plain, rendered(plain, {"messages": CONVERSATION}, template=begins + tiny.CHATML)[0]).startswith(
        "\n\n<|im_start|>"
    )


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (tiny.ENDLESS, CONVERSATION, "has a turn of the assistant that no token ends: ' I am fine\\n'"),
        (tiny.GENERATION.replace("<|im_end|>", ""), CONVERSATION, "has a turn of the assistant that no token ends: 'I am fine'"),
        (
            tiny.GENERATION.replace("<|im_end|>", ""),
            [*CONVERSATION, user("thank you")],
            "has a turn of the assistant that no token ends: 'I am fine'",
        ),
        (tiny.OPENS_REASONING, CONVERSATION, "generation prompt: '<think>\\n' became 'I am fine<|im_end|>"),
        (tiny.CHATML, [user("a"), TOOL_CALL], "has a call of the tool 'weather' that the chat template leaves out"),
        (tiny.GENERATION, [user("a"), TOOL_CALL], "has a call of the tool 'weather' that the chat template leaves out"),
        (LOSES_CONTENT, [user("a"), assistant("b")], "has a turn of the assistant that the chat template leaves out"),
        (None, CONVERSATION, "is a conversation, but the tokenizer has no chat template"),
        (
            tiny.GEMMA,
            [{"role": "system", "content": "x"}, *CONVERSATION],
            "refused by the chat template: System role not supported",
        ),
        (tiny.GEMMA, [user("a"), *CONVERSATION], "refused by the chat template: Conversation roles must alternate"),
        (
            tiny.MISTRAL,
            [user("a"), {"role": "tool", "content": "x"}, assistant("b")],
            "refused by the chat template: Only user and",
        ),
        (tiny.CHATML, [assistant("b"), *CONVERSATION], "begins with the assistant, so nothing prompts its first turn"),
        ("{{ messages[9]['content'] + 1 }}", CONVERSATION, "refused by the chat template"),
        (
            tiny.GENERATION + "{% generation %}</s>{% endgeneration %}",
            [user("a"), assistant("b", weight=0), *CONVERSATION],
            "marks 4",
        ),
    ],
)
def test_refused_conversation_is_named(load: Load, template: str | None, messages: list[Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        rendered(load(template), {"messages": messages})
    assert problem in raised.value.cause
    assert raised.value.cause.startswith("Line 7 of a.jsonl ") and '. The example: {"messages"' in raised.value.cause


def test_invalid_template_is_named(load: Load) -> None:
    with pytest.raises(UserError, match="The chat template is not valid Jinja"):
        rendered(load(None), {"messages": CONVERSATION}, template="{% for %}")


def test_pair_that_would_be_several_documents_is_refused(load: Load) -> None:
    answer = [assistant("I am"), user("What?"), assistant("fine")]
    row = {"prompt": [user("hello")], "chosen": answer, "rejected": [assistant("How?")]}
    with pytest.raises(
        UserError, match="has an answer with several turns, of which the chat template renders earlier ones differently"
    ):
        rendered(load(tiny.QWEN), row, "preference")


def test_template_that_marks_nothing_is_refused(load: Load) -> None:
    nothing = tiny.CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(UserError, match=r"Line 7 of a.jsonl has no token that counts in the loss"):
        rendered(load(nothing), {"messages": CONVERSATION})


CONTENT = st.text(alphabet=st.sampled_from("ab 4.\n\t{é🙂"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), trim=st.booleans())
def test_counted_text_is_what_the_model_generates(load: Load, turns: list[tuple[str, str]], trim: bool) -> None:
    """Each counted run is the answer and its end, but for whitespace between header and answer, which may share a token."""
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    for template, end in ((tiny.CHATML, "<|im_end|>"), (tiny.GENERATION, "<|im_end|>"), (tiny.LLAMA, "<|eot_id|>")):
        tokenizer = load(template, trim_offsets=trim)
        [document] = rendered(tokenizer, {"messages": messages})
        [runs] = counted(tokenizer, [document])
        expected = [(answer.strip() if template == tiny.LLAMA else answer) + end for _, answer in turns]
        assert len(runs) == len(expected)
        for run, text in zip(runs, expected, strict=True):
            assert run.strip() == text.strip()
        again = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False).input_ids
        assert document.ids.tolist() == again[: len(document.ids)]
        assert not {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|start_header_id|>")} & set(
            document.ids[document.mask == 1].tolist()
        )
