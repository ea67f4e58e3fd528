"""Headless Chromium: what a page looks like, and what a script finds in it."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

_AROUND = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark"><style>iframe { border: 0 }</style>
FRAMES<pre></pre>
<script>
const look = (document, window) => { SCRIPT };
window.onload = () => {
  const frames = [...document.querySelectorAll("iframe")];
  const found = frames.map((frame) => look(frame.contentDocument, frame.contentWindow));
  document.querySelector("pre").textContent = btoa(encodeURIComponent(JSON.stringify(found)));
};
</script>
"""


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def screenshot(browser: str, page: Path, picture: Path, *, width: int, height: int, dark: bool) -> None:
    """Take a picture of the top of a page, as PNG."""
    _run(browser, page, f"--window-size={width},{height}", f"--screenshot={picture}", dark=dark)


def measure(browser: str, page: Path, script: str, *, widths: list[int], dark: bool, folder: Path) -> dict[int, Any]:
    """Run a script on a page at several widths.

    Args:
        browser: from `find_browser`.
        page: its scripts, if it had any, would be kept from running by its own policy; this one runs outside it.
        script: body of a JavaScript function of (document, window) that returns something that JSON can say.
        widths: of the viewport, in CSS pixels.
        dark: which colours the reader prefers.
        folder: for a file.
    """
    content = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{content}"></iframe>' for width in widths)
    around = folder / "around.html"
    around.write_text(_AROUND.replace("SCRIPT", script).replace("FRAMES", frames), encoding="utf-8")
    dom = _run(browser, around, "--dump-dom", "--virtual-time-budget=5000", dark=dark)
    encoded = re.search(r"<pre>([A-Za-z0-9+/=]+)</pre>", dom)
    assert encoded is not None, dom[-500:]
    return dict(zip(widths, json.loads(unquote(base64.b64decode(encoded[1]).decode())), strict=True))


def _run(browser: str, page: Path, *options: str, dark: bool) -> str:
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",  # as root it does not start with one
                "--disable-gpu",
                "--hide-scrollbars",
                "--force-color-profile=srgb",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return ran.stdout
