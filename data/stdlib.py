"""A source of the interpreter's own standard library as text: a corpus that every machine already has.

It is split by top-level module, so that no module is both in training and held out. The target in `assets/` is trained on the split
'train', and everything measured with that target is measured on 'heldout'.
"""

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.data import plain
from headstart.data.plain import Groups, Starts, Text
from headstart.data.source import Source
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.target import Target

# About 5 % of the text, of varied kinds. No module with a backport among the packages that the shipped target is trained on.
HELD_OUT: tuple[str, ...] = (
    "argparse", "bisect", "calendar", "colorsys", "configparser", "csv", "fractions", "graphlib",
    "heapq", "ipaddress", "plistlib", "pprint", "queue", "sched", "secrets", "shelve", "shlex",
    "smtplib", "statistics", "textwrap", "tomllib", "uuid", "wave", "zipapp",
)  # fmt: skip

# Tests, third-party wheels, charmap tables and generated help topics are text, but not source code to learn from.
_SKIP_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "_bundled", "encodings", "pydoc_data", "__pycache__", "lib-dynload"}
)
_STARTS: Starts = (plain.LINES, re.compile(r"^(?:async def|def|class) ", re.MULTILINE))


def _read(path: Path) -> str | None:
    """The file's text, or None where it is empty or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8").strip() + "\n" if path.stat().st_size > 1 else None
    except UnicodeDecodeError:
        return None


def documents(split: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every file of a split ('train' or 'heldout'), sorted by path. The name is the path relative to the library's folder,
    with '/'. Raises ValueError for another split.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is 'train' or 'heldout', not {split!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = list[Path]()
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIP_FOLDERS]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        module = _module(name := path.relative_to(root).as_posix())
        if module.startswith(("_sysconfigdata", "config-")):
            continue
        if (module in HELD_OUT) == (split == "heldout") and (text := _read(path)):
            yield name, text


def _module(name: str) -> str:
    """The top-level module that the file of this name belongs to."""
    return name.split("/")[0].removesuffix(".py")


# ---- as a source of data ----


def texts(seed: int = 0) -> tuple[list[Text], list[Text]]:
    """The training texts and the held-out texts. They do not depend on the seed."""
    return _texts("train"), _texts("heldout")


def open(target: Target, *, length: int, seed: int) -> Source:
    """The standard library's source as plain text. Whole modules are held out, always the same. Raises UserError as ``plain.source``."""
    train, held = texts()
    return plain.source(target, train, held, length, seed, _STARTS, _modules(held))


def _texts(split: str) -> list[Text]:
    return [Text(*document) for document in documents(split)]


def _modules(held: list[Text]) -> Groups:
    found: Groups = {module: [] for module in HELD_OUT}
    for name, text, _ in held:
        found[_module(name)].append((name, text))
    return found


def prompts(count: int, seed: int, tokenizer: Any, tokens: int = 64) -> list[dict[str, str]]:
    """``count`` held-out prompts of ``tokens`` tokens each, from the modules in turn, as {"id", "text"}. Each begins at a definition.

    Once a module has no more definitions, its prompts begin at other unindented lines.
    """
    return plain.prompts(_modules(_texts("heldout")), count, seed, tokenizer, tokens, _STARTS)


def asked(target: TargetInfo, count: int, seed: int) -> list[list[int]]:
    """Up to ``count`` held-out prompts as tokens, for a source without held-out text of its own."""
    return plain.asked(target.tokenizer, _modules(_texts("heldout")), count, seed, _STARTS)
