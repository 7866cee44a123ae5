"""Screenshots of the web page for docs/serving.md: the real gateway with scripted replicas, in Chromium.

PYTHONPATH=platform:serving:tests .venv/bin/python docs/draw_page.py
"""

import io
import re
from pathlib import Path

from browser import chromium
from page_stand_in import Endpoint, Script, endpoint
from PIL import Image
from playwright.sync_api import Browser, expect

FOLDER = Path(__file__).parent / "page"
SIZE = {"width": 1280, "height": 840}
MODELS = ("base", "tuned")
QUESTION = "What does a prefill engine do?"
ANSWER = (
    "It computes the KV cache of the prompt. A decode engine reads the blocks over NIXL and generates the tokens, "
    "so that long prompts do not delay running streams."
)
COLORS = 64  # a screenshot of text needs no more


def draw(browser: Browser, at: Endpoint, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport=SIZE)
    page = context.new_page()
    page.goto(at.url)
    expect(page.locator("select").first).to_have_value(MODELS[0])
    page.get_by_role("button", name="Compare two models").click()
    for _ in range(3):  # enough for lines in the figures
        page.get_by_role("button", name="New conversation").click()
        page.fill("#message", QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator("#stop")).to_be_enabled()
        expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#live")).to_contain_text(" 0 requests in progress")
    expect(page.locator("#ttft-line polyline")).to_have_attribute("points", re.compile(" "))
    page.locator("h1").click()  # no cursor in the picture
    shot = Image.open(io.BytesIO(page.screenshot()))
    FOLDER.mkdir(exist_ok=True)
    shot.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(FOLDER / f"{scheme}.png", optimize=True)
    context.close()


if __name__ == "__main__":
    with endpoint(MODELS, replicas=2) as served, chromium() as started:
        words = ANSWER.split(" ")
        served.scripts[QUESTION] = Script(parts=[f"{word} " for word in words], pause_s=0.08)
        for chosen in ("light", "dark"):
            draw(started, served, chosen)
