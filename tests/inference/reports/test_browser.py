"""The pages in a real browser: nothing is asked for, nothing complains, everything fits, keys and screen readers find their way."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headstart.inference.reports.comparison_page import comparison_page
from headstart.inference.reports.evaluation import evaluation_page
from headstart.inference.reports.report_page import report_page
from tests.browser import CHROMIUM, DESK, MISSING, PHONE, Tab, browse
from tests.inference.reports.test_pages import ABOUT, CURVES
from tests.pages import HOSTILE, a_shown_report
from tests.reports import a_report, a_row, an_evaluation, some_batches

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
SURE = {"accepted_length": [3.0, 3.4], "speedup": [1.41, 1.83], "acceptance_by_depth": [[0.1, 0.9]] * 6}
BATCHES = [
    row | {"intervals": {"speedup": [row["speedup"] - 0.1, row["speedup"] + 0.1]}}
    for row in some_batches((1, 2, 3, 4, 15, 16, 128), (1.6, 1.5, 1.4, 1.2, 1.05, 1.01, 0.6), (1.0, 1.0, 0.99, 1.0, 0.99, 1.0, 0.99))
]
WORDS = ("def", " main", "(", ")", ":", "\n", "    ", "return", " x", " and a longer one", *HOSTILE)


@functools.cache
def pages() -> dict[str, str]:
    """A report with everything in it, a large one, a comparison of many, and one of texts that are no words."""
    changes: dict[str, Any] = {
        "temperature_0": a_report()["temperature_0"] | {"intervals": SURE}, "diagnosis": {"findings": [{"cause": "the mask"}]},
        "changed_settings": {"trainer.steps": {"value": 7, "default": 350}, "data.path": {"value": "x" * 300, "default": None}},
        "serving": [{"engine": "an engine", "needs": "newer", "language": "bash", "text": "serve " + "--long-option " * 20}],
        "c": 0.1, "v": 1.4, "predicted_speedup": 1.7, "batches": BATCHES,
    }  # fmt: skip
    rows = [a_row(f"{'arm' * (1 + i % 5)} {i}", i, parameters=1000, speedup_interval=[1.0, 1.9]) for i in range(17)]
    about = ABOUT | {"settings": {"head.name": {row["name"]: "x" for row in rows}}}
    return {
        "report": report_page(a_shown_report(words=WORDS, **changes), CURVES),
        "large": report_page(a_shown_report(prompts=40, tokens=220, words=WORDS), CURVES),
        "comparison": comparison_page(rows, {"lost": "no memory"}, about, {row["name"]: CURVES for row in rows}),
        "evaluation": evaluation_page(an_evaluation()),
        "hostile": report_page(a_shown_report(words=HOSTILE, head=HOSTILE[0], **changes)),
    }


def see(folder: Path, look: Callable[[Tab, dict[str, Path]], Awaitable[Any]]) -> Any:
    paths = {name: folder / f"{name}.html" for name in pages()}
    for name, path in paths.items():
        path.write_text(pages()[name], encoding="utf-8")
    return browse(lambda tab: look(tab, paths))


def test_they_load_alone_and_fit(tmp_path: Path) -> None:
    """No request but the file itself, no word in the console, no script of others, nothing wider than the screen: light, dark, on paper."""

    async def look(tab: Tab, paths: dict[str, Path]) -> None:
        for name, path in paths.items():
            for size, dark, paper in ((PHONE, False, False), (DESK, True, False), (DESK, False, True)):
                await tab.open(path, size, dark=dark, paper=paper)
                wide, high = await tab.run("[document.documentElement.scrollWidth, document.body.scrollHeight]")
                assert tab.complaints == [] and set(tab.asked) <= {path.as_uri(), "data:,"}, (name, tab.complaints, tab.asked)
                assert wide <= size[0] and high > 900, (name, size, wide)
                assert await tab.run("document.querySelectorAll('script').length") == 1
                picture = tmp_path / f"{name}.png"
                await tab.screenshot(picture, whole=False)
                assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
            assert (
                await tab.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") < 5000
            )  # a second, on a free machine

    see(tmp_path, look)


def test_letters_lie_over_no_others(tmp_path: Path) -> None:
    """In charts, by their boxes as they are drawn; nor are they too small for a phone."""
    boxes = """[...document.querySelectorAll('svg')].map(s => [...s.querySelectorAll('text')].map(t => {
        const b = t.getBoundingClientRect(); return [t.textContent, b.left, b.top, b.right, b.bottom, b.height] }))"""

    async def look(tab: Tab, paths: dict[str, Path]) -> None:
        for name in ("report", "comparison"):
            await tab.open(paths[name], PHONE)
            charts = await tab.run(boxes)
            assert len(charts) >= 2
            for texts in charts:
                for i, (a, left, top, right, bottom, high) in enumerate(texts):
                    assert high >= 9, (a, high)
                    for b, left_b, top_b, right_b, bottom_b, _ in texts[:i]:
                        across, along = min(right, right_b) - max(left, left_b), min(bottom, bottom_b) - max(top, top_b)
                        assert across < 1 or along < 4, f"{a!r} lies over {b!r} in {name}"

    see(tmp_path, look)


def test_rounds_are_told_to_keys_and_pointers(tmp_path: Path) -> None:
    async def look(tab: Tab, paths: dict[str, Path]) -> None:
        await tab.open(paths["report"])
        said = "document.querySelector('.said').textContent"
        rounds = await tab.run("[...document.querySelector('.text pre').querySelectorAll('.r')].map(r => r.dataset.said)")
        await tab.run("document.querySelector('.text pre').focus()")
        told = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"):
            await tab.press(key)
            told.append(rounds.index(await tab.run(said)))
        first = told[0]
        assert first in (0, 1) and told == [first, first + 1, first, len(rounds) - 1, len(rounds) - 1, 0, 0]
        press = (
            "(e => { document.querySelector('.text pre').dispatchEvent(e); return e.defaultPrevented })(new KeyboardEvent('keydown', %s))"
        )
        with_alt = await tab.run(press % "{ key: 'ArrowRight', altKey: true, cancelable: true }")
        assert not with_alt and await tab.run(said) == rounds[0], "Alt and an arrow goes back to the page before, as anywhere"
        assert await tab.run(press % "{ key: 'Home', cancelable: true }")
        middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        await tab.run("document.querySelectorAll('.text .r')[2].scrollIntoView({ block: 'center', behavior: 'instant' })")
        box = await tab.run(f"{middle}(document.querySelectorAll('.text .r')[2].querySelector('u').getClientRects()[0])")
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        assert await tab.run(said) == rounds[2]
        await tab.open(paths["report"])
        reached = []
        for _ in range(40):
            await tab.press("Tab")
            reached.append(await tab.run("document.activeElement.tagName"))
        assert reached[0] == "A" and {"DIV", "SUMMARY", "PRE"} <= {*reached}, "what scrolls, what unfolds and every text can be reached"
        await tab.run("dispatchEvent(new Event('beforeprint'))")
        assert await tab.run("[...document.querySelectorAll('details')].every(d => d.open)")

    see(tmp_path, look)


def test_axe_finds_nothing(tmp_path: Path) -> None:
    """Deque's axe-core, as axe-core-python brings it (MPL 2.0): WCAG 2 A and AA and best practices, in both schemes, all unfolded."""
    spec = find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core-python is not installed (make install)")
    axe = Path(spec.origin).with_name("axe.min.js").read_text(encoding="utf-8")

    async def look(tab: Tab, paths: dict[str, Path]) -> None:
        for name in ("report", "comparison", "hostile"):
            for size, dark in ((PHONE, False), (DESK, True)):
                await tab.open(paths[name], size, dark=dark)
                await tab.run("for (const d of document.querySelectorAll('details')) d.open = true")
                await tab.run(axe + "; 0")
                found = await tab.run("axe.run().then(r => r.violations.map(v => [v.id, v.help, v.nodes.slice(0, 3).map(n => n.html)]))")
                assert found == [], (name, size, found)

    see(tmp_path, look)
