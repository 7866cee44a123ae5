"""Layouts of diffusion transformers: names, worker counts and the reasons of refusals."""

import pytest

from strata.planner.diffusion.layout_rules import PictureLayout, Splittable, check, layouts, obstacles
from strata.platform.errors import UserError

SD3 = Splittable(heads=24, blocks=24, tokens=4096, two_passes=True)


def test_workers_are_the_product_of_the_degrees() -> None:
    layout = PictureLayout(ulysses=3, ring=2, cfg=2)
    assert (layout.workers, layout.sequence, layout.pipeline_patches) == (12, 6, 1)
    assert layout.name() == "cfg 2 x ulysses 3 x ring 2" and PictureLayout().name() == "one worker"
    assert PictureLayout(pipefusion=4).pipeline_patches == 4 and PictureLayout(pipefusion=4, patches=8).pipeline_patches == 8


@pytest.mark.parametrize(
    ("layout", "of", "reason"),
    [
        (PictureLayout(ulysses=5), SD3, "ulysses=5 does not divide the 24 heads"),
        (PictureLayout(ulysses=0), SD3, "ulysses=0 is below 1"),
        (PictureLayout(cfg=3), SD3, "two passes"),
        (PictureLayout(cfg=2), Splittable(24, 24, 4096, two_passes=False), "no second pass"),
        (PictureLayout(pipefusion=25), SD3, "exceeds the 24 blocks"),
        (PictureLayout(pipefusion=2, ring=2), SD3, "combined with cfg only"),
        (PictureLayout(patches=4), SD3, "needs pipefusion"),
        (PictureLayout(patches=-1), SD3, "below 0"),
        (PictureLayout(ulysses=2, ring=3), Splittable(24, 24, 5, True), "exceeds the 5 tokens"),
        (PictureLayout(pipefusion=2, patches=6), Splittable(24, 24, 5, True), "6 patches exceed the 5 tokens"),
    ],
)
def test_refusals_name_the_reason(layout: PictureLayout, of: Splittable, reason: str) -> None:
    (found,) = obstacles(layout, of)
    assert reason in found
    with pytest.raises(UserError, match="does not work"):
        check(layout, of)


@pytest.mark.parametrize(
    "layout",
    [
        PictureLayout(ulysses=24),
        PictureLayout(ring=5),  # tokens are split unevenly
        PictureLayout(cfg=2, pipefusion=24),
        PictureLayout(cfg=2, ulysses=4, ring=2),
        PictureLayout(pipefusion=2, patches=4096),
        PictureLayout(ring=4096),
    ],
)
def test_layouts_at_the_limits_work(layout: PictureLayout) -> None:
    assert obstacles(layout, SD3) == []
    check(layout, SD3)


def test_layouts_of_a_number_of_workers() -> None:
    found = layouts(4, SD3)
    assert len(found) == len(set(found)) and all(layout.workers == 4 for layout in found)
    names = {layout.name() for layout in found}
    alone = {"ulysses 4", "ring 4", "ulysses 2 x ring 2", "pipefusion 4"}
    assert names == alone | {"cfg 2 x ulysses 2", "cfg 2 x ring 2", "cfg 2 x pipefusion 2"}
    assert all(layout.cfg == 1 for layout in layouts(4, Splittable(24, 24, 4096, two_passes=False)))
    assert {layout.name() for layout in layouts(5, SD3)} == {"ring 5", "pipefusion 5"}
    assert layouts(1, SD3) == [PictureLayout()]
