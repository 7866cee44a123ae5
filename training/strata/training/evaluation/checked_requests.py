"""Requests of the harness that fit a model's context, with progress.

The harness truncates prompts that are too long and only logs it, which changes scores silently.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from strata.platform.errors import UserError
from strata.training.evaluation.progress import RequestProgress

SLICE = 16  # batches between two updates of the progress
DEFAULT_ANSWER = 256  # tokens; the harness's


class CheckedRequests:
    """Base of a model class of the harness, before the harness's own. `watch` is called before requests are sent."""

    def watch(self, context: int, scored: int, batch: int, truncate: bool, progress: RequestProgress) -> None:
        """Sets the most tokens of a prompt and its generated answer (`context`), and of a prompt and a given continuation
        (`scored`)."""
        self._context, self._scored, self._slice, self._truncate = context, scored, batch * SLICE, truncate
        self._progress, self._task = progress, ""
        self.truncated = 0

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        score: Callable[..., list[Any]] = super().loglikelihood  # type: ignore[misc]
        answers: list[Any] = []
        for group in self._by_task(requests):
            answers += score(group, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **more: Any) -> list[Any]:
        """Called by the harness with (texts, prompt tokens, continuation tokens) of one task."""
        score: Callable[..., list[Any]] = super()._loglikelihood_tokens  # type: ignore[misc]
        for _, prompt, continuation in requests:
            self._require_fit(len(prompt), len(continuation), self._scored)
        answers: list[Any] = []
        for part in self._slices(requests):
            answers += score(part, disable_tqdm=True, **more)
            self._progress.advance(len(part))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Texts longer than the context are scored in windows, whose number is not known before."""
        score: Callable[..., list[Any]] = super().loglikelihood_rolling  # type: ignore[misc]
        answers: list[Any] = []
        for group in self._by_task(requests, counted=False):
            answers += score(group, disable_tqdm=True)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        generate: Callable[..., list[Any]] = super().generate_until  # type: ignore[misc]
        answers: list[Any] = []
        for group in self._by_task(requests):
            for request in group:
                prompt, settings = request.args
                answer = normalize_gen_kwargs(settings, DEFAULT_ANSWER)["max_gen_toks"]
                tokens = len(self.tok_encode(prompt))  # type: ignore[attr-defined]
                self._require_fit(tokens, answer, self._context)
            for part in self._slices(group):
                answers += generate(part, disable_tqdm=True)
                self._progress.advance(len(part))
        return answers

    def _by_task(self, requests: Sequence[Any], counted: bool = True) -> Iterator[list[Any]]:
        for task, group in groupby(requests, lambda request: request.task_name):
            found = list(group)
            self._task = str(task)
            self._progress.begin(self._task, len(found) if counted else None)
            yield found

    def _slices(self, requests: Sequence[Any]) -> Iterator[Sequence[Any]]:
        for begin in range(0, len(requests), self._slice):
            yield requests[begin : begin + self._slice]

    def _require_fit(self, prompt: int, rest: int, most: int) -> None:
        """Refuses a request that does not fit. With `truncate`, only one of which no token of the prompt would be left."""
        if prompt + rest <= most:
            return
        cause = f"Task '{self._task}' has a request of {prompt + rest} tokens, and the model's context is {self._context}."
        if rest >= most:
            raise UserError(cause, "Choose tasks with shorter answers, or a model with a longer context.")
        if not self._truncate:
            fix = "Lower --shots, or pass --truncate to cut the beginning of long prompts: scores are then not comparable."
            raise UserError(cause, fix)
        self.truncated += 1
