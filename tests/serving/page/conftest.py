from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import NoBrowser, chromium
from page_stand_in import Endpoint, endpoint
from playwright.sync_api import Browser, ConsoleMessage, Page

SLOW_MS = 15_000  # the machine may be busy

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a file. Playwright's event loop runs as long, and tests of other files run loops of their own."""
    try:
        with chromium() as started:
            yield started
    except NoBrowser as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def text() -> Iterator[Endpoint]:
    with endpoint() as made:
        yield made


@pytest.fixture
def open_page(browser: Browser, text: Endpoint) -> Iterator[Open]:
    """Opens the page of an endpoint in a context of its own. No script may fail, and no request may leave the endpoint."""
    contexts, faults = [], []

    def opened(at: Endpoint = text, paused: bool = False, **settings: Any) -> Page:
        """`paused`: timers of the page run only with `page.clock.run_for`."""
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SLOW_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if _unexpected(line) else None)
        page.on("request", lambda sent: faults.append(sent.url) if not sent.url.startswith((at.url, f"blob:{at.url}")) else None)
        if paused:
            # Before the page loads: a jump of the clock would also end the limits of requests that are on their way.
            page.clock.install(time=0)
            page.clock.pause_at(1000)
        page.goto(at.url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


def _unexpected(line: ConsoleMessage) -> bool:
    """True for errors such as violations of the policy. Chromium also logs fetches that failed, which the page handles."""
    return line.type == "error" and "Failed to load resource" not in line.text
