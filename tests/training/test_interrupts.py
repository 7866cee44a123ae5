import os
import signal

import pytest

from strata.training.interrupts import caught


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_and_second_ends(number: int) -> None:
    asked: list[bool] = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), caught() as interrupts:
        interrupts.ask = lambda: asked.append(True)
        os.kill(os.getpid(), number)
        assert asked == [True] and interrupts.asked
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_ends_at_once_before_workers_run() -> None:
    with pytest.raises(KeyboardInterrupt), caught():
        os.kill(os.getpid(), signal.SIGTERM)
