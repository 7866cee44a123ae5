import subprocess
import sys

import torch
from torch import nn

from strata.training.patches.adamw import EagerAdamW

WITHOUT_TRACER = """
import sys
import torch
from strata.training.patches.adamw import EagerAdamW

weight = torch.nn.Parameter(torch.ones(4))
optimizer = EagerAdamW([weight], lr=0.1, fused=True)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules
"""


def trained(kind: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


def test_steps_are_those_of_adamw_to_the_bit() -> None:
    pairs = zip(trained(EagerAdamW), trained(torch.optim.AdamW), strict=True)
    assert all(torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad for ours, theirs in pairs)


def test_tracer_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRACER], check=True)
