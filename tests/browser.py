"""A real Chromium, driven by Playwright: Debian's or the system's, or the build that Playwright has fetched."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = (str(Path(sys.prefix) / "bin/chromium-headless-shell"), "chromium-headless-shell", "chromium", "google-chrome")


class NoBrowser(Exception):
    pass


@contextmanager
def chromium() -> Iterator[Browser]:
    """Raises NoBrowser where none is installed; `platform/setup/chromium` installs one."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if found is None:
            raise NoBrowser("no Chromium is installed: run 'platform/setup/chromium .venv'")
        browser = playwright.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()
