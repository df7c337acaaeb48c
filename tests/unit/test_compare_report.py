"""The pages and charts of a comparison: one file that needs no other, readable in a browser of any width, light and
dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from comparisons import H100, comparison, registry_is_left_alone

from deep_gemm import backends
from deep_gemm.backends.report import Axis, Roofline, render
from deep_gemm.backends.results import Comparison

__all__ = ["registry_is_left_alone"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

MEASURE = """
function luminance(colour) {
  const rgb = colour.match(/[0-9.]+/g).slice(0, 3).map(x => x / 255);
  const linear = rgb.map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function measure(frame) {
  const page = frame.contentDocument, style = node => frame.contentWindow.getComputedStyle(node);
  const width = node => node.getBoundingClientRect().width;
  const all = query => [...page.querySelectorAll(query)], card = style(page.querySelector("section")).backgroundColor;
  return {
    title: page.title,
    overflow: page.documentElement.scrollWidth - frame.contentWindow.innerWidth,
    page: luminance(style(page.body).backgroundColor),
    text: Math.min(...all("p, td, h2, .value, .name").map(node => contrast(style(node).color, card))),
    bars: Math.min(...all(".track i").map(node => contrast(style(node).backgroundColor, card))),
    lengths: all("#speed .track i").map(node => width(node) / width(node.parentElement)),
    points: all(".point").map(node => node.getBoundingClientRect()).filter(box => box.width > 4).length,
    roofs: all(".roof").length,
    cut: all(".value, .name").filter(node => node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0).length,
  };
}
window.onload = () => {
  document.title = "measured";
  document.body.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
};
"""


def measured(page: str, directory: Path, scheme: str) -> list[dict[str, Any]]:
    """What a browser makes of a page at 1200 and at 390 pixels."""
    # Its policy forbids scripts, of which the measuring one is in the page around it.
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>' for width in (1200, 390)
    )
    path = directory / f"{scheme}.html"
    path.write_text(f"<!doctype html><body>{frames}<script>{MEASURE}</script></body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'profile'}", "--dump-dom"]
    options += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--virtual-time-budget=5000"]
    done = subprocess.run([BROWSER, *options, path.as_uri()], capture_output=True, text=True, timeout=120)  # type: ignore[list-item]
    body = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert body, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(body[1]))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the path")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme: str, tmp_path: Path) -> None:
    report = comparison()
    wide, narrow = measured(render(report), tmp_path, scheme)
    for found in (wide, narrow):
        assert found["title"] == "fp8_gemm_nt, mul_add: backends compared"
        assert found["overflow"] <= 0, "the page itself scrolls sideways"
        assert found["text"] >= 4.5
        assert found["bars"] >= 3
        assert (found["page"] > 0.5) == (scheme == "light")
        assert found["points"] == sum(row.timing is not None for row in report.results)
        assert found["roofs"] == 2
        assert found["cut"] == 0
        expected = []
        for case in report.cases:
            timed = [row for row in report.rows(*case) if row.timing]
            expected += [timed[0].us / row.us for row in timed]
        assert found["lengths"] == pytest.approx(expected, abs=0.02)


def test_a_comparison_can_be_read_again() -> None:
    found = comparison()
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_page_needs_no_other_file() -> None:
    page = render(comparison())
    assert not re.search(r"<script|<link|<img|<iframe|src=|href=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page


def test_what_others_say_is_text_and_no_markup() -> None:
    page = render(comparison(driver="<b>1</b>"))
    assert "RuntimeError: &lt;no&gt; kernel &amp; no image" in page
    assert "<b>1</b>" not in page


def test_the_page_says_what_was_found() -> None:
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", render(comparison())))
    for text in (
        "NVIDIA H100 80GB HBM3, flush mode",
        "cublaslt:tensorwise (an easier problem)",
        "By the spec sheet of H100 SXM: 3,350 GB/s",
        "fp8 1,979 TFLOP/s",
        "75% of the roof",
        "triton : 3 of 262144 elements are NaN or infinite, or were not written; 77 of 262144 elements are off by",
        "torch : it is not here",
        "driver 580.1",
    ):
        assert text in page, text


def test_a_report_of_the_host_draws_no_roof_and_says_so() -> None:
    found = backends.compare("mul_add", [(4, 16)], ["torch", "cublaslt"])
    page = render(found)
    assert "There was no GPU: the times are of the host's CPU, and say nothing of a GPU's." in page
    assert 'class="roof"' not in page
    assert "of the roof" not in page
    assert "The backend cublaslt has no mul_add" in page
    nothing = backends.compare("mul_add", [(4, 16)], ["cublaslt"])
    assert "<svg" not in render(nothing)
    assert Roofline.of(nothing) is None


def test_points_lie_below_their_roofs() -> None:
    plot = Roofline.of(comparison())
    assert plot is not None
    for x, y, row in plot.points:
        assert plot.x.start <= x <= plot.x.end
        assert plot.y.end < y <= plot.y.start
        assert row.timing
    (fp8, label, _, at), (_, other, _, lower) = plot.roofs
    assert (label, other) == ("fp8 1,979 TFLOP/s", "float32 66.9 TFLOP/s")
    assert at == plot.y.at(H100.tflops["fp8"]) < lower
    assert fp8.startswith(f"M{plot.x.start}")
    assert Axis.over([3.0, 50.0], 0, 100).ticks == [(0, "1"), (50, "10"), (100, "100")]
