"""Names of a request's prefixes, computed from its text: a gateway has no tokenizer.

A chain is a running hash over the texts of a request. Its points are prefixes with a name: ends of messages, and places within
a text at distances that grow with the position, so that even a long prompt has few. Equal names: equal texts up to the point, in
the same name space (model, salts, and all else that changes the rendered prompt). Gateways and replicas compute the same chain.

The hash is fast and not cryptographic. Two texts with one name mislead the routing of their own tenant: hashes of others begin
with a salt that nobody else knows, and engines compare blocks by SHA-256.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from xxhash import xxh3_64

STEP_BYTES = 512  # between two points near the start
STEPS = 16  # this many steps from the start, the distance begins to double with the position
NEAR = 4  # a message that ends within 1 / NEAR of a step after the last point has no point
MAX_BYTES = 256 * 2**10  # texts are hashed up to here
MAX_MESSAGES = 1024
ID_BYTES = 8  # of a token id in a prompt of ids
# Parameters that change the rendered prompt before its first message.
SHAPING = (
    *("tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_special_tokens", "system", "instructions"),
    *("truncate_prompt_tokens", "add_generation_prompt", "continue_final_message"),
)
END_OF_MESSAGE = b"\xff"  # no byte of UTF-8
PLAIN = {role: msgspec.json.encode({"role": role}) for role in ("system", "developer", "user", "assistant")}

Kind = Literal["messages", "text", "ids"]


class Point(NamedTuple):
    digest: int  # 64 bits
    position: int  # bytes of texts before it
    messages: int  # complete ones before it
    inside: bool  # within a text, not at the end of a message


class Chain:
    kind: Kind = "text"

    def __init__(self, space: bytes, leading_bytes: int = 0) -> None:
        """`space` names the name space; `leading_bytes` is the size of what is rendered before the first text."""
        self._hash = xxh3_64(space + END_OF_MESSAGE)
        self._pending = b""  # to be hashed with the next point
        self._position = self._last = leading_bytes
        self.size = leading_bytes  # bytes of all texts, those that are not hashed included
        self.messages = 0
        self.points: list[Point] = []

    def message(self, header: bytes, text: bytes) -> None:
        """Adds a whole message. `header` has what is not text, such as the role."""
        if self.messages < MAX_MESSAGES:
            self._pending += header + END_OF_MESSAGE
            self.add(text)
        else:
            self.size += len(text)
        self.messages += 1
        if self._open():
            self._pending += END_OF_MESSAGE
            if self._position - self._last >= _step(self._last) // NEAR:
                self._point(inside=False)

    def add(self, text: bytes) -> None:
        """Adds to the last text."""
        self.size += len(text)
        if not self._open():
            return
        if self._position + len(text) > MAX_BYTES:
            text = text[: MAX_BYTES - self._position]
        taken = 0
        while (due := self._last + _step(self._last) - self._position) <= len(text) - taken:
            self._pending += text[taken : taken + due]
            taken += due
            self._position += due
            self._point(inside=True)
        self._pending += text[taken:] if taken else text
        self._position += len(text) - taken

    def _open(self) -> bool:
        return self._position < MAX_BYTES and self.messages <= MAX_MESSAGES

    def _point(self, inside: bool) -> None:
        self._hash.update(self._pending)
        self._pending = b""
        self._last = self._position
        self.points.append(Point(self._hash.intdigest(), self._position, self.messages, inside))


def _step(position: int) -> int:
    return STEP_BYTES << (position // (STEP_BYTES * STEPS)).bit_length()


def of(method: str, tree: Mapping[str, Any], model: str, salt: str = "") -> Chain | None:
    """Chain of a parsed request, which may be invalid: the replica refuses it. None where it has no prompt or several.

    `model` is the name of the model that answers, adapters included. `salt` is the tenant's: requests with different salts share
    no name."""
    shaping = {key: tree[key] for key in SHAPING if tree.get(key)}
    leading = msgspec.json.encode(shaping, order="sorted") if shaping else b""
    space = msgspec.json.encode([method, model, salt, tree.get("cache_salt")]) + leading
    chain = Chain(space, len(leading))
    for key in ("messages", "input", "prompt"):
        if (prompt := tree.get(key)) is not None:
            return chain if _add(chain, prompt, conversation=key != "prompt") else None
    return None


def _add(chain: Chain, prompt: Any, conversation: bool) -> bool:
    if not conversation and isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        chain.add(prompt.encode())
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    chain.kind = "messages" if conversation else "ids"
    if conversation:
        for message in prompt:
            if _has_images(message):
                break  # what follows the first image has no name
            if not _add_message(chain, message):
                return False
        return True
    return _add_ids(chain, prompt)


def add_answer(chain: Chain, text: str, ids: Iterable[int]) -> None:
    """Adds a request's answer: the next request of its conversation begins with both."""
    if chain.kind == "messages":
        _add_message(chain, {"role": "assistant", "content": text})
    elif chain.kind == "ids":
        _add_ids(chain, ids)
    else:
        chain.add(text.encode())


def _add_message(chain: Chain, message: Any) -> bool:
    """Adds a message of a conversation. Empty fields do not count: clients return an answer's message with or without them."""
    if not isinstance(message, dict):
        return False
    content, role = message.get("content"), message.get("role")
    if len(message) == 2 and isinstance(content, str) and isinstance(role, str) and role in PLAIN:  # as nearly all are
        chain.message(PLAIN[role], content.encode())
        return True
    text = _text(content)
    rest = {key: value for key, value in message.items() if value and not (key == "content" and text is not None)}
    header = msgspec.json.encode(rest, order="sorted")
    chain.message(header, (text or "").encode())
    return True


def _has_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(isinstance(part, dict) and "image_url" in part for part in content)


def _add_ids(chain: Chain, ids: Iterable[Any]) -> bool:
    try:
        chain.add(array("q", ids).tobytes())
    except (TypeError, OverflowError):
        return False
    return True


def _text(content: Any) -> str | None:
    """Text of a message, None where it has other parts. Templates join parts by a line break."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
