"""Special tokens without a trained embedding."""

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.training.data.finetuning.special_tokens import require_trained, untrained_special_tokens

ROWS = np.array(
    [[0.1, 0.2], [0, 0], [0.3, 0.1], [0.3, 0.1], [0.3, 0.2], [1e-23, -1e-20], [0.3, 0.1], [0, 2e-16], [-0.1, 0]], np.float32
)


@pytest.mark.parametrize(
    ("ids", "untrained"),
    [
        ([], []),
        ([0, 4], []),
        ([0, 1], [1]),
        ([5, 0], [5]),  # never updated
        ([7, 8], []),
        ([2], []),  # another row is equal to it, but not one in use
        ([3, 0, 2], [3, 2]),
        ([2, 3, 6, 1, 4], [2, 3, 6, 1]),
        ([2, 2], []),  # the same token twice
    ],
)
def test_rows_that_are_zero_or_equal(ids: list[int], untrained: list[int]) -> None:
    assert untrained_special_tokens(ids, lambda token: ROWS[token]) == untrained


def test_untrained_tokens_are_named_with_an_example() -> None:
    tokens = {0: ("<s>", "line 1 of a.jsonl"), 2: ("<|im_start|>", "line 2 of a.jsonl"), 3: ("<|im_end|>", "line 3 of a.jsonl")}
    with pytest.raises(UserError) as raised:
        require_trained(tokens, lambda token: ROWS[token])
    assert "<|im_start|>, <|im_end|> (first in line 2 of a.jsonl)" in raised.value.cause
    require_trained({0: tokens[0]}, lambda token: ROWS[token])
