"""`strata bench tenants`: its keys, the requests that count, and refusals before anything starts."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.serving import access
from strata.serving.bench import tenants
from strata.serving.bench.clients.load import Record
from strata.serving.gateway.keys import FILE, Keys


def test_keys_are_those_of_two_tenants_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, "mine")
    monkeypatch.delenv(access.KEY, raising=False)
    with tenants.keys(tmp_path / "tenants.yaml") as made:
        keys = Keys(Path(os.environ[FILE]))
        for name, key in made.items():
            caller = keys.check([(b"authorization", f"Bearer {key}".encode())])
            assert caller is not None and caller.tenant.name == name and caller.tenant.limits.weight == 1
        assert access.key_for("http://127.0.0.1:1") == made[tenants.QUIET]
    assert os.environ[FILE] == "mine" and access.KEY not in os.environ


def record(start: float, end: float, error: str | None = None) -> Record:
    return Record("all", start, end, (start, end), 2, error)


def test_only_requests_beside_the_loud_tenant_count() -> None:
    loud = [record(2, 5), record(3, 9)]
    quiet = [record(1, 3), record(2, 4), record(5, 9), record(8, 9.5)]
    assert tenants._during(quiet, loud) == quiet[1:3]
    with pytest.raises(UserError, match="did not overlap"):
        tenants._during(quiet[:1], loud)
    with pytest.raises(UserError, match="HTTP 500"):
        tenants._during(quiet, [*loud, record(4, 5, "HTTP 500")])


def test_a_flood_must_fit_the_queue(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(tenants.bench_tenants)
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    words = ["--model", str(folder), "serve.max_sequences=16", "serve.max_queue=71"]
    with pytest.raises(UserError, match=r"80 requests of a tenant whose share is 8") as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert "serve.max_queue=80" in error.value.fix
