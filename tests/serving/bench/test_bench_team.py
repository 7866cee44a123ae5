"""Contenders of 'strata bench serve' with what a team's endpoint has: keys, traces, a second model."""

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from strata.platform import recipe_file
from strata.serving.bench.contenders import contenders, team
from strata.serving.bench.contenders.subject import Subject
from strata.serving.gateway import keys


def subject(recipe: str, *overrides: str) -> Subject:
    section = recipe_file.load(recipe, list(overrides)).serve
    return Subject(Path("/models/one"), "one", section, ("--model", "/models/one"), 100, 256)


@pytest.mark.parametrize("name", ["strata", "strata-pd"])
def test_team_has_keys_traces_and_a_second_model(name: str) -> None:
    alone = contenders.find(name).launch(subject("laptop"), False, 8000)
    launch = contenders.find(f"{name}-team").launch(subject("laptop"), False, 8000)
    assert launch.command == [*alone.command, 'serve.models.second={model: "/models/one"}']
    file = Path(launch.environment[keys.FILE])
    with ExitStack() as held:
        for each in launch.held:
            held.enter_context(each)
        known = keys.parse(file.read_bytes(), file).keys
        assert launch.key is not None and len(known) == 1 and launch.key not in file.read_text()
        spans = httpx.post(f"{launch.environment['OTEL_EXPORTER_OTLP_ENDPOINT']}/v1/traces", content=b"spans")
        assert spans.status_code == 200
    assert not file.exists()


def test_second_model_gets_half_of_a_gpu() -> None:
    launch = contenders.find("strata-team").launch(subject("h200"), False, 8000)
    words = [word for word in launch.command if word.startswith("serve.")]
    written = recipe_file.load("h200", [word for word in words if not word.startswith("serve.models")]).serve
    assert (written.decode.gpus, written.decode.gpu_memory) == (0.5, 0.425)
    pair = contenders.find("strata-pd-team").launch(subject("h200"), False, 8000)
    words = [word for word in pair.command if word.startswith("serve.") and not word.startswith("serve.models")]
    halved, whole = recipe_file.load("h200", words).serve, subject("h200").section
    assert halved.prefill.gpus == whole.prefill.gpus / 2 and halved.decode.gpu_memory == whole.decode.gpu_memory / 2


def test_endpoint_without_traces_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no trace"), team.TraceCollector():
        pass
    with pytest.raises(KeyError), team.TraceCollector():
        raise KeyError  # the reason is not hidden


def test_team_can_be_changed_too() -> None:
    changed = contenders.find("strata-team+serve.max_sequences=8").launch(subject("laptop"), False, 8000)
    assert changed.command[-1] == "serve.max_sequences=8" and changed.key is not None
