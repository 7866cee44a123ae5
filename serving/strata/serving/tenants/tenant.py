"""A tenant and its limits, as the file of tenants has them."""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"  # safe as a metric label, in a header and in a log
SHORT = 12  # hexadecimal digits of a key's short id

Count = Annotated[int, Field(ge=1, le=10**15, strict=True)]


class Section(BaseModel):
    """A part of the file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class KeyEntry(Section):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal digits")]
    expires: AwareDatetime | None = Field(None, description="time with a time zone from which on the key is refused")


class Limits(Section):
    """Limits of one tenant. A limit that is absent does not apply."""

    weight: Annotated[float, Field(ge=0.001, le=1000, strict=True)] = Field(
        1.0, description="share of the engines' sequences, relative to the other active tenants"
    )
    priority: Annotated[int, Field(ge=-100, le=100, strict=True)] = Field(
        0, description="requests of higher numbers leave the queue first"
    )
    requests_per_minute: Count | None = Field(None, description="requests, with bursts of up to a minute's worth")
    tokens_per_minute: Count | None = Field(None, description="input and output tokens, with bursts of up to a minute's worth")
    tokens_per_day: Count | None = Field(None, description="input and output tokens of a UTC day")
    concurrency: Count | None = Field(None, description="sequences in flight, running or queued")
    models: tuple[str, ...] | None = Field(None, description="models that may be used; unset: all")
    share_cache: bool = Field(False, description="share cached prefixes with all tenants that share theirs", strict=True)
    admin: bool = Field(False, description="may change what the endpoint serves, through its admin API", strict=True)


@dataclass(frozen=True)
class Tenant:
    name: str
    limits: Limits = field(default_factory=Limits)

    def may_use(self, model: str) -> bool:
        return self.limits.models is None or model in self.limits.models


# Queue of all batches: behind every tenant, and without a part in their shares. Rates and budgets of a line are those of its
# tenant. No tenant's name begins like this one.
BACKGROUND = Tenant("~batches", Limits(weight=0.001, priority=-100))


@dataclass(frozen=True)
class Caller:
    """Tenant of a request, and the short id of the key that it was sent with."""

    tenant: Tenant
    key: str
    background: bool = False  # a line of a batch: it runs when nobody else has a request


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def short_id(found: bytes) -> str:
    """Short id of a key, from its digest."""
    return found.hex()[:SHORT]
