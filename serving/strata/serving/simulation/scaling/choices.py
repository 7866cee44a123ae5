"""Autoscaling as the command line sets it: the policies to compare, their bounds and the SLO."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from strata.platform.errors import UserError
from strata.serving.scaling.policy import Bounds
from strata.serving.scaling.sizing import Limits, Overhead, Slo
from strata.serving.simulation.endpoint import Setup
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.replica import Role
from strata.serving.simulation.scaling.fleet import Scaling
from strata.serving.simulation.scaling.scalers import EngineModel, RayDefaultScaler, SloScaler

Policy = Literal["slo", "ray-default", "fixed"]


@dataclass(frozen=True)
class Choices:
    """`most` by pool, None where it was not set. The least numbers are the replicas of the setup."""

    policies: tuple[Policy, ...]
    slo: Slo | None
    most: dict[Role, int | None]
    startup_s: float

    def setups(self, setup: Setup) -> dict[str, Setup]:
        """The setup under each policy; without a policy, the setup itself."""
        setup = replace(setup, slo=self.slo)
        least: dict[Role, int] = {"decode": setup.decode_replicas, "prefill": setup.prefill_replicas}
        if not self.policies:
            if least["decode"] == 0:
                raise UserError("--decode 0 leaves no engine to answer.", "Set --decode to at least 1, or --scale slo.")
            if any(self.most.values()):
                raise UserError("--max-decode and --max-prefill need --scale.", "Set --scale slo, or omit them.")
            return {"": setup}
        if self.slo is None:
            raise UserError("--scale needs an SLO.", "Set --slo-ttft and --slo-itl, in seconds.")
        if setup.kills:
            raise UserError("--scale excludes --kill.", "Omit one of them.")
        most = {role: self.most[role] or least[role] for role in least}
        for role, number in most.items():
            if number < least[role] or (role == "decode" and number == 0):
                raise UserError(
                    f"--max-{role} is {number}, and --{role} is {least[role]}.", f"Set --max-{role} to at least --{role}, and 1."
                )
        bounds = {role: Bounds(least[role], number) for role, number in most.items() if number}
        return {policy: self._under(policy, setup, bounds, self.slo) for policy in self.policies}

    def _under(self, policy: Policy, setup: Setup, bounds: dict[Role, Bounds], slo: Slo) -> Setup:
        if policy == "fixed":
            most = {role: each.most for role, each in bounds.items()}
            return replace(setup, decode_replicas=most["decode"], prefill_replicas=most.get("prefill", 0))
        if policy == "ray-default":
            return replace(setup, scaling=Scaling(partial(RayDefaultScaler, bounds), self.startup_s))
        limits: dict[Role, Limits] = {"decode": _limits(setup.decode_engine), "prefill": _limits(setup.prefill_engine)}
        engine = EngineModel(setup.times, limits, Overhead(setup.request_s, setup.handoff_s, setup.transfer_token_s))
        return replace(setup, scaling=Scaling(partial(SloScaler, engine, slo, bounds, self.startup_s), self.startup_s))


def _limits(engine: EngineSettings | None) -> Limits:
    assert engine is not None
    return Limits(engine.blocks * engine.block_size, engine.max_sequences, engine.step_tokens)
