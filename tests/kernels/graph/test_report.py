"""`strata compile report`: figures that follow from the shapes, and a picture of both graphs."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from kernels.graph.tiny_models import SHAPE
from torch import Tensor
from transformers import LlamaConfig
from typer.testing import CliRunner

from strata.kernels.commands import compile_report
from strata.kernels.graph.report import capture
from strata.platform.errors import UserError

app = typer.Typer()
app.command()(compile_report)


def test_report_of_a_folder_with_a_configuration_alone(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path / "tiny")
    picture = tmp_path / "graph.svg"
    answer = CliRunner().invoke(app, [str(tmp_path / "tiny"), "--batch", "2", "--tokens", "16", "--picture", str(picture)])
    assert answer.exit_code == 0, answer.output
    lines = [line.split() for line in answer.output.splitlines() if line.strip()]
    counts = {line[0]: line[1] for line in lines if len(line) == 5 and line[3] == "MiB"}
    assert counts == {
        "rms_norm": "1",
        "add_rms_norm": "4",
        "rope": "2",
        "swiglu": "2",
        "flash_attention": "2",
        "linear_cross_entropy": "1",
        "all": "12",
    }
    assert "not fused" not in answer.output
    texts = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("strata.add_rms_norm") == 3 and texts.count("strata.linear_cross_entropy") == 1
    assert texts.count("scaled_dot_product_attention") == 1 and texts.count("cross_entropy") == 1


def test_savings_of_a_gated_activation() -> None:
    """silu reads and writes one tensor, the product reads two and writes one; fused, two reads and one write remain."""
    gate = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    (fusion,) = capture(lambda gate, up: torch.nn.functional.silu(gate) * up, gate, gate.clone()).record.fused
    assert (fusion.bytes_saved, fusion.launches_saved) == (2 * 4 * 256 * 2, 1)


def test_savings_of_a_residual_and_norm() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        wide = total.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype), total

    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8), (8,)))
    (fusion,) = capture(block, x, x.clone(), weight).record.fused
    narrow, wide, rows, vector = 4 * 8 * 2, 4 * 8 * 4, 4 * 4, 8 * 2
    before = 3 * narrow + (narrow + wide) + 2 * wide + (wide + rows) + 2 * rows + 2 * rows
    before += (2 * wide + rows) + (wide + narrow) + (2 * narrow + vector)
    assert fusion.bytes_saved == before - (4 * narrow + vector)
    assert fusion.launches_saved == 8


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, [str(tmp_path / "nothing")])
    assert isinstance(answer.exception, UserError)
    assert "nothing" in str(answer.exception)


@pytest.mark.parametrize("used", [True, False])
def test_reasons_are_reported(used: bool) -> None:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        active = torch.nn.functional.silu(gate)
        return active * up + active if used else active * up

    record = capture(function, torch.ones(2, 3), torch.ones(2, 3)).record
    assert len(record.refused) == used and len(record.fused) == (not used)
