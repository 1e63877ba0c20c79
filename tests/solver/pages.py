"""What tests ask of a page: its elements and words, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page with")


class Page(HTMLParser):
    """Elements of a page, and the exact values of its cells by name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: dict[str, list[float]] = {}
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        name, value = given.get("data-name"), given.get("data-value")
        if name is not None and value is not None:
            self.values.setdefault(name, []).append(float(value))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def asks_for_nothing(text: str) -> bool:
    """Whether a page names no address but its own parts."""
    return not re.search(r"(?:src|href)=\"(?!#|data:)", text) and not re.search(r"@import|url\((?!#)", text)


def opened(text: str, folder: Path, width: int = 500) -> tuple[str, str]:
    """The document after its script ran, and what the browser logged of the page."""
    path = folder / "page.html"
    path.write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    flags += ["--enable-logging=stderr", f"--window-size={width},900", "--dump-dom", path.as_uri()]
    done = subprocess.run([str(CHROMIUM), *flags], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def driven(text: str, script: str, folder: Path, width: int = 500) -> Any:
    """What `seen` holds after a script ran in the page, and `errors`, those of the page and the script.

    A copy of the page without its content security policy runs the script after its own.
    """
    harness = (
        "<script>const errors = [], seen = {};"
        'window.addEventListener("error", (event) => errors.push(event.message));</script>'
        f"<script>{script}</script>"
        "<script>document.body.dataset.seen = JSON.stringify({ errors, ...seen });</script></body>"
    )
    open_to_tests = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    shown, logged = opened(open_to_tests.replace("</body>", harness), folder, width)
    assert logged == ""
    return json.loads(Page(shown).all("body")[0]["data-seen"] or "")
