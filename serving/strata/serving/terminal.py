"""Terminal output of `strata serve` and `strata chat`."""

import json
import logging
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from strata.platform.errors import UserError
from strata.serving import access, ask_pictures, client, code_completion, held_out_chat, python_api
from strata.serving.gateway import keys
from strata.serving.models import choice
from strata.serving.python_api import Endpoint

if TYPE_CHECKING:
    import openai

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=")
# A log file has no width of its own; 80 columns would fold the table of answers.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130)


def serve(overrides: Sequence[str], run: str | None, model: str | None, recipe: str | None, ask: bool) -> None:
    """Serves until Ctrl-C or, with `ask`, until a few prompts are answered. Words that change no recipe key are prompts."""
    prompts = [word for word in overrides if ask and not OVERRIDE.match(word)]
    chosen = choice.choose([word for word in overrides if word not in prompts], run, model, recipe)
    if prompts and not chosen.makes_pictures:
        raise UserError(f"{prompts[0]!r} is not an override, and --ask has its own prompts for text.", "Leave it out.")
    logging.disable(logging.INFO)  # Ray and the HTTP clients log each of their steps
    try:
        with ExitStack() as stack:
            stopping = console.status("Stopping …")
            stack.callback(stopping.stop)
            what = "workers" if chosen.makes_pictures else "prefill and decode engines"
            with console.status(f"Starting {what} for {chosen.model_id} …"):
                served = python_api.serve(chosen, report=_print_progress, began=psutil.Process().create_time())
                here = stack.enter_context(served)
            stack.callback(stopping.start)
            # After the start, since Ray sets its own handlers, and shells start background commands with SIGINT ignored.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _interrupt)
            _print_start(here)
            if ask and chosen.makes_pictures:
                ask_pictures.ask(here, prompts, console)
            elif ask:
                _ask(here, chosen)
            else:
                _print_usage(here, chosen.makes_pictures)
                here.wait(lambda line: console.print(f"{time.strftime('%H:%M:%S')} {line}"))
    except KeyboardInterrupt:
        pass
    console.print("Stopped.")


def _print_progress(line: str) -> None:
    console.print(line, style="dim", markup=False)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _print_start(here: Endpoint) -> None:
    parts = " · ".join(f"{phase} {seconds:.1f}" for phase, seconds in here.phases.items())
    console.print(f"[bold]{here.model}[/] answers at [bold]{here.url}[/] after {sum(here.phases.values()):.1f} s ({parts})")


def _print_usage(here: Endpoint, pictures: bool = False) -> None:
    path, request = "/v1/completions", {"model": here.model, "prompt": "import os", "max_tokens": 32}
    call = f"completions.create(model='{here.model}', prompt='import os', max_tokens=32).choices[0].text"
    if pictures:
        path, request = "/v1/images/generations", {"model": here.model, "prompt": ask_pictures.PROMPTS[0]}
        call = f"images.generate(model='{here.model}', prompt='{ask_pictures.PROMPTS[0]}').data[0].b64_json"
    body = json.dumps(request)
    header, imports, key = "", "", "'none'"
    if file := access.keys_file():
        source = f"$(head -n 1 {shlex.quote(str(file))})" if keys.read(file) else "KEY"
        console.print(f"\n  Requests need a key: export {access.KEY}={source}", markup=False)
        header, imports, key = f' -H "Authorization: Bearer ${access.KEY}"', "import os\n  ", f"os.environ['{access.KEY}']"
    console.print(f"\n  curl {here.url}{path}{header} -H 'Content-Type: application/json' -d '{body}'\n", markup=False)
    console.print(
        f"  {imports}from openai import OpenAI\n"
        f"  client = OpenAI(base_url='{here.url}/v1', api_key={key})\n"
        f"  print(client.{call})\n",
        markup=False,
    )
    chat = "" if pictures else ", or [bold]make chat[/]"
    console.print(f"Open [bold]{here.url}/[/] in a browser{chat}. Ctrl-C stops it.")


def _ask(here: Endpoint, chosen: choice.Choice) -> None:
    """Prints the answers to a few prompts with their latencies and, where a program knows, whether they are right."""
    if chosen.questions:
        _ask_conversations(here, held_out_chat.read(chosen.questions))
        return
    table = _answers_table(judged=chosen.knows_python)
    connected, score = here.client(), 0
    for prompt in code_completion.PROMPTS:
        answer = client.complete(connected, here.model, prompt.text, code_completion.MAX_TOKENS, code_completion.STOP)
        verdict = prompt.is_right(answer.text)
        score += verdict
        _add_answer(table, answer, verdict if chosen.knows_python else None)
    console.print(table, markup=False)
    if chosen.knows_python:
        console.print(f"{score} of {len(code_completion.PROMPTS)} answers continue the line as Python does.")


def _ask_conversations(here: Endpoint, questions: list[held_out_chat.Question]) -> None:
    table, score = _answers_table(judged=True), 0
    connected = here.client()
    for question in questions:
        answer = client.answer(connected, here.model, question.messages, held_out_chat.MAX_TOKENS)
        verdict = question.is_right(answer.text)
        score += verdict
        _add_answer(table, answer, verdict)
    console.print(table, markup=False)
    console.print(f"{score} of {len(questions)} answers to held-out questions are right.")


def _answers_table(judged: bool) -> Table:
    table = Table(box=None, header_style="bold")
    right = ("right",) if judged else ()
    for column in ("prompt", "answer", *right, "tokens", "TTFT ms", "ITL ms", "prefill"):
        table.add_column(column, justify="right" if column in ("tokens", "TTFT ms", "ITL ms") else "left", overflow="fold")
    return table


def _add_answer(table: Table, answer: client.Timed, verdict: bool | None) -> None:
    numbers = (str(answer.tokens), f"{1000 * answer.ttft_s:.1f}", f"{1000 * answer.itl_s:.1f}")
    judged = () if verdict is None else ("yes" if verdict else "no",)
    table.add_row(repr(answer.prompt), repr(answer.text), *judged, *numbers, answer.prefill.split(";")[0])


def chat(url: str, max_tokens: int, temperature: float, model: str | None = None) -> None:
    """Reads messages from stdin and streams the answers, until its end. `model`: by default the endpoint's main one."""
    connected = client.connect(url)
    model = client.require_model(connected, url, model)
    console.print(f"[dim]{model} at {url}. Ctrl-D ends, Ctrl-C stops an answer.[/]")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _stream_answer(connected, model, messages, max_tokens, temperature)
        except UserError as error:
            messages.pop()
            console.print(f"[red]{error.cause}[/] {error.fix}")
        else:
            messages.append({"role": "assistant", "content": answer})


def _stream_answer(connected: "openai.OpenAI", model: str, messages: list[Any], max_tokens: int, temperature: float) -> str:
    import openai as library

    text, stream = "", None
    try:
        stream = connected.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=temperature,
            stream=True,
        )
        for event in stream:
            delta = (event.choices[0].delta.content or "") if event.choices else ""
            text += delta
            print(delta, end="", flush=True)
    except KeyboardInterrupt:
        if stream is not None:
            stream.close()
    except library.BadRequestError as error:
        raise UserError(error.message, "Start a new, shorter conversation.") from None
    except library.APITimeoutError:
        raise UserError(
            f"No answer within {client.TIMEOUT_S:.0f} s.", "Send it again, or read the output of 'strata serve'."
        ) from None
    except library.APIConnectionError:
        raise UserError("The endpoint has ended.", "Start it again with 'make serve'.") from None
    except library.APIError as error:  # an error status, or an error event in the stream
        raise UserError(error.message, "Send it again.") from None
    print()
    return text
