"""Answers of the tasks against solutions that are worked out again from the prompts alone."""

import re
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from strata.training.data.generated.tasks import HELD_OUT, TASKS, Task
from strata.training.data.generated.words import CITIES, IRREGULAR, NAMES, NOUNS, cities, names, plural, words

VOWELS = set("aeiou")


def solved(prompt: str) -> str | None:
    """Answer to a prompt, by its text; None if it is no known request."""

    def match(*patterns: str) -> re.Match[str] | None:
        return next(filter(None, (re.fullmatch(pattern, prompt) for pattern in patterns)), None)

    if found := match(r"Repeat the word (\w+)\.", r"Say (\w+)\."):
        return found[1]
    if found := match(r"Spell (\w+)\.", r"Spell the word (\w+)\."):
        return "".join(f"-{letter}" for letter in found[1])[1:]
    if found := match(r"Write (\w+) in capitals\.", r"Put (\w+) in capital letters\."):
        return "".join(chr(ord(letter) - 32) for letter in found[1])
    if found := match(r"What is the plural of (\w+)\?"):
        return many(found[1])
    if found := match(r"Reverse this list: (.+)\.", r"Say this list backwards: (.+)\."):
        return ", ".join(reversed(found[1].split(", ")))
    if found := match(r"What is the (first|last) letter of this list: (.+)\?"):
        return found[2].split(", ")[0 if found[1] == "first" else -1]
    if found := match(r"How many letters are in this list: (.+)\?"):
        return str(found[1].count(",") + 1)
    if found := match(r"Which is larger, (\d+) or (\d+)\?"):
        return found[1] if int(found[1]) > int(found[2]) else found[2]
    if found := match(r"(Hello|Hi|Good day), (?:I am|my name is) (\w+)\."):
        return f"{found[1]} {found[2]}, how can I help you?"
    if match(r"Thank you\.", r"Thanks\.", r"Thank you very much\."):
        return "You are welcome."
    return code(prompt)


def many(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun[-1] == "y" and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if noun[-1] in "sx" or noun[-2:] in ("ch", "sh") else "s")


def code(prompt: str) -> str | None:
    if found := re.fullmatch(r"Complete: def get_(\w+)\(self\): return", prompt):
        return f"self.{found[1]}"
    if found := re.fullmatch(r"Complete: for (\w+) in (\w+):", prompt):
        return f"print({found[1]})" if found[2] == many(found[1]) else None
    if found := re.fullmatch(r"Complete: self\.(\w+) =", prompt):
        return found[1]
    if found := re.fullmatch(r"Complete: (\w+) = \[(\w+) for \2 in", prompt):
        return f"{found[1]}]" if found[1] == many(found[2]) else None
    return None


def drawn(name: str, count: int = 400) -> list[Task]:
    random = Random(name)
    return [TASKS[name](random) for _ in range(count)]


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right_and_wrong_ones_are_not(name: str) -> None:
    for task in drawn(name):
        assert task.name == name
        assert task.answer == solved(task.prompt), task
        assert task.wrong not in ("", task.answer)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"thanks"}))
def test_a_tenth_of_the_subjects_is_held_out(name: str) -> None:
    subjects = {task.subject: task.held_out for task in drawn(name, 4000) if task.subject is not None}
    assert abs(sum(subjects.values()) / len(subjects) - HELD_OUT) < 0.06
    assert any(subjects.values()) and not all(subjects.values())


def test_prompts_with_one_subject_are_all_held_out_or_all_not() -> None:
    by_word: dict[str | None, set[bool]] = {}
    for task in drawn("repeat", 4000):
        by_word.setdefault(task.subject, set()).add(task.held_out)
    assert len(by_word) > 500 and all(len(found) == 1 for found in by_word.values())
    held_out = [{task.subject for task in drawn(name, 4000) if task.held_out} for name in ("repeat", "spell")]
    assert held_out[0] != held_out[1]  # each task has its own


def test_facts_that_no_rule_predicts_are_never_held_out() -> None:
    irregular = [task for task in drawn("plural", 4000) if solved(task.prompt) in IRREGULAR.values()]
    assert len(irregular) > 50 and not any(task.held_out for task in irregular + drawn("thanks"))


def test_both_answers_of_a_choice_are_common() -> None:
    """A constant answer must not be right often."""
    for name, most in {"larger": 0.1, "count": 0.35, "pick": 0.1, "python": 0.05}.items():
        answers = Counter(task.answer for task in drawn(name))
        assert answers.most_common(1)[0][1] < most * 400, answers.most_common(3)
    first = [task.answer == re.findall(r"\d+", task.prompt)[0] for task in drawn("larger")]
    assert 0.4 < sum(first) / len(first) < 0.6


def test_words() -> None:
    for known in (NOUNS, NAMES, CITIES):
        assert len(set(known)) == len(known) > 50
        assert all(word.isascii() and word.isalpha() for word in known)
    assert all(3 <= len(noun) <= 5 and noun.islower() for noun in NOUNS)
    assert all(word.istitle() for word in (*NAMES, *CITIES))
    assert set(NOUNS) >= IRREGULAR.keys()


@pytest.mark.parametrize(("draw", "known"), [(words, NOUNS), (names, NAMES), (cities, CITIES)])
def test_most_words_are_invented(draw: Callable[[Random, int], list[str]], known: tuple[str, ...]) -> None:
    """Copying from the prompt must be easier to learn than the words."""
    random = Random(0)
    drawn = [draw(random, 4) for _ in range(200)]
    assert all(len(set(found)) == 4 for found in drawn)
    flat = [word for found in drawn for word in found]
    assert 0.15 < sum(word in known for word in flat) / len(flat) < 0.35
    assert len(set(flat)) > 300
    assert all(word == (word.lower() if draw is words else word.capitalize()) for word in flat)


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("cat", "cats"),
        ("box", "boxes"),
        ("bus", "buses"),
        ("dish", "dishes"),
        ("bench", "benches"),
        ("city", "cities"),
        ("day", "days"),
        ("key", "keys"),
        ("child", "children"),
        ("roof", "roofs"),
        ("month", "months"),
    ],
)
def test_plurals(noun: str, expected: str) -> None:
    assert noun in NOUNS and plural(noun) == expected == many(noun)
