"""What becomes of a stream whose decode replica was lost: the rule, as a pure function of the request.

- Nothing sent yet, or not streamed: it begins again elsewhere. Always possible, for the client has seen nothing.
- Streamed text so far: another replica goes on from prompt + emitted tokens. Greedy answers are the same as undisturbed
  ones; samples without a seed are samples from the same distribution.
- What depends on more than the tokens so far cannot go on exactly, and is not continued inexactly: several sequences in one
  answer (n > 1, several prompts), guided decoding (the grammar's state), penalties that count generated tokens apart from
  the prompt's, forbidden words, and samples with a seed (the generator's state). The stream ends with an error event that
  says so and that the request can be sent again.
"""

from typing import Any


def obstacle(tree: dict[str, Any]) -> str | None:
    """`tree` is the request as the client sent it. Fields of wrong types never get here: they were refused."""
    if (tree.get("n") or 1) > 1 or tree.get("use_beam_search"):
        return "several sequences (n > 1)"
    prompt = tree.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > 1:
        return "several prompts"
    if tree.get("structured_outputs") or (tree.get("response_format") or {}).get("type", "text") != "text":
        return "guided decoding"
    if tree.get("tools") and tree.get("tool_choice", "auto") not in ("auto", "none"):
        return "guided decoding"
    if tree.get("frequency_penalty") or tree.get("presence_penalty"):
        return "frequency or presence penalties"
    if tree.get("bad_words"):
        return "bad_words"
    if tree.get("seed") is not None and tree.get("temperature", 1) != 0:
        return "sampling with a seed"
    return None
