"""The interpreter's own standard library as text: a corpus that every machine already has.

It is split by top-level module, so a held-out file never has a sibling in training. The
target in `assets/` is trained on 'train'; everything measured with it is measured on 'heldout'.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# About 5 % of the text, of varied kind, without a backport among the packages of the shipped target.
HELD_OUT: tuple[str, ...] = (
    "argparse", "bisect", "calendar", "colorsys", "configparser", "csv", "fractions", "graphlib",
    "heapq", "ipaddress", "plistlib", "pprint", "queue", "sched", "secrets", "shelve", "shlex",
    "smtplib", "statistics", "textwrap", "tomllib", "uuid", "wave", "zipapp",
)  # fmt: skip

# Tests, other people's wheels, charmap tables and generated topics: text, but not source to learn from.
_SKIP_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "_bundled", "encodings", "pydoc_data", "__pycache__", "lib-dynload"}
)
_STARTS = re.compile(r"^(?:async def|def|class) ", re.MULTILINE)
_LINES = re.compile(r"^(?=\S)", re.MULTILINE)


def _read(path: Path) -> str | None:
    """The file's text, or None where it is empty or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8").strip() + "\n" if path.stat().st_size > 1 else None
    except UnicodeDecodeError:
        return None


def files(split: str) -> list[tuple[str, Path]]:
    """Sorted (module, path) of a split: 'train' or 'heldout'. The module is the top-level name."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split is 'train' or 'heldout', not {split!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        module = parts[0].removesuffix(".py")
        if _SKIP_FOLDERS.intersection(parts) or module.startswith(("_sysconfigdata", "config-")):
            continue
        if (module in HELD_OUT) == (split == "heldout") and _read(path) is not None:
            found.append((module, path))
    return found


def documents(split: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every file of a split; the name is the path below the library, with '/'."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for _, path in files(split):
        if text := _read(path):
            yield path.relative_to(root).as_posix(), text


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(docstring, source) of the top-level functions of a file that are documented and not long."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in body:
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if doc and 30 < len(doc) < 600 and (code := ast.get_source_segment(text, node)) and len(code) < 3000:
            yield doc, code


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= 40]


class CopyCheck:
    """Says whether a text is a near-copy of held-out text: too many of its long lines occur there."""

    def __init__(self, share: float = 0.3) -> None:
        self.share = share
        self.held = {line for _, text in documents("heldout") for line in _long_lines(text)}

    def __call__(self, text: str) -> bool:
        lines = _long_lines(text)
        return bool(lines) and sum(line in self.held for line in lines) > self.share * len(lines)


def prompts(count: int, seed: int, tokenizer: Any, tokens: int = 64) -> list[dict[str, str]]:
    """`count` held-out prompts of `tokens` tokens, modules in turn, each starting at a definition.

    A module that has run out of definitions goes on with other unindented lines. Deterministic by
    seed; fewer than `count` come back only when the held-out text is exhausted.
    """
    rng = random.Random(seed)
    texts = dict(documents("heldout"))
    starts: dict[str, list[tuple[str, int]]] = {}
    for pattern in (_LINES, _STARTS):  # taken from the end: definitions first
        for module in HELD_OUT:
            names = [name for name in texts if name.split("/")[0].removesuffix(".py") == module]
            places = [(name, match.start()) for name in names for match in pattern.finditer(texts[name])]
            rng.shuffle(places)
            starts[module] = starts.get(module, []) + places
    modules = list(HELD_OUT)
    rng.shuffle(modules)
    found: list[dict[str, str]] = []
    used: set[tuple[str, int]] = set()
    while len(found) < count and any(starts.values()):
        for module in modules:
            while starts[module] and len(found) < count:
                name, start = place = starts[module].pop()
                # 16 characters a token is more than any tokenizer needs on source text
                text = texts[name][start : start + 16 * tokens]
                ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
                if place in used or len(ids) < tokens:
                    continue
                used.add(place)
                line = texts[name].count("\n", 0, start) + 1
                found.append({"id": f"{name}:{line}", "text": tokenizer.decode(ids).rstrip("\ufffd")})
                break
    return found
