"""The pages in a real browser: they are laid out at every width, in both colour schemes, and react to the pointer."""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from made_run import make_run

from lora_rl.track.report import write_comparison, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed; looked for {', '.join(BROWSERS)}")

# Looks at the page as a reader does and leaves what it saw as JSON in the document.
PROBE = """
<script>
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
addEventListener("load", () => {
  const box = (node) => node.getBoundingClientRect();
  const luminance = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const charts = [...document.querySelectorAll("svg[data-lines]")];
  seen.width = innerWidth;
  seen.overflow = document.documentElement.scrollWidth - innerWidth;
  seen.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.title = document.title;
  const cards = [...document.querySelectorAll(".charts:not(.big) .card:not(.wide)")];
  seen.columns = new Set(cards.map((card) => box(card).left)).size;
  seen.flat = [...document.querySelectorAll("svg")].filter((svg) => box(svg).width > 0 && box(svg).height < 60).length;
  seen.charts = charts.length;
  seen.outside = [...document.querySelectorAll("svg text")].filter((text) => {
    const [t, s] = [box(text), box(text.ownerSVGElement)];
    return t.width && (t.left < s.left - 1 || t.right > s.right + 1 || t.bottom > s.bottom + 1);
  }).map((text) => text.textContent);
  const held = [...document.querySelectorAll(".tile, figcaption, td, h1")];
  seen.spilt = held.filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.textContent);
  seen.small = Math.min(...charts.filter((c) => box(c).width).map((c) => box(c.querySelector("text")).height));
  const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
  seen.dark = luminance(card) < 0.2;
  const inks = [...document.querySelectorAll(".card b, .card .unit, svg .line:not(.faint)")].map((node) => {
    const style = getComputedStyle(node);
    return contrast(card, style.stroke === "none" ? style.color : style.stroke);
  });
  seen.contrast = Math.min(...inks);
  const [first] = charts;
  const place = box(first);
  const at = { clientX: place.left + place.width / 2, clientY: place.top + 20, bubbles: true };
  first.dispatchEvent(new PointerEvent("pointermove", at));
  seen.outputs = charts.map((c) => c.closest("figure").querySelector("output").textContent);
  seen.cursors = charts.filter((c) => c.querySelector(".cursor").style.visibility === "visible").length;
  first.dispatchEvent(new PointerEvent("pointerleave", at));
  seen.left = charts.map((c) => c.closest("figure").querySelector("output").textContent).join("");
  const result = document.body.appendChild(document.createElement("pre"));
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
});
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    first = make_run(folder / "a run with a name that is rather long for a heading", stale=True)
    second = make_run(folder / "second", seed=1)
    return {"report": write_report(first), "comparison": write_comparison([first, second], folder / "c.html")}


def browse(page: Path, work: Path, width: int, dark: bool) -> dict:
    """What the probe saw of a page in a frame of this width."""
    probed = work / "probed.html"
    text = page.read_text(encoding="utf-8")
    probed.write_text(text.replace("<main>", PROBE + "<main>", 1), encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={work / 'profile'}",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        probed.as_uri(),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # which a browser refuses to set up for root
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found.group(1)))


@pytest.mark.parametrize(
    ("name", "width", "dark", "columns"),
    [("report", 1280, False, 3), ("report", 500, True, 1), ("comparison", 1280, True, 3)],
)
def test_a_page_is_readable_and_reacts(pages, tmp_path: Path, name: str, width: int, dark: bool, columns: int):
    seen = browse(pages[name], tmp_path, width, dark)
    assert seen["errors"] == []
    assert seen["fetched"] == []
    assert "broken" not in seen["title"]
    assert seen["width"] == width
    assert seen["overflow"] <= 0
    assert seen["columns"] == columns
    assert (seen["flat"], seen["outside"], seen["spilt"]) == (0, [], [])
    assert seen["small"] >= 10, "the text of charts in pixels"
    assert seen["dark"] is dark
    assert seen["contrast"] >= 3, "as WCAG asks of graphics"
    assert seen["charts"] >= 9
    # Every chart over steps shows its own value at the place where the pointer is in one of them.
    assert seen["cursors"] >= seen["charts"] - 2
    assert re.match(r"step \d+: \S+", seen["outputs"][0])
    assert all(re.match(r"step \d+: ", text) for text in seen["outputs"] if text)
    assert seen["left"] == ""
