"""Ends an answer at the token that completes a stop string, if a step generates several tokens.

vLLM looks for stop strings after all tokens of a step. With accepted drafts, tokens behind the stop string are returned and
billed: how many depends on where steps began, so the same answer has other token counts after it moved to another replica. Of two
stop strings in one step, the first in the request's list counts, not the first in the text. Here tokens are detokenized one by
one, as without drafts.

Written for vLLM 0.29. No longer needed when `BaseIncrementalDetokenizer.update` drops tokens behind a stop string; the test of
this file fails then.
"""

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

UPDATE, UPDATE_LOGPROBS = BaseIncrementalDetokenizer.update, LogprobsProcessor.update_from_output


def install() -> None:
    BaseIncrementalDetokenizer.update = _update
    LogprobsProcessor.update_from_output = _update_logprobs


def _update(self: BaseIncrementalDetokenizer, new_token_ids: list[int], stop_terminated: bool) -> str | None:
    """Shortens `new_token_ids`, the list in the engine's output, which vLLM reads next."""
    found: str | None = None
    if not self.stop or len(new_token_ids) < 2:
        found = UPDATE(self, new_token_ids, stop_terminated)
        return found
    for place, token in enumerate(new_token_ids, 1):
        found = UPDATE(self, [token], stop_terminated and place == len(new_token_ids))
        if found is not None:
            del new_token_ids[place:]
            break
    return found


def _update_logprobs(self: LogprobsProcessor, output: EngineCoreOutput) -> None:
    lists = output.new_logprobs
    if lists is not None and len(lists.logprobs) > len(output.new_token_ids):
        output.new_logprobs = lists.slice_request(0, len(output.new_token_ids))
    UPDATE_LOGPROBS(self, output)
