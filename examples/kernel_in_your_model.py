"""Uses Strata's operations in a plain torch module, with autograd and torch.compile. Runs on the CPU, or a GPU if there is one.

python examples/kernel_in_your_model.py
"""

import argparse

import torch
from torch import Tensor, nn

from strata.kernels import linear_cross_entropy, rms_norm, swiglu

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--backend", default="aot_eager", help="of torch.compile; inductor needs a C++ compiler")
arguments = parser.parse_args()


class NextToken(nn.Module):
    """Predicts the next token from the present one: an embedding, a feed-forward block, and a tied output layer."""

    def __init__(self, vocab: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.norm, self.last_norm = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # [tokens], [tokens]
        x = self.embed(tokens)
        gate, up = self.gate_up(rms_norm(x, self.norm, 1e-6)).chunk(2, dim=-1)
        x = x + self.down(swiglu(gate, up))
        # The [tokens, vocab] logits never exist as a whole.
        return linear_cross_entropy(rms_norm(x, self.last_norm, 1e-6), self.embed.weight, targets)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(b"to be, or not to be, that is the question. " * 20), device=device)
model = NextToken().to(device)
compiled = torch.compile(model, fullgraph=True, backend=arguments.backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(arguments.steps):
    loss = compiled(text[:-1], text[1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == arguments.steps - 1:
        print(f"step {step}: loss {loss.item():.3f}")
