"""Small tasks with one right answer: copying, spelling, lists, numbers, plurals, lines of Python, greetings.

They are for a model with two layers and a vocabulary of 512 tokens. Trained first on source code, it answered two thirds of the
held-out requests after 2,000 steps of 1,024 tokens. Each task draws its subject from a random number generator. A tenth of the
subjects is held out from training, by a hash, so that answers to them show what a model has learned rather than memorized.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from strata.training.data.generated.words import IRREGULAR, names, plural, words

HELD_OUT = 0.1  # share of the subjects of each task


@dataclass(frozen=True)
class Task:
    """Prompt with its right answer and a wrong one. A task without a subject, such as an irregular plural, is never held out."""

    name: str
    subject: str | None
    prompt: str
    answer: str
    wrong: str

    @property
    def held_out(self) -> bool:
        if self.subject is None:
            return False
        digest = hashlib.blake2b(f"{self.name} {self.subject}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < HELD_OUT * 2**64


def repeat(random: Random) -> Task:
    word, other = words(random, 2)
    prompt = random.choice(("Repeat the word {}.", "Say {}.")).format(word)
    return Task("repeat", word, prompt, word, other)


def spell(random: Random) -> Task:
    [word] = words(random, 1)
    return spell_word(random, word, random.choice(("Spell {}.", "Spell the word {}.")).format(word))


def spell_word(random: Random, word: str, prompt: str) -> Task:
    """Spelling of a word that this prompt or an earlier one names."""
    missing = random.randrange(len(word))
    return Task("spell", word, prompt, "-".join(word), "-".join(word[:missing] + word[missing + 1 :]))


def capitals(random: Random) -> Task:
    [word] = words(random, 1)
    return capitals_word(word, random.choice(("Write {} in capitals.", "Put {} in capital letters.")).format(word))


def capitals_word(word: str, prompt: str) -> Task:
    return Task("capitals", word, prompt, word.upper(), word.capitalize())


def plurals(random: Random) -> Task:
    [noun] = words(random, 1)
    wrong = f"{noun}s" if plural(noun) != f"{noun}s" else noun
    return Task("plural", None if noun in IRREGULAR else noun, f"What is the plural of {noun}?", plural(noun), wrong)


def reverse(random: Random) -> Task:
    items = random.sample(ascii_lowercase, random.randint(2, 4))
    prompt = random.choice(("Reverse this list: {}.", "Say this list backwards: {}.")).format(", ".join(items))
    return Task("reverse", " ".join(items), prompt, ", ".join(items[::-1]), ", ".join(items))


def pick(random: Random) -> Task:
    items = random.sample(ascii_lowercase, random.randint(2, 4))
    first = random.random() < 0.5
    prompt = f"What is the {'first' if first else 'last'} letter of this list: {', '.join(items)}?"
    answer, wrong = (items[0], items[-1]) if first else (items[-1], items[0])
    return Task("pick", " ".join(items), prompt, answer, wrong)


def count(random: Random) -> Task:
    items = random.sample(ascii_lowercase, random.randint(1, 5))
    wrong = len(items) + random.choice((-1, 1))
    return Task("count", " ".join(items), f"How many letters are in this list: {', '.join(items)}?", str(len(items)), str(wrong))


def larger(random: Random) -> Task:
    tens, other_tens = random.sample(range(1, 10), 2)  # the first digits decide
    one, other = 10 * tens + random.randrange(10), 10 * other_tens + random.randrange(10)
    prompt = f"Which is larger, {one} or {other}?"
    return Task("larger", f"{one} {other}", prompt, str(max(one, other)), str(min(one, other)))


def python(random: Random) -> Task:
    """Line of code whose end follows from its start."""
    name, other = words(random, 2)
    start, end = random.choice(
        (
            ("def get_{0}(self): return", "self.{0}"),
            ("for {0} in {1}:", "print({0})"),
            ("self.{0} =", "{0}"),
            ("{1} = [{0} for {0} in", "{1}]"),
        )
    )
    line = start.format(name, plural(name))
    return Task("python", line, f"Complete: {line}", end.format(name, plural(name)), end.format(other, plural(other)))


def greeting(random: Random) -> Task:
    name, other = names(random, 2)
    hello = random.choice(("Hello", "Hi", "Good day"))
    prompt = random.choice(("{}, I am {}.", "{}, my name is {}.")).format(hello, name)
    return Task("greeting", name, prompt, f"{hello} {name}, how can I help you?", f"{hello} {other}, how can I help you?")


def thanks(random: Random) -> Task:
    prompt = random.choice(("Thank you.", "Thanks.", "Thank you very much."))
    return Task("thanks", None, prompt, "You are welcome.", "Thank you.")


TASKS: dict[str, Callable[[Random], Task]] = {
    "repeat": repeat,
    "spell": spell,
    "capitals": capitals,
    "plural": plurals,
    "reverse": reverse,
    "pick": pick,
    "count": count,
    "larger": larger,
    "python": python,
    "greeting": greeting,
    "thanks": thanks,
}
