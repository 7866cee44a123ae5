"""Step times fitted to a measured engine, from a JSON file, which `strata simulate calibrate` writes.

A step takes `fixed_s`, plus `sequence_s` for each decoding sequence and `context_token_s` for each token of their contexts, plus
`prompt_step_s` if it has prompt tokens and more than `graph_tokens` in all (the host launches it kernel by kernel),
`prompt_s` for each prompt (on a CPU, the front end of its request runs on the cores of the engine), `prompt_beside_s` if it has
prompt tokens beside decoding sequences (on a CPU, their tokens are written meanwhile), `prompt_token_s` for each prompt token and
`prompt_pair_s` for each of its query-key pairs. It takes `host_s` plus
`host_sequence_s` for each decoding sequence at least: with asynchronous scheduling, the host works beside the GPU.
`simulation.front_end` explains the times of the front end.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strata.platform.errors import UserError


class Calibration(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    fixed_s: float = Field(gt=0)
    sequence_s: float = Field(ge=0)
    context_token_s: float = Field(ge=0)
    prompt_token_s: float = Field(ge=0)
    prompt_pair_s: float = Field(ge=0)
    prompt_step_s: float = Field(default=0.0, ge=0)
    prompt_s: float = Field(default=0.0, ge=0)
    prompt_beside_s: float = Field(default=0.0, ge=0)
    host_s: float = Field(default=0.0, ge=0)
    host_sequence_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(ge=0)  # median of HTTP, tokenizer and the stream's first chunk
    request_spread: float = Field(default=0.0, ge=0)  # standard deviation of its logarithm
    front_request_s: float = Field(default=0.0, ge=0)  # work of the front end, which takes turns between requests
    front_token_s: float = Field(default=0.0, ge=0)  # work of the front end for each token
    kv_tokens: int = Field(gt=0)  # that the KV cache holds
    context: int = Field(gt=0)  # most tokens of a prompt with its answer
    handoff_s: float = Field(default=0.0, ge=0)  # of a KV transfer
    transfer_token_s: float = Field(default=0.0, ge=0)
    # Settings of the measured engine; None: those of the command line.
    block_size: int | None = Field(default=None, gt=0)
    max_sequences: int | None = Field(default=None, gt=0)
    step_tokens: int | None = Field(default=None, gt=0)
    graph_tokens: int = Field(default=0, ge=0)  # largest step that is a CUDA graph
    async_scheduling: bool = False

    def decode_terms(self, sequences: int, /) -> tuple[float, float]:
        return self.fixed_s + self.sequence_s * sequences, self.context_token_s

    def step(self, sequences: float, context: float, tokens: float, pairs: float, prompts: float = 0.0, /) -> float:
        decode_s = self.fixed_s + self.sequence_s * sequences + self.context_token_s * context
        # A mean of less than a token per step, as the sizing of pools has it, is a step with a prompt now and then.
        launch_s = self.prompt_step_s * min(1.0, tokens) if sequences + tokens > self.graph_tokens else 0.0
        beside_s = self.prompt_beside_s * min(1.0, tokens) if sequences else 0.0
        prompts_s = self.prompt_s * prompts + self.prompt_token_s * tokens + self.prompt_pair_s * pairs
        engine_s = decode_s + launch_s + beside_s + prompts_s
        return max(engine_s, self.least(sequences))

    def least(self, sequences: float, /) -> float:
        return self.host_s + self.host_sequence_s * sequences


def load(path: Path) -> Calibration:
    """Reads a record of `strata simulate calibrate`, or an object with the fields alone."""
    try:
        found: Any = json.loads(path.read_text())
        if isinstance(found, dict) and isinstance(found.get("engine"), dict):
            found = found["engine"]
        return Calibration.model_validate(found)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON: {error}.", "Name a file that 'strata simulate calibrate' wrote.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", "Check the path of --calibration.") from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "not text"}
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        fields = ", ".join(Calibration.model_fields)
        raise UserError(f"{path}: {place}: {first['msg']}.", f"Write a JSON object with the fields {fields}.") from None
