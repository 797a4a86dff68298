"""A page in Debian's chromium, headless, with a deadline; tests that need it skip where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def browse(page: Path, *options: str) -> str:
    """What the browser prints for the page with these options; its profile lies beside the page."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
        f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


def run_in_page(page: Path, script: str) -> str:
    """The text that `script` returns once the page has run, or the first error of the page."""
    probe = page.with_name("probe.html")
    catch = '<script>var failed = ""; addEventListener("error", (e) => { failed = failed || e.message; });</script>'
    ask = (
        f'<script>addEventListener("load", () => {{ let said; try {{ said = (() => {{ {script} }})(); }} '
        'catch (e) { said = e; } const out = document.createElement("pre"); out.id = "said"; '
        "out.textContent = failed || said; document.body.replaceChildren(out); });</script>"
    )
    text = page.read_text(encoding="utf-8")
    probe.write_text(text.replace("<head>", f"<head>{catch}", 1).replace("</body>", f"{ask}</body>", 1), encoding="utf-8")
    dom = browse(probe, "--dump-dom")
    said = dom.split('<pre id="said">')[1].split("</pre>")[0]
    return said.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u00a0").replace("&amp;", "&")


def width_in_window(page: Path, window: int) -> int:
    """How many pixels wide the page makes itself in a window of `window`."""
    frame = page.with_name(f"window{window}.html")
    inside = page.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    ask = "document.title = document.getElementById('f').contentDocument.documentElement.scrollWidth"
    frame.write_text(
        f'<html><head></head><body><iframe id="f" style="width:{window}px;height:900px;border:0" srcdoc="{inside}"></iframe>'
        f'<script>addEventListener("load", () => {{ {ask}; }});</script></body></html>',
        encoding="utf-8",
    )
    return int(browse(frame, "--dump-dom").split("<title>")[1].split("</title>")[0])
