"""What a token budget takes: days, GPU-hours, money and energy, with what failures cost."""

from dataclasses import dataclass

from strata.planner.worksheet import Worksheet


@dataclass(frozen=True)
class Budget:
    """`days` are by the calendar, lost work and restarts included; `undisturbed_days` without them."""

    tokens: float
    undisturbed_days: float
    days: float
    gpu_hours: float
    dollars: float
    kilowatt_hours: float


def plan_budget(
    tokens: float, tokens_per_s: float, gpus: int, dollars_per_gpu_hour: float, watts: float, goodput: float, worksheet: Worksheet
) -> Budget:
    """`goodput`: useful time over wall time. GPUs are paid for, and draw power, while they restart and repeat."""
    part = worksheet.part("the token budget")
    part.given("tokens", tokens, "", "to train on")
    part.given("tokens_per_s", tokens_per_s, "/s", "of all GPUs")
    part.given("gpus", gpus)
    part.given("goodput", goodput, "", "useful time over wall time, with failures")
    part.given("dollars_per_gpu_hour", dollars_per_gpu_hour, "$")
    part.given("watts", watts, "W", "of a GPU, by its datasheet; hosts, network and cooling come on top")
    part.work_out("undisturbed_s", "tokens / tokens_per_s", "s")
    part.work_out("wall_s", "undisturbed_s / goodput", "s")
    part.work_out("undisturbed_days", "undisturbed_s / 86400")
    part.work_out("days", "wall_s / 86400")
    part.work_out("gpu_hours", "gpus * wall_s / 3600")
    part.work_out("dollars", "gpu_hours * dollars_per_gpu_hour", "$")
    part.work_out("kilowatt_hours", "gpu_hours * watts / 1000", "", "of the GPUs alone")
    return Budget(tokens, part["undisturbed_days"], part["days"], part["gpu_hours"], part["dollars"], part["kilowatt_hours"])
