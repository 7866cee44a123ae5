"""Analysis of traces: classes of kernels, idle time by cause, exchanges, memory, and the reports."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.profile import intervals
from strata.platform.profile.finding import named
from strata.platform.profile.roofline import moved_bytes, points
from strata.platform.recipe import Recipe
from strata.training.profile.analysis import expected
from strata.training.profile.analysis.findings import NONE, findings
from strata.training.profile.analysis.summary import Summary, summarize
from strata.training.profile.report import html, present, record, tables

from .synthetic import AUTOGRAD, BF16, NCCL, Writer, product


@pytest.fixture
def recipe() -> Recipe:
    return recipe_file.load("h200", ["train.batch=8"])


def busy(writer: Writer, begin: float, length: float) -> None:
    """A product that occupies the GPU, launched well before it runs."""
    writer.op("aten::mm", begin - 900, 20, **product(1024, 1024, 1024))
    writer.kernel("nvjet_tst_128x256", begin - 890, begin, length)


def summary_of(recipe: Recipe, *writers: Writer) -> Summary:
    return summarize([writer.trace(rank) for rank, writer in enumerate(writers)], recipe)


def whole_step(writer: Writer, number: int) -> None:
    writer.step(number)
    writer.range("data", 0, 1000)
    writer.range("forward", 1000, 40_000)
    writer.range("layer 0", 1000, 39_000)
    dims = [[8, 4096, 32, 64], [8, 4096, 8, 64], [8, 4096, 8, 64]]
    writer.op("aten::mm", 1100, 50, **product(32768, 2048, 8192), **{"Sequence number": number * 10})
    writer.kernel("nvjet_tst", 1110, 2000, 20_000)
    writer.op("strata::flash_attention", 1300, 50, **{"Input Dims": dims, "Input type": [BF16]})
    writer.kernel("attention_kernel", 1310, 22_000, 18_000)
    writer.range("backward", 41_000, 50_000)
    node = "autograd::engine::evaluate_function: MmBackward0"
    writer.op(node, 41_100, 1000, AUTOGRAD, **{"Sequence number": number * 10})
    writer.op("aten::mm", 41_200, 50, AUTOGRAD, **product(32768, 8192, 2048))
    writer.kernel("nvjet_tst", 41_210, 42_000, 50_000, AUTOGRAD)
    writer.range("optimizer", 91_000, 8000)
    writer.kernel("multi_tensor_apply_kernel<FusedAdam>", 91_100, 92_000, 7500)


def test_kernels_have_class_phase_layer_and_rate(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        whole_step(writer, number)
    [rank] = summary_of(recipe, writer).ranks
    first, attention, backward, optimizer = rank.works[:4]
    assert (first.kind, first.phase, first.layer) == ("matrix products", "forward", "layer 0")
    assert first.flops == 2 * 32768 * 2048 * 8192 and first.dtype == BF16
    assert (attention.kind, attention.flops) == ("attention forward", 2 * 8 * 32 * 4096 * 4096 * 64)
    assert (backward.kind, backward.phase, backward.layer) == ("matrix products", "backward", "layer 0")
    assert optimizer.kind == "optimizer"
    assert rank.seconds["products"] == pytest.approx(0.07) and rank.seconds["attention"] == pytest.approx(0.018)
    assert rank.own == pytest.approx(0.1)


def test_idle_gpu_is_charged_to_its_cause(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        writer.step(number)
        writer.range("data", 0, 20_000)
        busy(writer, 21_000, 19_000)
        writer.runtime("cudaStreamSynchronize", 30_000, 12_000)  # the GPU has drained at 40 ms
        busy(writer, 50_000, 10_000)
        writer.runtime("cudaMalloc", 60_000, 5000)
        busy(writer, 66_000, 14_000)
        writer.range("gc 2", 81_000, 4000)
        busy(writer, 90_000, 10_000)
    [rank] = summary_of(recipe, writer).ranks
    assert rank.seconds["data"] == pytest.approx(0.020)
    assert rank.seconds["host reads"] == pytest.approx(0.010)
    assert rank.seconds["allocation"] == pytest.approx(0.005)
    assert rank.seconds["garbage collection"] == pytest.approx(0.004)
    assert rank.seconds["dispatch"] == pytest.approx(0.001 + 0.001 + 0.006)
    assert rank.seconds["products"] == pytest.approx(0.053)


def test_hidden_communication_costs_nothing_and_a_late_rank_is_no_transfer(recipe: Recipe) -> None:
    writers = Writer(), Writer()
    for number in (5, 6, 7):
        for rank, writer in enumerate(writers):
            writer.step(number)
            busy(writer, 1000, 89_000 if rank else 49_000)
            writer.kernel("ncclDevKernel_AllReduce_Sum", 900, 10_000, 20_000, stream=NCCL)  # beside the product
            begin = 90_000 if rank else 50_000
            writer.kernel("ncclDevKernel_AllGather", 950, begin, 100_000 - begin, stream=NCCL)
    summary = summary_of(recipe, *writers)
    assert summary.transfers["ncclDevKernel_AllReduce_Sum"] == 0.0
    assert summary.transfers["ncclDevKernel_AllGather"] == pytest.approx(0.010)
    assert [rank.waiting for rank in summary.ranks] == pytest.approx([0.040, 0.0])


def test_findings_of_a_gpu_name_the_largest_saving_first(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        writer.step(number)
        writer.range("data", 0, 30_000)
        busy(writer, 31_000, 49_000)
        writer.runtime("cudaStreamSynchronize", 70_000, 11_000)
        busy(writer, 90_000, 10_000)
    summary = summary_of(recipe, writer)
    found = findings(summary, expected.Machine())
    assert [each.cause for each in found] == ["data", "host reads"]
    assert [each.share for each in found] == pytest.approx([0.3, 0.1])
    assert found[0].sentence.startswith("Data loading blocks 30% of each step (30 ms of 100 ms).")


def test_recomputed_products_of_a_gpu_are_found_by_their_flops(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        whole_step(writer, number)
        for repeat in range(2):  # the other product of a backward pass, and the forward pass again
            writer.op("aten::mm", 41_300 + 100 * repeat, 50, AUTOGRAD, **product(32768, 8192, 2048))
            writer.kernel("nvjet_tst", 41_310 + 100 * repeat, 92_000 + repeat, 1, AUTOGRAD)
    full = recipe.model_copy(update={"train": recipe.train.model_copy(update={"recompute": "full"})})
    [finding] = findings(summary_of(full, writer), expected.Machine())
    assert finding.cause == "recomputation" and finding.seconds == pytest.approx(0.05 / 3, rel=0.01)
    assert findings(summary_of(recipe, writer), expected.Machine()) == []


def test_a_busy_gpu_has_no_finding(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        writer.step(number)
        busy(writer, 1000, 98_000)
    found = findings(summary_of(recipe, writer), expected.Machine())
    assert list(named(found, NONE)) == ["Nothing stands out: no cause takes 5% of a step that could be saved."]


def test_work_far_over_its_plan_is_a_finding(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        whole_step(writer, number)
    summary = summary_of(recipe, writer)
    machine = expected.Machine(planned={"attention": (0.005, 0.018), "matrix products": (0.069, 0.070)})
    [finding] = findings(summary, machine)
    assert finding.cause == "plan: attention" and finding.seconds == pytest.approx(0.013)


def test_the_catalogue_has_the_peaks_and_the_plan_of_a_known_gpu(recipe: Recipe) -> None:
    writer = Writer()
    whole_step(writer, 5)
    machine = expected.on_gpu(summary_of(recipe, writer))
    assert machine.peak == 989.4e12 or machine.peak == pytest.approx(989e12, rel=0.01)
    assert machine.precision == "bf16" and machine.faster is None
    assert {"matrix products", "attention", "optimizer"} <= set(machine.planned)
    slow = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "fp32", "matmul": "highest"})})
    faster = expected.on_gpu(summary_of(slow, writer)).faster
    assert faster and faster.setting == "train.matmul=high" and faster.times > 2


def test_intervals() -> None:
    one, other = [(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]
    assert intervals.union([(3.0, 5.0), (0.0, 1.0), (4.0, 6.0)]) == [(0.0, 1.0), (3.0, 6.0)]
    assert intervals.intersection(one, other) == [(1.0, 2.0), (3.0, 4.0), (6.0, 7.0)]
    assert intervals.difference(one, other) == [(0.0, 1.0), (2.0, 3.0), (7.0, 8.0)]
    assert intervals.total(one) == 6.0


def test_roofline_counts_each_operand_once() -> None:
    assert moved_bytes("matrix products", "4 x 6 x 5", "float") == 4 * (4 * 5 + 5 * 6 + 4 * 6)
    assert moved_bytes("attention forward", "1 x 2 x 8 x 8 x 16", BF16) == 2 * 4 * 2 * 8 * 16


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]


def test_page_and_json_hold_the_whole_profile(recipe: Recipe) -> None:
    writer = Writer()
    for number in (5, 6, 7):
        whole_step(writer, number)
    writer.events += [
        {"ph": "i", "name": "[memory]", "ts": at, "args": {"Device Type": 1, "Total Allocated": at}} for at in (100, 5000, 90_000)
    ]
    summary = summary_of(recipe, writer)
    machine = expected.on_gpu(summary)
    found = findings(summary, machine)
    page = _Page()
    page.feed(html.page(summary, machine, found))
    assert page.tags.count("svg") == 4 and not page.links, "pictures of causes, one step, roofline and memory, and no other file"
    written = json.loads(json.dumps(record.as_json(summary, machine, found)))
    assert written["benchmark"] == "profile" and written["ranks"][0]["work"][0]["class"] == "matrix products"
    assert points(summary.ranks[0].works, 3)[0].name.startswith("matrix products")
    assert written["ranks"][0]["peak_memory_bytes"] == {"data": 100, "forward": 5000, "backward": 90_000}
    assert tables.kinds(summary.ranks[0], machine.peak).row_count >= 4


def test_a_folder_without_traces_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(UserError, match="no trace with a whole step"):
        present.report(tmp_path, recipe, Console())
