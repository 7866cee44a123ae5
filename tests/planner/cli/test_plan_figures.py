"""Data in the figures of the planner: curves, boxes and labels, read back from matplotlib."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from strata.planner.catalogue.fleets import Rates
from strata.planner.collectives import lab
from strata.planner.collectives.cost import Links
from strata.planner.collectives.patterns import Place
from strata.planner.pipeline import timeline
from strata.planner.pipeline.simulate import even, simulate
from strata.planner.reliability import failures
from strata.planner.worksheet import Worksheet

HERE = Path("not-written.png")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that would be written."""
    found: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **given: found.append(self))
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, path, **given: found.append(self.figure))
    return found


def test_goodput_curves_span_two_decades_around_the_best_intervals(drawn: list[Any]) -> None:
    rates = Rates("some", "a test", {"GPU": 4e-5})
    plan = failures.plan_failures(1000, 6e12, 7.0, 2e10, worksheet=Worksheet("test"), rates=rates)
    failures.draw(plan, HERE)
    [axes] = drawn[0].axes
    lines = axes.get_lines()
    intervals = [saving.interval_s for saving in plan.savings.values()]
    curves, points = lines[::2], lines[1::2]
    assert [line.get_label() for line in curves] == ["blocking", "asynchronous", "peer-memory"]
    for curve, point, (mode, saving) in zip(curves, points, plan.savings.items(), strict=True):
        minutes, goodputs = curve.get_data()
        assert len(minutes) == 100
        assert (minutes[0], minutes[-1]) == (pytest.approx(min(intervals) / 600), pytest.approx(max(intervals) / 6))
        assert minutes[50] / minutes[49] == pytest.approx(minutes[1] / minutes[0])
        at = failures.goodput_curve(plan, [minutes[30] * 60])[mode][0]
        assert goodputs[30] == pytest.approx(100 * at)
        assert point.get_data() == ([pytest.approx(saving.interval_s / 60)], [pytest.approx(100 * saving.goodput)])
    assert axes.get_ylim() == (0, 100) and axes.get_title() == "a failure every 25 h"


def boxes(figure: Any) -> tuple[list[list[tuple[float, float]]], ...]:
    """Corners of the idle background, the operations and the frames."""
    collections = [one for one in figure.axes[0].collections if isinstance(one, PolyCollection)]
    return tuple([[tuple(corner) for corner in path.vertices[:4]] for path in one.get_paths()] for one in collections)


def test_timelines_have_a_box_for_each_operation(drawn: list[Any]) -> None:
    """Times in milliseconds, stages 0.86 high."""
    found = simulate("1f1b", 2, 3, 1, even(2, 1e-3, 1e-3, 1e-3))
    timeline.draw(found, HERE, "a title")
    idle, operations, frames = boxes(drawn[0])
    assert frames == []
    assert [box[2] for box in idle] == [pytest.approx((12.0, 0.43)), pytest.approx((12.0, 1.43))]
    assert operations[0] == [pytest.approx(corner) for corner in ((0, -0.43), (1, -0.43), (1, 0.43), (0, 0.43))]
    assert len(operations) == 12
    axes = drawn[0].axes[0]
    numbers = [(text.get_text(), text.get_position()) for text in axes.texts]
    assert len(numbers) == 12 and numbers[0] == ("0", pytest.approx((0.5, 0)))
    assert axes.get_xlim() == (0, pytest.approx(12)) and axes.get_ylim() == (pytest.approx(1.6), pytest.approx(-0.6))
    assert axes.get_title(loc="left") == "a title: 25.0% bubble" and axes.get_xlabel() == "milliseconds"
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["forward", "backward", "idle"]
    assert list(axes.get_yticks()) == [0, 1]


def test_joined_operations_are_framed_from_the_first_to_the_end_of_the_second(drawn: list[Any]) -> None:
    found = simulate("dualpipe", 2, 4, 1, even(2, 1.0, 1.0, 1.0))
    timeline.draw(found, HERE, "a title")
    frames = boxes(drawn[0])[2]
    pairs = [one for one in found.placed(0) if one.operation.joined]
    assert [frames[0][0][0], frames[0][1][0]] == [pytest.approx(pairs[0].start), pytest.approx(pairs[1].end)]
    assert len(frames) == 2
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()][-2:] == ["idle", "one block"]


def test_numbers_that_do_not_fit_are_left_out(drawn: list[Any]) -> None:
    """14.08 inches for 300 boxes: those of forwards are 0.023 inches wide, less than a digit."""
    timeline.draw(simulate("gpipe", 1, 150, 1, even(1, 1.0, 1.5, 1.5)), HERE, "a title")
    assert len(drawn[0].axes[0].texts) == 0


def test_many_stages_have_sixteen_ticks(drawn: list[Any]) -> None:
    timeline.draw(simulate("gpipe", 32, 1, 1, even(32, 1.0, 1.0, 1.0)), HERE, "a title")
    assert list(drawn[0].axes[0].get_yticks()) == list(range(0, 32, 2))


def test_collective_curves_are_in_microseconds(drawn: list[Any]) -> None:
    wires = Links(400e9, 300e9, 50e9, 400e9, "infiniband", "rail", 1.0, launch=0.0)
    lab.plot("all_reduce", Place(8), wires, HERE)
    [axes] = drawn[0].axes
    curves = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    assert list(curves) == ["ring", "double_tree", "nvls"]
    seconds = lab.by_algorithm("all_reduce", 2.0**20, Place(8), wires)
    sizes, times = curves["ring"].get_data()
    assert times[list(sizes).index(2.0**20)] == pytest.approx(seconds["ring"] * 1e6)
    crossings = [line for line in axes.get_lines() if line.get_label().startswith("_")]
    assert len(crossings) == len(lab.crossovers("all_reduce", Place(8), wires)) == len(axes.texts)
    assert axes.get_title() == "all_reduce, 8 ranks a domain, 1 domain"
    lab.plot("all_reduce", Place(8, 2), wires, HERE)
    assert drawn[1].axes[0].get_title().endswith("2 domains")
