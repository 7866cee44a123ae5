"""AdamW without torch's compiler: same steps as torch's, and no import of `torch._dynamo`."""

import subprocess
import sys

import torch
from torch import nn

from strata.training.patches.adamw import EagerAdamW

STEP = """
import sys
import torch
from strata.training.patches.adamw import EagerAdamW

weight = torch.nn.Parameter(torch.ones(4))
optimizer = {optimizer}([weight], lr=0.1, fused=True)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
print("torch._dynamo" in sys.modules)
"""


def imports_dynamo(optimizer: str) -> bool:
    done = subprocess.run([sys.executable, "-c", STEP.format(optimizer=optimizer)], check=True, capture_output=True, text=True)
    return done.stdout.strip() == "True"


def trained(kind: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


def test_steps_are_bitwise_equal_to_torch() -> None:
    pairs = zip(trained(EagerAdamW), trained(torch.optim.AdamW), strict=True)
    assert all(torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad for ours, theirs in pairs)


def test_eager_adamw_does_not_import_dynamo() -> None:
    assert not imports_dynamo("EagerAdamW"), (
        "EagerAdamW imports torch._dynamo: torch has put a compiler decorator on another method of AdamW. "
        "Override that method in patches/adamw.py."
    )


def test_patch_is_still_needed() -> None:
    assert imports_dynamo("torch.optim.AdamW"), (
        "torch's AdamW no longer imports torch._dynamo. Delete patches/adamw.py and use torch.optim.AdamW in engine.py."
    )
