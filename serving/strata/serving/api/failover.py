"""Rules for continuing a stream on another replica after its decode replica was lost. Pure functions of the request.

- Nothing sent yet, or not streamed: the request is retried on another replica. Always possible: the client has seen nothing.
- Tokens already streamed: another replica continues from prompt + emitted tokens. Greedy output is identical to that of an
  uninterrupted run; sampling without a seed draws from the same distribution.
- Output that depends on more than the tokens so far cannot be continued exactly, so it is not continued: several sequences
  (n > 1, several prompts), guided decoding (grammar state), penalties that count generated tokens separately from the prompt,
  `bad_words`, and sampling with a seed (generator state). The stream ends with an error event that names the reason and that
  the request can be sent again.
"""

from typing import Any


def obstacle(tree: dict[str, Any]) -> str | None:
    """Reason why a stream cannot be continued, or None. `tree` is the parsed request; wrong types were refused before."""
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
