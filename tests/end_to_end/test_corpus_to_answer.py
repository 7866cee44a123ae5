"""End to end with real components: text, tokenizer, DeepSpeed under Ray Train, export, two vLLM engines, a stream."""

import json
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from support import TINY, Served

from strata.serving.code_completion import PROMPTS

VENV = Path(sys.executable).parents[1]


def test_from_corpus_to_streamed_answer(trained: Path, endpoint: Served) -> None:
    run = trained / "runs" / "tiny"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and losses[-1] < losses[0] - 1
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"bigram", (trained / "train.out").read_text())

    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none")
    stream = client.completions.create(model=endpoint.model, prompt="def ", max_tokens=20, temperature=0, stream=True)
    deltas = [event.choices[0].text for event in stream if event.choices]
    assert len(deltas) > 5 and "".join(deltas)
    assert "answers at" in endpoint.output.read_text() and "curl" in endpoint.output.read_text()


@pytest.mark.rotation
@pytest.mark.skipif(not (VENV / ".strata-setup").is_file(), reason="make demo would set up another environment")
def test_make_demo_on_a_small_recipe(root: Path, own_home: Path, trained: Path) -> None:
    words = [f"VENV={VENV}", "RUN=demo", f"ARGS=data.path={trained / 'corpus'} serve.port=8765 {' '.join(TINY)}"]
    make = ["make", "--no-print-directory", "-C", str(root), "demo", *words]
    done = subprocess.run(make, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TTFT" in done.stdout and "ITL" in done.stdout
    assert done.stdout.count(" remote") == len(PROMPTS)
    assert done.stdout.rstrip().endswith("Stopped.")
