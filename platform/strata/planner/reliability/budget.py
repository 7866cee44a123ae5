"""Days, GPU-hours, dollars and energy of a token budget, failures included."""

from dataclasses import dataclass

from strata.planner.worksheet import Worksheet


@dataclass(frozen=True)
class Budget:
    """Cost of a token budget. `days` include lost work and restarts; `undisturbed_days` do not."""

    tokens: float
    undisturbed_days: float
    days: float
    gpu_hours: float
    dollars: float
    kilowatt_hours: float


def plan_budget(
    tokens: float, tokens_per_s: float, gpus: int, dollars_per_gpu_hour: float, watts: float, goodput: float, worksheet: Worksheet
) -> Budget:
    """Plan a token budget. `goodput` is useful time over wall time. GPUs cost money and draw power during restarts and repeated
    work too."""
    part = worksheet.part("the token budget")
    part.given("tokens", tokens, "", "to train on")
    part.given("tokens_per_s", tokens_per_s, "/s", "of all GPUs")
    part.given("gpus", gpus)
    part.given("goodput", goodput, "", "useful time over wall time, with failures")
    part.given("dollars_per_gpu_hour", dollars_per_gpu_hour, "$")
    part.given("watts", watts, "W", "per GPU, from its datasheet; without hosts, network and cooling")
    part.work_out("undisturbed_s", "tokens / tokens_per_s", "s")
    part.work_out("wall_s", "undisturbed_s / goodput", "s")
    part.work_out("undisturbed_days", "undisturbed_s / 86400")
    part.work_out("days", "wall_s / 86400")
    part.work_out("gpu_hours", "gpus * wall_s / 3600")
    part.work_out("dollars", "gpu_hours * dollars_per_gpu_hour", "$")
    part.work_out("kilowatt_hours", "gpu_hours * watts / 1000", "", "GPUs only")
    return Budget(tokens, part["undisturbed_days"], part["days"], part["gpu_hours"], part["dollars"], part["kilowatt_hours"])
