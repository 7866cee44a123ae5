"""Round-robin tournament: rounds of disjoint pairs, in which everyone meets a different partner each round."""

Pair = tuple[int, int]


def rounds(players: int, most: int) -> list[list[Pair]]:
    """At most `most` rounds, of players - 1 (players, for an odd number) in which everyone meets everyone once.

    The circle method: one player stays, the others move by one place each round. With an odd number of players, one of them
    pauses in each round."""
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    found = []
    for _ in range(min(most, len(seats) - 1)):
        opposite = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
