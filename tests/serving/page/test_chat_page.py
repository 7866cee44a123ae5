"""The chat of the page in a real Chromium, against the real gateway with stand-in replicas."""

import re
from pathlib import Path

import pytest
from page_stand_in import Endpoint, Script, endpoint
from playwright.sync_api import Browser, Locator, Page, expect

from .conftest import SLOW_MS, Open

pytestmark = pytest.mark.slow
expect.set_options(timeout=SLOW_MS)


def send(page: Page, message: str) -> None:
    expect(page.get_by_label("Model 1", exact=True).get_by_role("combobox")).to_have_value(re.compile("."))
    page.get_by_label("Message", exact=True).fill(message)
    page.keyboard.press("Enter")


def answers(page: Page, pane: int = 1) -> Locator:
    return page.locator(f".pane:nth-child({pane}) .answer .text:not(.reasoning)")


def facts(page: Page, pane: int = 1) -> dict[str, str]:
    turn = page.locator(f".pane:nth-child({pane}) .answer").last
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    names, values = turn.locator(".facts dt").all_inner_texts(), turn.locator(".facts dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def test_an_answer_streams_and_the_next_request_repeats_the_conversation(open_page: Open, text: Endpoint) -> None:
    script = text.scripts["first"] = Script(parts=["Grüß", " dich"], waits_at=1)
    page = open_page()
    page.get_by_text("Answers", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Max tokens").fill("99")
    send(page, "first")
    expect(answers(page)).to_have_text(["Grüß"])
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    assert page.get_by_label("Message", exact=True).input_value() == ""
    script.go.set()
    expect(answers(page)).to_have_text(["Grüß dich"])
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    send(page, "second")
    expect(answers(page)).to_have_text(["Grüß dich", "Hello there!"])
    assert text.asked[-1] == {
        "replica": "decode-0",
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "Grüß dich"},
            {"role": "user", "content": "second"},
        ],
        "temperature": 0.2,
        "max_tokens": 99,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_the_platform_did_is_beside_the_answer(open_page: Open, text: Endpoint) -> None:
    page = open_page()
    send(page, "explain yourself")
    expect(page.locator(".facts")).to_contain_text("KV moved")
    found = facts(page)
    assert found["Replica"] == "decode-0, chosen by least-busy"
    assert found["Prefill"] == "remote, the prompt is long, engine 5ed2179d, 42 ms"
    assert found["Cached tokens"] == "512 of 700 (decode 128, prefill 512)"
    assert found["KV moved"] == "3.0 MiB, 572 tokens" and found["Queue"].endswith("ms") and "Failover" not in found
    assert re.fullmatch(r"[\d.]+ m?s", found["TTFT"]) and re.fullmatch(r"p50 [\d.]+ m?s, max [\d.]+ m?s", found["ITL"])
    assert re.fullmatch(r"3, \d+ per second", found["Tokens"])


def test_output_of_a_model_is_never_markup(open_page: Open, text: Endpoint) -> None:
    hostile = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>&amp;\n<b>bold</b>'
    text.scripts["attack"] = Script(parts=[hostile[:20], hostile[20:]], reasoning="<i>hm</i>")
    page = open_page()
    send(page, "attack")
    expect(page.locator(".facts")).to_contain_text("KV moved")
    assert answers(page).text_content() == hostile and page.locator(".reasoning").text_content() == "<i>hm</i>"
    assert page.locator(".turns :is(img, script, b, i)").count() == 0 and page.evaluate("window.broken") is None
    send(page, "<u>own</u>")
    expect(page.locator(".user .text").last).to_have_text("<u>own</u>")


def test_the_browser_refuses_markup_and_foreign_requests(browser: Browser, text: Endpoint) -> None:
    """The policy holds even if a script of the page were careless."""
    page = browser.new_page()
    page.goto(text.url)
    page.evaluate("""() => {
      const seen = [];
      addEventListener('securitypolicyviolation', ({effectiveDirective}) => {
        seen.push(effectiveDirective);
        document.body.dataset.violated = seen.sort().join(' ');
      });
    }""")
    for script in (
        "document.body.innerHTML = '<p>'",
        "await fetch('http://127.0.0.1:9')",
        "new Image().src = 'http://127.0.0.1:9'",
    ):
        page.evaluate(f"async () => {{ try {{ {script} }} catch {{ }} }}")
    expect(page.locator("body")).to_have_attribute("data-violated", "connect-src img-src require-trusted-types-for")
    page.close()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_request_and_leaves_what_arrived(open_page: Open, text: Endpoint, by: str) -> None:
    script = text.scripts[f"stop by {by}"] = Script(waits_at=2)
    page = open_page()
    send(page, f"stop by {by}")
    expect(answers(page)).to_have_text(["Hello there"])
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".answer .note")).to_have_text("Stopped.")
    assert script.cancelled.wait(10), "the replica goes on"
    send(page, "go on")
    expect(answers(page)).to_have_text(["Hello there", "Hello there!"])
    assert text.asked[-1]["messages"][1] == {"role": "assistant", "content": "Hello there"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(status=400, error="'temperature' must be at most 2."), "'temperature' must be at most 2. Try again in 7 s."),
        (Script(status=429, error="Too many requests. Try again in 7 s."), "Too many requests. Try again in 7 s."),
        (Script(error="The replica was lost."), "The replica was lost."),
        (Script(cut=True), "The connection was lost before the answer was complete."),
    ],
)
def test_errors_are_in_words(open_page: Open, text: Endpoint, script: Script, words: str) -> None:
    text.scripts["fail"] = script
    page = open_page()
    send(page, "fail")
    expect(page.locator(".error")).to_have_text(words)
    expect(page.get_by_role("status").last).to_contain_text(words)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    send(page, "again")
    expect(answers(page).last).to_have_text("Hello there!")
    repeated = [message["content"] for message in text.asked[-1]["messages"]]
    assert repeated == (["again"] if script.status != 200 else ["fail", "Hello there!", "again"])


def test_the_limit_of_tokens_is_named(open_page: Open, text: Endpoint) -> None:
    text.scripts["long"] = Script(finish="length")
    page = open_page()
    send(page, "long")
    expect(page.locator(".answer .note")).to_have_text("Ended at the limit of tokens.")


def test_two_models_answer_the_same_message(open_page: Open, text: Endpoint) -> None:
    page = open_page()
    send(page, "before")
    expect(answers(page)).to_have_text(["Hello there!"])
    compare = page.get_by_role("button", name="Compare two models")
    compare.click()
    expect(compare).to_have_attribute("aria-pressed", "true")
    chosen = [page.get_by_label(f"Model {pane}", exact=True).get_by_role("combobox").input_value() for pane in (1, 2)]
    assert chosen == ["tiny", "tuned"] and answers(page, 2).all_inner_texts() == ["Hello there!"]
    assert page.locator(".pane:nth-child(2) .answer h3").all_inner_texts() == ["tiny"], "the model that gave the answer"
    first = len(text.asked)
    text.scripts["both"] = Script(parts=["same"])
    send(page, "both")
    for pane in (1, 2):
        expect(answers(page, pane).last).to_have_text("same")
        assert facts(page, pane)["KV moved"]
    one, other = sorted(text.asked[first:], key=lambda asked: asked["model"])
    assert (one["model"], other["model"]) == ("tiny", "tuned") and one["messages"] == other["messages"]
    assert len(one["messages"]) == 3
    compare.click()
    expect(page.locator(".pane")).to_have_count(1)


def test_new_conversation_forgets_the_old_one(open_page: Open, text: Endpoint) -> None:
    script = text.scripts["forget me"] = Script(waits_at=1)
    page = open_page()
    send(page, "forget me")
    expect(answers(page)).to_have_text(["Hello"])
    page.get_by_role("button", name="New conversation").click()
    assert script.cancelled.wait(10)
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "anew")
    expect(answers(page)).to_have_text(["Hello there!"])
    assert [message["content"] for message in text.asked[-1]["messages"]] == ["anew"]


def test_the_key_is_asked_for_sent_and_stored_only_if_wished(open_page: Open, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with endpoint(keys=keys) as made:
        page = open_page(made, paused=True)
        expect(page.locator("#summary")).to_contain_text("needs a valid API key")
        field = page.get_by_label("API key")
        expect(field).to_be_visible()
        page.get_by_text("Access", exact=True).click()
        with page.expect_response("**/-/state"):
            page.clock.run_for(2000)
        expect(field).to_be_hidden()  # it opens once, not at every look
        page.get_by_text("Access", exact=True).click()
        field.fill("secret")
        field.press("Tab")
        expect(page.locator("#summary")).to_have_text("tiny, tuned · text")
        send(page, "hello")
        expect(answers(page)).to_have_text(["Hello there!"])
        stored = "() => JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie])"
        assert "secret" not in page.evaluate(stored)
        page.reload()
        expect(page.locator("#summary")).to_contain_text("needs a valid API key")
        field.fill("secret")
        page.get_by_label("Store the key in this browser").check()
        page.reload()
        expect(page.locator("#summary")).to_have_text("tiny, tuned · text")
        page.get_by_text("Access", exact=True).click()
        page.get_by_label("Store the key in this browser").uncheck()
        assert "secret" not in page.evaluate(stored)


def test_failover_is_shown(open_page: Open) -> None:
    with endpoint(replicas=2) as made:
        made.scripts["die"] = Script(dies_at=2)
        page = open_page(made)
        send(page, "die")
        expect(answers(page)).to_have_text(["Hello there!"])
        found = facts(page)
        first, second = (asked["replica"] for asked in made.asked)
        assert first != second and found["Replica"] == f"{second}, chosen by least-busy"
        assert found["Failover"] == f"continued on {second} after 2 tokens"


def test_an_endpoint_that_is_gone_is_named(open_page: Open) -> None:
    with endpoint() as made:
        page = open_page(made)
        send(page, "hello")
        expect(answers(page)).to_have_text(["Hello there!"])
        page.route("**/v1/chat/completions", lambda route: route.abort())
        send(page, "again")
        expect(page.locator(".error")).to_have_text(re.compile("The endpoint cannot be reached"))
        page.unroute("**/v1/chat/completions")
