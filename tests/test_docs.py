"""Every command that README.md and docs/ show is one that its door takes; links lead somewhere; every drafter has a page."""

import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.door import data, frame, infer, train
from tests.doors import DOORS, ROOT, call

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STARTS = {
    "python train.py": "train",
    "torchrun": "train",
    "python -m data": "data",
    "python -m inference": "inference",
    "headstart infer": "inference",
}
WORDS = {"NAME": "tiny", "target=TARGET": "target=tiny", "[...]": "[mine]"}  # what a reader puts in the place of a word


def commands() -> Iterator[tuple[str, str]]:
    """(door, the command line behind it) of all lines of code in the pages."""
    for page in PAGES:
        inside = False
        for line in page.read_text().splitlines():
            if line.lstrip().startswith("```"):
                inside = not inside
            for start, door in STARTS.items():
                if inside and line.strip().startswith(start):
                    yield door, line.strip().partition("train.py" if door == "train" else start)[2]


@pytest.mark.parametrize(("door", "line"), sorted(set(commands())))
def test_a_command_of_the_documentation(door: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def composes(name: str, run: object, *_: object, **__: object) -> None:
        frame.enter(name, found.append)

    for module in (train, data, infer):
        monkeypatch.setattr(module, "enter", composes)
    for word, here in WORDS.items():
        line = re.sub(rf"(?<![\w./]){re.escape(word)}(?![\w./])", here, line)
    asked = [word for word in shlex.split(line, comments=True) if word != "..."]
    if "--help" in asked or asked == ["doctor"]:
        assert call(door, asked, tmp_path, monkeypatch) == 0
        return
    (tmp_path / "DIR").mkdir()
    code = call(door, asked, tmp_path, monkeypatch)
    assert code == 0 and (found or "--cfg" in asked)


def test_there_are_commands_to_try() -> None:
    assert len(set(commands())) > 30 and set(STARTS.values()) == set(DOORS)


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> list[set[str]]:
    """Where a link can lead to within a page, by its headings: on GitHub, and (for what is in docs/) on the page that MkDocs makes."""
    headings = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).lower() for line in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)]
    github = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    plain = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings]
    mkdocs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}
    return [github, mkdocs] if (ROOT / "docs") in page.parents else [github]


def broken(page: Path, text: str) -> list[str]:
    """The links in ``text``, which stands in ``page``, that lead nowhere."""
    found, drafters = list[str](), ROOT / "docs" / "drafters"
    made = {drafters / f"{name}.md" for name in ["index", *(path.stem for path in (ROOT / "conf" / "head").glob("*.yaml"))]}
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not (there.exists() or there in made) or (anchor and not all(anchor in known for known in anchors(there))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page, prose(page))


def test_links_that_lead_nowhere_are_found() -> None:
    wrong = ["nothing.md", "index.md", "docs/nothing/index.md", "docs/data.md#nothing", "#nothing", "docs/drafters/nothing.md"]
    right = [
        "docs/index.md",
        "docs/drafters/index.md",
        "docs/drafters/eagle.md",
        "docs/reports.md#reportjson",
        "#the-drafters",
        "https://x.y",
    ]
    assert broken(ROOT / "README.md", " ".join(f"[a]({link})" for link in [*wrong, *right])) == wrong


def test_every_drafter_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks  # type: ignore[import-not-found]

    measured = hooks._measured()
    for name in hooks.names():
        text = hooks.page(name, measured.get(name))
        assert text.startswith(f"# {name}\n") and f"python train.py head={name}" in text
        assert hooks.first_sentence(hooks.docstring(name)), f"heads/{name}.py says nothing of itself"
        assert ("Not measured yet" in text) == (name not in measured)
    sys.modules.pop("hooks", None)
