"""The pictures of docs/concepts.md: `python docs/pictures.py` writes docs/pictures/*.svg. Readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

PLACE = Path(__file__).parent / "pictures"
TARGET, DRAFTER, KEPT, PALE = "#4c6fb3", "#c9722b", "#3d8f5f", "#8a8f98"


def svg(name: str, width: int, height: int, title: str, parts: Iterable[str]) -> None:
    """Write one picture; ``title`` is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    style = 'font-family="system-ui, sans-serif" font-size="14"'
    body = "\n".join(parts)
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    PLACE.mkdir(exist_ok=True)
    (PLACE / f"{name}.svg").write_text(f"{head} {style}>\n<title>{escape(title)}</title>\n{ground}\n{body}\n</svg>\n")


def box(x: float, y: float, text: str, colour: str, *, filled: bool = True, width: float = 62, dashed: bool = False) -> str:
    fill, ink = (colour, "#ffffff") if filled else ("none", colour)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="32" rx="6" fill="{fill}" stroke="{colour}" stroke-width="1.5"{dash}/>'
        f'<text x="{x + width / 2}" y="{y + 21}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str = PALE) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}" stroke-width="1.5"/>'


def note(x: float, y: float, text: str, colour: str = "#333333", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


def root() -> None:
    """A root, what is known there, and what each depth guesses."""
    parts = []
    for t in range(7):
        colour, filled = (TARGET, True) if t <= 2 else (KEPT, True) if t == 3 else (DRAFTER, False)
        parts.append(box(20 + 76 * t, 60, f"x[{t}]", colour, filled=filled, dashed=t > 3))
    parts += [note(20, 42, "read by the target: its states are known", TARGET), note(248, 116, "its choice", KEPT)]
    parts += [note(324, 42, "depth 1", DRAFTER), note(400, 42, "depth 2", DRAFTER), note(476, 42, "depth 3", DRAFTER)]
    parts += [line(203, 92, 203, 122, TARGET), note(172, 140, "root t = 2", TARGET)]
    svg("root", 570, 156, "Root t = 2: the target has read x[0] to x[2] and chosen x[3]; depth d guesses x[3 + d]", parts)


def visibility() -> None:
    """What the rows of the unroll may see, six roots and depths 1 to 3."""
    roots, depths, cell = 6, 3, 24
    parts, left, top = [], 150, 50
    for depth in range(depths):
        for row in range(roots):
            y = top + (depth * roots + row) * cell
            for block in range(depth + 1):
                for column in range(roots):
                    sees = column <= row if block == 0 else column == row
                    x = left + (block * roots + column) * cell + 10 * block
                    colour = (TARGET if block == 0 else DRAFTER) if sees else "#eceef1"
                    parts.append(f'<rect x="{x}" y="{y + 10 * depth}" width="{cell - 3}" height="{cell - 3}" rx="3" fill="{colour}"/>')
        parts.append(
            note(left - 12, top + depth * (roots * cell + 10) + roots * cell / 2 + 5, f"depth {depth + 1}, root 0..5", anchor="end")
        )
    for block, text in enumerate(("roots 0..5", "their depth 1", "their depth 2")):
        parts.append(note(left + (block * roots + 3) * cell + 10 * block, 34, text, TARGET if block == 0 else DRAFTER, "middle"))
    title = "Depth 1 sees a causal triangle of roots; depth 2 also its own depth 1, a diagonal; depth 3 two diagonals"
    svg("visibility", left + 3 * roots * cell + 40, top + depths * (roots * cell + 10) + 10, title, parts)


def tree() -> None:
    """A tree of guesses, and the path that the target keeps."""
    nodes = {
        "root": (20, 100, "x[t+1]", KEPT),
        "a": (150, 40, "self", KEPT), "b": (150, 100, "x", DRAFTER), "c": (150, 160, "*", DRAFTER),
        "d": (280, 20, ".", KEPT), "e": (280, 70, ",", DRAFTER), "f": (280, 120, ")", DRAFTER),
        "g": (410, 0, "name", DRAFTER),
    }  # fmt: skip
    edges = [("root", "a"), ("root", "b"), ("root", "c"), ("a", "d"), ("a", "e"), ("b", "f"), ("d", "g")]
    parts = []
    for one, other in edges:
        (x, y, _, _), (to_x, to_y, _, colour) = nodes[one], nodes[other]
        parts.append(line(x + 62, y + 31, to_x, to_y + 31, colour if colour == KEPT else PALE))
    parts += [box(x, y + 15, text, colour, filled=colour == KEPT, dashed=colour != KEPT) for x, y, text, colour in nodes.values()]
    parts += [note(500, 75, "the target reads all of it in one pass:", "#333333"), note(500, 97, "kept: self .", KEPT)]
    parts += [note(500, 119, "then its own next token", TARGET), note(500, 141, "three tokens, one pass")]
    svg("tree", 770, 215, "A tree of seven guesses; the target keeps the path self, dot, and adds its own next token", parts)


if __name__ == "__main__":
    root()
    visibility()
    tree()
