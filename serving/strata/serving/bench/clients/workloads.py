"""Workloads: prompts of random token ids, the same for every contender.

Each conversation has its own generator, seeded with its number. The prompts do not depend on the number of conversations or on
the client process that sends them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy

Name = Literal["uniform", "mixed", "multiturn"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    output: int
    kind: str  # results are also reported per kind


Conversation = tuple[Request, ...]  # sent one after the other


@dataclass(frozen=True)
class Workload:
    """`mixed` has a share of prompts with `long_input` tokens. In `multiturn`, every turn adds `input` tokens."""

    name: Name
    vocab: int
    input: int
    output: int
    long_input: int
    long_share: float
    turns: int

    @property
    def prefix_caching(self) -> bool:
        """Off if no prompt repeats another, so that no contender profits from cached warm-up prompts."""
        return self.name == "multiturn"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        match self.name:
            case "uniform":
                return self.input + self.output
            case "mixed":
                return max(self.input, self.long_input) + self.output
            case "multiturn":
                return self.turns * (self.input + self.output)

    @property
    def requests_per_conversation(self) -> int:
        return self.turns if self.name == "multiturn" else 1

    def conversation(self, seed: int, number: int) -> Conversation:
        random = numpy.random.default_rng((seed, number))
        match self.name:
            case "uniform":
                return (Request(self._tokens(random, self.input), self.output, "all"),)
            case "mixed":
                long = bool(random.random() < self.long_share)
                length, kind = (self.long_input, "long") if long else (self.input, "short")
                return (Request(self._tokens(random, length), self.output, kind),)
            case "multiturn":
                return self._turns(random)

    def _turns(self, random: numpy.random.Generator) -> Conversation:
        """Later prompts contain random tokens in place of the answers, which would differ between contenders."""
        prompt: tuple[int, ...] = ()
        turns = []
        for turn in range(self.turns):
            prompt += self._tokens(random, self.input)
            turns.append(Request(prompt, self.output, "first turn" if turn == 0 else "later turns"))
            prompt += self._tokens(random, self.output)
        return tuple(turns)

    def _tokens(self, random: numpy.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(random.integers(self.vocab, size=count).tolist())
