"""Accessibility of the page, the live state beside it, and its modules, in a real Chromium."""

import re

import pytest
from page_stand_in import Endpoint, Script, endpoint
from playwright.sync_api import Page, expect

from .conftest import SLOW_MS, Open
from .test_chat_page import answers, send

pytestmark = pytest.mark.slow
expect.set_options(timeout=SLOW_MS)

# Every text that is visible, its color and the first opaque background below it.
COLORS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const backdrop = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(color) && color !== 'transparent') return color;
    }
    return 'none';
  };
  const note = (element, text, color) => {
    const box = element.getBoundingClientRect();
    if (text.trim() && box.width > 1 && box.height > 1) found.push([text.trim(), color, backdrop(element)]);
  };
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    note(parent, walker.currentNode.data, getComputedStyle(parent).color);
  }
  for (const field of document.querySelectorAll('input, textarea, select')) {
    note(field, field.value || 'empty', getComputedStyle(field).color);
    if (field.placeholder) note(field, field.placeholder, getComputedStyle(field, '::placeholder').color);
  }
  return found;
}"""


def luminance(color: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def busy(page: Page, text: Endpoint) -> None:
    """Brings every kind of text onto the page."""
    text.scripts["fail"] = Script(error="Something failed.", reasoning="First a thought.")
    text.scripts["hold"] = Script(waits_at=1)
    for details in ("Access", "Answers"):
        page.get_by_text(details, exact=True).click()
    page.get_by_role("button", name="Compare two models").click()
    send(page, "fail")
    expect(page.locator(".error")).to_have_count(2)
    send(page, "hold")
    expect(answers(page).last).to_have_text("Hello")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_at_least_four_and_a_half(open_page: Open, text: Endpoint, scheme: str) -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    page = open_page(color_scheme=scheme)
    busy(page, text)
    found = page.evaluate(COLORS)
    shown = {words for words, _, _ in found}
    assert {"Something failed.", "First a thought.", "Send", "Stop", "You", "Prefill", "Platform", "hold"} < shown
    for words, color, ground in found:
        assert contrast(color, ground) >= 4.5, (words, color, ground)
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    # Borders of fields, the ring of the focus and the lines of the figures need a contrast of 3.
    for selector, style in (("#message", "borderTopColor"), ("#message", "outlineColor"), (".spark polyline", "stroke")):
        page.focus("#message")
        assert contrast(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{style}"), ground) >= 3, selector


def test_landmarks_labels_and_order_of_the_focus(open_page: Open, text: Endpoint) -> None:
    page = open_page()
    expect(page.locator("#summary")).to_have_text("tiny, tuned · text")
    for role in ("banner", "main", "complementary"):
        assert page.get_by_role(role).count() == 1, role
    assert page.locator("html").get_attribute("lang") == "en" and page.get_by_role("heading", level=1).inner_text() == "Strata"
    unnamed = """() => [...document.querySelectorAll('input, textarea, select, button, progress')]
      .filter((each) => !(each.labels?.length || each.textContent.trim() || each.ariaLabel)).map((each) => each.outerHTML)"""
    assert page.evaluate(unnamed) == []
    order = []
    for _ in range(10):
        page.keyboard.press("Tab")
        at = "document.activeElement"
        order.append(page.evaluate(f"({at}.textContent || {at}.ariaLabel || {at}.id).trim().split('\\n')[0]"))
        style, width = (page.evaluate(f"getComputedStyle({at}).outline{part}") for part in ("Style", "Width"))
        assert style != "none" and float(width.removesuffix("px")) >= 2, order[-1]
    named = ["Skip to the message", "Access", "Answers", "tinytuned", "Conversation with model 1", "message", "Send"]
    assert order == [*named, "Compare two models", "New conversation", "Replicas"], "Stop is disabled"
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("typed")
    assert page.get_by_label("Message", exact=True).input_value() == "typed"


def test_a_long_answer_is_announced_twice_and_not_token_by_token(open_page: Open, text: Endpoint) -> None:
    text.scripts["novel"] = Script(parts=[f"word{number} " for number in range(80)], pause_s=0.001)
    page = open_page()
    page.evaluate("""() => {
      window.announced = [];
      const region = document.getElementById('announcement');
      new MutationObserver((changes) => {
        for (const change of changes) announced.push(...[...change.addedNodes].map((node) => node.textContent));
      }).observe(region, {childList: true, characterData: true, subtree: true});
      const regions = document.querySelectorAll('[aria-live], [role=status], [role=log], [role=alert], output');
      window.live = [...regions].map((each) => each.id);
    }""")
    send(page, "novel")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(answers(page)).to_contain_text("word79")
    announced = page.evaluate("announced")
    assert announced[0] == "tiny is answering." and len(announced) == 2
    assert announced[1].startswith("tiny: word0 word1 ") and announced[1].endswith("word79 ")
    assert page.evaluate("live") == ["announcement"], "figures that change every two seconds are not announced"


def test_shift_enter_starts_a_line_and_an_empty_message_is_not_sent(open_page: Open, text: Endpoint) -> None:
    page = open_page()
    first = len(text.asked)
    message = page.get_by_label("Message", exact=True)
    message.fill("   ")
    message.press("Enter")
    message.fill("one")
    message.press("Shift+Enter")
    page.keyboard.type("two")
    assert len(text.asked) == first and message.input_value() == "one\ntwo"
    message.press("Enter")
    expect(answers(page)).to_have_text(["Hello there!"])
    assert text.asked[-1]["messages"][-1]["content"] == "one\ntwo"


@pytest.mark.parametrize("width", [320, 700, 1400])
def test_nothing_is_cut_off_on_narrow_screens(open_page: Open, text: Endpoint, width: int) -> None:
    text.scripts["wide"] = Script(parts=["x" * 500])
    page = open_page(viewport={"width": width, "height": 800})
    page.get_by_role("button", name="Compare two models").click()
    send(page, "wide")
    expect(answers(page, 2)).to_have_text(["x" * 500])
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    first, second = (page.locator(".pane").nth(at).bounding_box() for at in (0, 1))
    assert first and second and (second["y"] > first["y"]) == (width < 704), "panes are below each other on narrow screens only"


@pytest.mark.parametrize(("motion", "animated"), [("reduce", False), ("no-preference", True)])
def test_motion_is_reduced_if_wished(open_page: Open, text: Endpoint, motion: str, animated: bool) -> None:
    text.scripts["blink"] = Script(waits_at=1)
    page = open_page(reduced_motion=motion)
    send(page, "blink")
    expect(answers(page)).to_have_text(["Hello"])
    name = page.evaluate("getComputedStyle(document.querySelector('.waiting'), '::after').animationName")
    assert (name == "blink") == animated


def test_the_state_is_live(open_page: Open) -> None:
    with endpoint(replicas=2) as made:
        script = made.scripts["watch"] = Script(waits_at=2)
        page = open_page(made, paused=True)
        rows, live, rate = page.locator("#replicas tr"), page.locator("#live"), page.locator("#rate")
        page.clock.run_for(2000)
        expect(rows).to_have_count(3)
        assert rows.nth(0).locator("th, td").all_inner_texts()[:2] == ["decode-0", "decode"]
        assert rows.nth(2).locator("th, td").all_inner_texts() == ["prefill-0", "prefill", "0", "0", "2", "25%"]
        expect(live).to_have_text(re.compile("^3 of 3 replicas healthy, 1 gateway, 0 requests in progress, 0 waiting"))
        send(page, "watch")
        expect(answers(page)).to_have_text(["Hello there"])
        page.clock.run_for(2000)
        expect(live).to_contain_text("1 requests in progress")
        expect(rate).to_have_text("1.0")
        expect(page.locator("#ttft")).to_have_text(re.compile(r"^\d+ ms$"))
        script.go.set()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.clock.run_for(2000)
        expect(live).to_contain_text("0 requests in progress")
        expect(rate).to_have_text("0.5")
        points = page.locator("#rate-line polyline").get_attribute("points") or ""
        assert points.split()[-2:] == ["118.0,2.0", "120.0,16.0"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_from_any_chunks(open_page: Open, size: int) -> None:
    """Characters, line ends and events may be split anywhere."""
    stream = (
        ': first\n\ndata: {"ä": "🙂"}\r\n\r\ndata:a\rdata: b\r\rid: 3\nevent: x\n\ndata: [DONE]\n\n: last {"x": 1}\n\ndata: cut'
    )
    read = """async ([text, size]) => {
      const {readEvents} = await import('/page/events.js');
      const bytes = new TextEncoder().encode(text);
      const stream = new ReadableStream({start(to) {
        for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
        to.close();
      }});
      const found = [];
      for await (const {data, comment} of readEvents(stream)) found.push(data ?? `#${comment}`);
      return found;
    }"""
    assert open_page().evaluate(read, [stream, size]) == ["#first", '{"ä": "🙂"}', "a\nb", "[DONE]", '#last {"x": 1}']


def test_facts_are_computed_from_what_is_known(open_page: Open) -> None:
    page = open_page()
    compute = """async ({ticks, headers, usage, explained}) => {
      const {Clock, facts} = await import('/page/facts.js');
      const clock = new Clock(100);
      for (const at of ticks) clock.tick(at);
      return Object.fromEntries(facts({clock, headers: new Headers(headers), usage, explained}));
    }"""

    def facts(**known: object) -> dict[str, str]:
        return page.evaluate(compute, {"ticks": [], "headers": {}, "usage": None, "explained": None} | known)

    assert facts() == {}
    timed = facts(ticks=[150, 160, 165, 2165], usage={"completion_tokens": 4})
    assert timed == {"TTFT": "50 ms", "ITL": "p50 10 ms, max 2.00 s", "Tokens": "4, 2 per second"}
    headers = {
        "x-strata-prefill": "local; reason=short",
        "x-strata-replica": "d-7; cached=512; reason=prefix",
        "x-strata-waited": "12.3; reason=no-engine",
    }
    usage = {"prompt_tokens": 600, "prompt_tokens_details": {"cached_tokens": 512}}
    assert facts(headers=headers, usage=usage) == {
        **{"Replica": "d-7, chosen by prefix", "Prefill": "local, the prompt is short"},
        **{"Cached tokens": "512 of 600", "Waited": "12.3 s for an engine"},
    }
    explained = {
        "prefill": {"where": "local", "reason": "new-one"},
        "cached_tokens": {"decode": 0, "prefill": 0},
        "moved_tokens": 0,
    }
    again = [{"name": "a", "after": 0}, {"name": "b", "after": 0}, {"name": "c", "after": 3}]
    found = facts(explained=explained | {"prompt_tokens": 9, "replicas": again})
    assert found == {
        **{"Replica": "c", "Prefill": "local, new-one", "Cached tokens": "0 of 9 (decode 0, prefill 0)", "KV moved": "none"},
        "Failover": "sent again to b; continued on c after 3 tokens",
    }
    unknown = facts(explained={"moved_tokens": 5, "moved_bytes": None})
    assert unknown == {"KV moved": "5 tokens"}


def test_lines_end_at_the_right_and_start_at_zero(open_page: Open) -> None:
    draw = "async (values) => (await import('/page/live.js')).polyline(values)"
    page = open_page()
    assert page.evaluate(draw, [5]) == "120.0,2.0"
    assert page.evaluate(draw, [0, 4, 2]).split(" ") == ["115.9,30.0", "118.0,2.0", "120.0,16.0"]
    full = page.evaluate(draw, [0] * 60).split(" ")
    assert full[0] == "0.0,30.0" and full[-1] == "120.0,30.0"
