"""Batches by shape: full or in time, oldest first, and fair."""

from dataclasses import dataclass

import pytest

from strata.serving.diffusion.replica.batching import Queue, Shape, limit

SMALL, LARGE = Shape(32, 32, 20, True), Shape(64, 64, 20, True)


@dataclass(eq=False)
class Waiting:
    name: str
    shape: Shape


def queue(most: int = 4, wait_s: float = 0.005) -> Queue[Waiting]:
    return Queue(lambda shape: most, wait_s)


def names(batch: list[Waiting]) -> str:
    return "".join(each.name for each in batch)


def filled(words: str, **options: float) -> Queue[Waiting]:
    """Lower case: small pictures, upper case: large ones. One arrives every second."""
    made = queue(**options)  # type: ignore[arg-type]
    for now, name in enumerate(words):
        made.add(Waiting(name, SMALL if name.islower() else LARGE), float(now))
    return made


def test_empty_queue_has_no_next_batch() -> None:
    assert queue().delay(0.0) is None


def test_batch_waits_for_others_from_its_oldest_picture_on() -> None:
    made = queue(most=2, wait_s=0.005)
    made.add(Waiting("a", SMALL), 10.0)
    assert made.delay(10.0) == pytest.approx(0.005)
    assert made.delay(10.003) == pytest.approx(0.002)
    assert made.delay(10.006) == 0.0
    made.add(Waiting("A", LARGE), 10.001)  # of another shape: no reason to begin
    assert made.delay(10.001) == pytest.approx(0.004)
    made.add(Waiting("b", SMALL), 10.002)  # full
    assert made.delay(10.002) == 0.0


def test_batches_have_one_shape_the_oldest_first() -> None:
    made = filled("aAbBcC", most=2)
    assert [names(made.take()) for _ in range(4)] == ["ab", "AB", "c", "C"] and len(made) == 0


@pytest.mark.parametrize(
    "other",
    [
        Shape(32, 64, 20, True),
        Shape(64, 32, 20, True),
        Shape(32, 32, 21, True),
        Shape(32, 32, 20, False),
        Shape(32, 32, 20, True, 1),
    ],
)
def test_every_part_of_a_shape_separates_batches(other: Shape) -> None:
    made = queue()
    for name, shape in (("a", SMALL), ("b", other), ("c", SMALL)):
        made.add(Waiting(name, shape), 0.0)
    assert [names(made.take()), names(made.take())] == ["ac", "b"]


def test_rare_size_is_not_starved_by_a_popular_one() -> None:
    """The popular size arrives as fast as it is served; the rare picture waits for the older ones only."""
    made, served = filled("abcdAefgh", most=2), []
    for now in range(4):
        served.append(names(made.take()))
        for name in "xy":
            made.add(Waiting(name, SMALL), 100.0 + now)
    assert served == ["ab", "cd", "A", "ef"]


def test_no_picture_waits_for_a_younger_one_of_another_shape() -> None:
    words = "aBcDeFgHAbCdEfGhijKLmnOP"
    made, order = filled(words, most=3), ""
    while len(made):
        batch = names(made.take())
        oldest = min(words.index(name) for name in batch)
        assert all(words.index(name) >= oldest for name in batch)
        assert oldest == min(words.index(name) for name in set(words) - set(order))
        order += batch
    assert sorted(order) == sorted(words)


def test_lost_batch_comes_first_and_at_once() -> None:
    made = filled("abc", most=2)
    batch = made.take()
    made.put_back(batch, 50.0)
    assert made.delay(50.0) == 0.0 and names(made.take()) == "ab" and names(made.take()) == "c"


def test_removed_picture_is_in_no_batch() -> None:
    made = queue()
    one, two = Waiting("a", SMALL), Waiting("b", SMALL)
    made.add(one, 0.0)
    made.add(two, 0.0)
    assert made.remove(one) and not made.remove(one)
    assert names(made.take()) == "b" and not made.remove(two)


@pytest.mark.parametrize(
    ("width", "height", "pictures"), [(32, 32, 8), (16, 16, 8), (32, 64, 4), (64, 64, 2), (96, 64, 1), (128, 128, 1), (36, 32, 7)]
)
def test_larger_pictures_share_a_batch_in_proportion_to_their_area(width: int, height: int, pictures: int) -> None:
    assert limit(Shape(width, height, 20, True), max_batch=8, own_pixels=32 * 32) == pictures
