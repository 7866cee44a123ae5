"""Compiles client grammars in a separate process before vLLM sees them.

vLLM passes a client's grammar to xgrammar three times: it parses it in the replica's process while every stream waits,
compiles it in a thread of the engine's process, and computes the allowed tokens in the engine's loop. Only the compilation of
regular expressions has a time limit, and its thread keeps running. A schema whose `pattern` has 50,000 brackets crashes the
replica with a segmentation fault, and then the next replica that receives the request. A grammar of 60 short rules stalls the
engine for good. Only a process can be stopped in these cases: the helper below loads the model's tokenizer once and forks for
each trial, so a trial that crashes or runs too long affects nothing else.
"""

import asyncio
import hashlib
import json
import os
import re
import resource
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from strata.serving.api.requests import MAX_DEPTH, ApiError, nesting

Grammar = tuple[str, str]  # (json | regex | grammar, text)

MAX_CHARACTERS = 2**17
CPU_SECONDS = 2  # with 128,000 tokens an ordinary schema needs 0.03 s, a schema of 1,000 properties 0.25 s
MEMORY = 256 * 2**20  # an ordinary schema needs 15 MiB, the largest tested 55; the engine will need as much
STEPS = 16  # tokens generated in a trial: some grammars compile fast but are slow to match, or reach a dead end
MAX_WAITING = 16  # trials run one at a time; beyond this queue length requests are refused with a 429
REMEMBERED = 1024  # verdicts; clients send the same few schemas repeatedly


class GrammarTrial:
    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._command = (sys.executable, "-m", __name__, model_dir, str(vocab_size))
        self._helper: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, request: Any) -> None:
        """Raises an ApiError if the request has a grammar that must not reach an engine."""
        param, grammars = _grammars(request)
        if grammars and (wrong := await self.fault(grammars)):
            raise ApiError(400, f"This grammar cannot be used: {wrong}", param=param)

    async def fault(self, grammars: list[Grammar]) -> str:
        """Error message for the grammars; empty if they are usable."""
        question = json.dumps(grammars).encode()
        if len(question) > MAX_CHARACTERS:
            return f"it has more than {MAX_CHARACTERS} characters."
        key = hashlib.sha256(question).digest()
        if key not in self._verdicts:
            if self._waiting >= MAX_WAITING:
                raise ApiError(429, "Too many new grammars are being checked. Try again.", headers={"retry-after": "2"})
            # Shielded: if the client disconnects, its answer must still be read from the helper, not by the next request.
            self._verdicts[key] = await asyncio.shield(asyncio.ensure_future(self._query(question)))
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return self._verdicts[key]

    async def stop(self) -> None:
        if self._helper is not None and self._helper.stdin is not None:
            self._helper.stdin.close()
            await self._helper.wait()

    async def _query(self, question: bytes) -> str:
        self._waiting += 1
        try:
            async with self._lock:
                helper = await self._started()
                assert helper.stdin is not None and helper.stdout is not None
                helper.stdin.write(question + b"\n")
                await helper.stdin.drain()
                answer = await helper.stdout.readline()
                if not answer:
                    await helper.wait()
                    raise RuntimeError("the grammar trial process ended")
                verdict: str = json.loads(answer)
                return verdict
        finally:
            self._waiting -= 1

    async def _started(self) -> asyncio.subprocess.Process:
        """Helper process, started with the first grammar: it costs three seconds and 300 MB."""
        if self._helper is None or self._helper.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._helper = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, env=environment)
        return self._helper


def _grammars(request: Any) -> tuple[str, list[Grammar]]:
    """Request parameter that holds the grammars, and (kind, text) of each as vLLM passes it to xgrammar."""
    tools = request.tools if getattr(request, "tools", None) and request.tool_choice != "none" else []
    schemas = [getattr(tool, "function", tool).parameters for tool in tools]
    called: list[Grammar] = [("json", _schema(schema, "tools")) for schema in schemas if schema]
    param, wanted = _structured(request)
    return (param if wanted else "tools"), [*called, *wanted]


def _structured(request: Any) -> tuple[str, list[Grammar]]:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.utils import choice_as_grammar, convert_lark_to_ebnf, grammar_is_likely_lark

    named = (name for name in ("response_format", "text") if getattr(request, name, None) is not None)
    param = next(named, "structured_outputs")
    if not hasattr(request, "extract_structured_outputs"):
        return param, []
    try:
        wanted = request.extract_structured_outputs()
        if wanted is None:
            return param, []
        if max(len(text) for text in ("", wanted.regex, wanted.grammar) if text is not None) > MAX_CHARACTERS:
            raise ApiError(400, f"A grammar may have at most {MAX_CHARACTERS} characters.", param=param)
        if wanted.json is not None:
            return param, [("json", _schema(wanted.json, param))]
        if wanted.regex is not None:
            return param, [("regex", wanted.regex)]
        if wanted.choice:
            return param, [("grammar", choice_as_grammar(wanted.choice))]
        if wanted.grammar is not None:
            lark = grammar_is_likely_lark(wanted.grammar)
            return param, [("grammar", convert_lark_to_ebnf(wanted.grammar) if lark else wanted.grammar)]
    except (VLLMValidationError, ValueError) as error:
        raise ApiError(400, f"The request is not valid: {error}", param=param) from None
    return param, []


def _schema(schema: Any, param: str) -> str:
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    if isinstance(schema, str):
        if len(schema) > MAX_CHARACTERS or nesting(schema) > MAX_DEPTH:
            raise ApiError(400, f"A schema may have at most {MAX_CHARACTERS} characters and {MAX_DEPTH} levels.", param=param)
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ApiError(400, "The schema must be a JSON object.", param=param)
    if has_xgrammar_unsupported_json_features(schema):
        # vLLM would switch to another backend, but an engine can have only one.
        refused = "multipleOf, uniqueItems, contains, patternProperties, propertyNames, or a pattern or format with a length"
        raise ApiError(400, f"The schema uses an unsupported feature: one of {refused}.", param=param)
    return json.dumps(schema)


def _serve(model_dir: str, vocab_size: int) -> None:
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    for question in sys.stdin.buffer:  # ends with the replica
        verdict = _in_a_fork(tokens, json.loads(question))
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


def _in_a_fork(tokens: Any, grammars: list[Grammar]) -> str:
    """Runs a trial in a fork. The limit is CPU time, not wall time: the same grammars pass on a busy machine."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # on expiry SIGPROF ends the process
        os.write(writing, b"." + _try(tokens, grammars).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return (
        answer[1:].decode()
        if answer
        else f"it needs more than {CPU_SECONDS} s or {MEMORY // 2**20} MiB, or crashes the compiler."
    )


def _try(tokens: Any, grammars: list[Grammar]) -> str:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    try:
        for kind, text in grammars:
            if kind == "json":
                grammar = compiler.compile_json_schema(text, any_whitespace=True)
            elif kind == "regex":
                grammar = compiler.compile_regex(text)
            else:
                grammar = compiler.compile_grammar(text)
            if not _has_a_match(xgrammar, grammar, tokens.vocab_size):
                return "no text can satisfy it."
    except Exception as error:
        return re.sub(r"^\[.*?\] \S+: ", "", str(error)).strip()[:300]  # without xgrammar's timestamp and source file
    return ""


def _has_a_match(xgrammar: Any, grammar: Any, vocab_size: int) -> bool:
    import numpy

    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    for _ in range(STEPS):
        matcher.fill_next_token_bitmask(mask)
        allowed = numpy.flatnonzero(numpy.unpackbits(mask[0].numpy().view("uint8"), bitorder="little"))
        if not len(allowed):
            return False
        if not matcher.accept_token(int(allowed[len(allowed) // 2])) or matcher.is_terminated():
            break
    return True


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
