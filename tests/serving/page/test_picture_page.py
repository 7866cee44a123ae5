"""The form for pictures in a real Chromium."""

from collections.abc import Iterator

import pytest
from page_stand_in import Endpoint, Script, endpoint
from playwright.sync_api import Page, expect

from .conftest import SLOW_MS, Open

pytestmark = pytest.mark.slow
expect.set_options(timeout=SLOW_MS)


@pytest.fixture(scope="module")
def painter() -> Iterator[Endpoint]:
    with endpoint(("painter",), pictures=True) as made:
        yield made


def draw(page: Page, prompt: str) -> None:
    expect(page.locator("#picture-model")).to_have_value("painter")
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Generate").click()


def test_pictures_appear_while_they_are_made(open_page: Open, painter: Endpoint) -> None:
    script = painter.scripts["a red circle"] = Script(waits_at=3)
    page = open_page(painter)
    expect(page.locator("#summary")).to_have_text("painter · pictures")
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#ttft-figure")).to_be_hidden()
    page.get_by_role("spinbutton", name="Pictures").fill("2")
    page.get_by_label("Steps").fill("4")
    draw(page, "a red circle")
    images = page.locator("#gallery img")
    expect(images).to_have_count(2)
    expect(images.first).to_have_attribute("alt", "a red circle, picture 1, not finished")
    assert page.locator("progress").evaluate("(bar) => bar.value") == 0.5
    script.go.set()
    expect(images.first).to_have_attribute("alt", "a red circle, picture 1")
    for at in (0, 1):
        expect(images.nth(at)).to_have_js_property("naturalWidth", 24)
    expect(page.locator("progress")).to_have_count(0)
    expect(page.get_by_role("status").last).to_contain_text("2 pictures made.")
    facts = page.locator(".facts").inner_text()
    assert "pictures-0" in facts and "7, 8" in facts and "Step, mean" in facts
    asked = painter.asked[-1]
    assert (asked["n"], asked["steps"], asked["size"], asked["stream"], asked["progress"]) == (2, 4, "auto", True, True)
    assert "seed" not in asked


def test_stop_ends_the_pictures(open_page: Open, painter: Endpoint) -> None:
    script = painter.scripts["stop"] = Script(waits_at=2)
    page = open_page(painter)
    draw(page, "stop")
    expect(page.locator("progress")).to_have_js_property("value", 0.25)
    page.get_by_role("button", name="Stop").last.click()
    expect(page.locator("#gallery .note")).to_have_text("Stopped.")
    assert script.cancelled.wait(10)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(error="<b>The workers failed.</b>"), "<b>The workers failed.</b>"),
        (Script(status=400, error="'size': too large."), "'size': too large. Try again in 7 s."),
    ],
)
def test_errors_of_pictures_are_in_words(open_page: Open, painter: Endpoint, script: Script, words: str) -> None:
    painter.scripts["fail"] = script
    page = open_page(painter)
    draw(page, "fail")
    expect(page.locator("#gallery .error")).to_have_text(words)
