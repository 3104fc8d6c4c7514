"""An HTML page as a parser sees it, and reports with content that is hard to show."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from headstart.inference.reports.report import Report, Round, Text
from tests.reports import a_report

VOID = {"meta", "link", "br", "img", "input", "hr", "circle", "line", "polyline", "polygon", "rect", "path"}
HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "-->", "<!--", "]]>", "\x00\x1b\u2028", "\ud800",
    "&lt;b&gt;", "{0}{x}", "' onmouseover='alert(1)",
    '"><svg onload=alert(1)>', "</pre></figure></main>", "javascript:alert(1)", "\u202eevil", " \n\t\r", "{{7*7}}", "",
)  # fmt: skip


class Element:
    """An element of a page: its name, attributes and all text inside."""

    def __init__(self, name: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.name, self.attributes, self.parent, self.text = name, attributes, parent, ""
        self.children: list[Element] = []

    def all(self, name: str = "", **wanted: str) -> list[Element]:
        """The elements inside with this name and these attributes, in document order."""
        found = []
        for child in self.children:
            fits = not name or child.name == name
            fits = fits and all(
                value in child.attributes.get(key.strip("_").replace("_", "-"), "").split(" ") for key, value in wanted.items()
            )
            found += [*([child] if fits else []), *child.all(name, **wanted)]
        return found


class Page(HTMLParser):
    """What a browser makes of a text. ``wrong``: tags that are not closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.here = Element("", {}, None)
        self.wrong: list[str] = []
        self.feed(text)
        self.close()
        if self.here is not self.root:
            self.wrong.append(f"{self.here.name} is never closed")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs}, self.here)
        self.here.children.append(element)
        if tag not in VOID:
            self.here = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.here.children.append(Element(tag, {key: value or "" for key, value in attrs}, self.here))

    def handle_endtag(self, tag: str) -> None:
        if self.here.name != tag or self.here.parent is None:
            self.wrong.append(f"</{tag}> in {self.here.name}")
            return
        self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        element: Element | None = self.here
        while element is not None:
            element.text += data
            element = element.parent


def a_shown_report(prompts: int = 3, tokens: int = 24, words: Any = HOSTILE, **changes: Any) -> Report:
    """A report with texts that have rounds of every kind: all guesses accepted, some, none, nothing guessed; trees and chains."""
    spelling = {i: words[i % len(words)] for i in range(40)}
    texts = []
    for prompt in range(prompts):
        for temperature in (0, 1):
            said, rounds = [prompt % 40], list[Round]()
            while len(said) < tokens:
                kind, start = len(rounds) % 4, len(said)
                if kind == 0:  # a chain of three guesses, two of them accepted
                    added = [(start + k) % 40 for k in range(3)]
                    rounds.append(Round(added, [added[0], added[1], 39], [-1, 0, 1], [0, 1], [0.9, 0.5, 0.004]))
                elif kind == 1:  # a tree, no guess accepted
                    rounds.append(Round([start % 40], [7, 8, 9], [-1, -1, 0], [], [0.3, 0.4, None]))
                elif kind == 2:
                    rounds.append(Round([start % 40], [], [], []))
                else:  # every guess accepted, probabilities unknown
                    added = [(start + k) % 40 for k in range(2)]
                    rounds.append(Round(added, added[:1], [-1], [0]))
                said += rounds[-1].tokens
            texts.append(Text(prompt, temperature, "tree", said, rounds, [0.5] * len(said)))
    from dataclasses import replace

    asked = [[i % 40 for i in range(30)]] * prompts
    return replace(Report.of(a_report(**changes)), texts=texts, asked=asked, spelling=spelling)
