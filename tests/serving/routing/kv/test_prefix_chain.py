"""Names of prefixes: equal for equal texts in one name space, and for nothing else."""

import itertools
import random
from typing import Any

import pytest

from strata.serving.routing.kv import prefix_chain
from strata.serving.routing.kv.prefix_chain import MAX_BYTES, MAX_MESSAGES, STEP_BYTES, STEPS, Chain, Point

DRAW = random.Random(0)


def words(count: int) -> str:
    return "".join(DRAW.choice("abcdefgh ") for _ in range(count))


SYSTEM, USER, ANSWER, NEXT = words(3000), words(700), words(900), words(300)
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
SECOND = [*FIRST, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": NEXT}]


def chain(tree: dict[str, Any], method: str = "chat", model: str = "m", salt: str = "") -> Chain:
    found = prefix_chain.of(method, tree, model, salt)
    assert found is not None
    return found


def points(tree: dict[str, Any], *more: str) -> list[Point]:
    return chain(tree, *more).points


def common(first: list[Point], second: list[Point]) -> int:
    """Equal points from the start on. None is equal after the first that differs."""
    count = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert not {point.digest for point in first[count:]} & {point.digest for point in second[count:]}
    return count


def test_next_turn_continues_the_chain() -> None:
    first, second = points({"messages": FIRST}), points({"messages": SECOND})
    assert common(first, second) == len(first)
    assert first[-1] == Point(first[-1].digest, 3700, 2, inside=False)


def test_answer_continues_the_chain_as_the_client_returns_it() -> None:
    answered = chain({"messages": FIRST})
    prefix_chain.add_answer(answered, ANSWER, [])
    second = points({"messages": SECOND})
    assert common(answered.points, second) == len(answered.points)
    assert answered.points[-1].position == 4600 and answered.points[-1].messages == 3


def test_answer_continues_a_text_and_token_ids() -> None:
    text = chain({"prompt": SYSTEM}, "completions")
    prefix_chain.add_answer(text, ANSWER, [1])
    whole = points({"prompt": SYSTEM + ANSWER + NEXT}, "completions")
    assert common(text.points, whole) == len(text.points) == (3900 - 1) // STEP_BYTES
    ids = chain({"prompt": list(range(600))}, "completions")
    prefix_chain.add_answer(ids, "", range(600, 700))
    assert ids.points == points({"prompt": list(range(700))}, "completions")
    assert ids.size == 700 * prefix_chain.ID_BYTES


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "user", "content": SYSTEM}, FIRST[1]]},
        {"messages": [{"role": "system", "content": "x" + SYSTEM[1:]}, FIRST[1]]},
        {"messages": [{"role": "system", "name": "a", "content": SYSTEM}, FIRST[1]]},
        {"messages": FIRST, "cache_salt": "s"},
        {"messages": FIRST, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": FIRST, "chat_template_kwargs": {"thinking": True}},
        {"messages": FIRST, "reasoning_effort": "low"},
    ],
)
def test_anything_that_changes_the_prompt_changes_every_name(other: dict[str, Any]) -> None:
    assert common(points({"messages": FIRST}), points(other)) == 0


@pytest.mark.parametrize("more", [("chat", "other"), ("completions", "m"), ("chat", "m", "tenant")])
def test_models_methods_and_tenants_share_no_name(more: tuple[str, ...]) -> None:
    assert common(points({"messages": FIRST}), points({"messages": FIRST}, *more)) == 0


def test_salts_do_not_run_into_each_other() -> None:
    found = {
        points({"messages": FIRST, "cache_salt": salt}, "chat", model, tenant)[0].digest
        for model, tenant, salt in (("m", "ab", "c"), ("m", "a", "bc"), ("m", "abc", None), ("ma", "b", "c"), ("m", "", "abc"))
    }
    assert len(found) == 5


def test_a_changed_byte_changes_the_names_behind_it_alone() -> None:
    changed = SYSTEM[:2000] + ("x" if SYSTEM[2000] != "x" else "y") + SYSTEM[2001:]
    before, after = points({"messages": FIRST}), points({"messages": [{"role": "system", "content": changed}, FIRST[1]]})
    assert common(before, after) == 2000 // STEP_BYTES


def test_message_ends_separate_texts() -> None:
    one = [{"role": "user", "content": "a" * 600}, {"role": "user", "content": "b" * 600}]
    other = [{"role": "user", "content": "a" * 600 + "b" * 100}, {"role": "user", "content": "b" * 500}]
    assert common(points({"messages": one}), points({"messages": other})) == 1  # within the first text


@pytest.mark.parametrize(
    "same",
    [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        {"role": "system", "content": SYSTEM, "name": None, "tool_calls": []},
        {"content": SYSTEM, "role": "system"},
    ],
)
def test_forms_of_the_same_message_have_one_name(same: dict[str, Any]) -> None:
    assert points({"messages": [same, FIRST[1]]}) == points({"messages": FIRST})


def test_steps_grow_with_the_position() -> None:
    found = [point.position for point in points({"prompt": "x" * MAX_BYTES}, "completions")]
    assert found[:STEPS] == [STEP_BYTES * (k + 1) for k in range(STEPS)]
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap == STEP_BYTES or a / STEPS <= gap <= 2 * a / STEPS for a, gap in zip(found, gaps, strict=False))
    assert len(found) < 100 and found[-1] == MAX_BYTES


def test_short_messages_share_a_point() -> None:
    found = points({"messages": [{"role": "user", "content": "x" * 50}] * 10})
    assert [(point.position, point.messages) for point in found] == [(150, 3), (300, 6), (450, 9)]


def test_work_is_bounded_and_the_size_is_that_of_everything() -> None:
    large = chain({"messages": [{"role": "user", "content": "x" * 400_000}] * 3})
    assert large.size == 1_200_000 and large.points[-1].position <= MAX_BYTES
    many = chain({"messages": [{"role": "user", "content": "x" * 200}] * (MAX_MESSAGES + 50)})
    assert many.size == 200 * (MAX_MESSAGES + 50) and many.points[-1].messages <= MAX_MESSAGES
    more = chain({"messages": [{"role": "user", "content": "x" * 200}] * (MAX_MESSAGES + 60)})
    assert more.points == many.points


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [1, "a"]},
        {"prompt": []},
        {"prompt": 7},
        {"prompt": [2**70]},
        {"messages": ["hello"]},
        {"messages": {"role": "user"}},
        {"messages": []},
    ],
)
def test_requests_without_one_prompt_have_no_chain(tree: dict[str, Any]) -> None:
    assert prefix_chain.of("chat", tree, "m") is None


@pytest.mark.parametrize("role", [None, 3, ["user"], {"a": 1}])
@pytest.mark.parametrize("content", [None, 5, [None], [{"type": "image_url"}], {"text": "x"}])
def test_invalid_messages_are_left_to_the_replica(role: Any, content: Any) -> None:
    assert chain({"messages": [{"role": role, "content": content}, *FIRST]}).messages == 3


def test_single_prompt_in_a_list_is_the_prompt() -> None:
    assert points({"prompt": [SYSTEM]}, "completions") == points({"prompt": SYSTEM}, "completions")
    assert points({"prompt": [[5] * 300]}, "completions") == points({"prompt": [5] * 300}, "completions")
