"""A small target, conversations with it, and the command that makes it answer: for the tests of regeneration and of endpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headstart.data import regenerate, stdlib
from headstart.inference.settings import open_target
from tests.composed import composed
from tests.trainers.conftest import save_target

NEW = 12
PLAIN = ["data=stdlib", "limit=5", "prefix=10"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that stops now and then."""
    made = save_target(tmp_path_factory.mktemp("target"))
    path = made / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, *range(3, 300, 16)]}))
    return made


@pytest.fixture(scope="session")
def target(folder: Path) -> Any:
    return open_target({"name": "folder", "path": str(folder), "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None})


def talk(i: int, turns: int) -> list[dict[str, str]]:
    said = [{"role": "system", "content": f"talk {i}"}] if i % 3 == 0 else []
    for turn in range(turns):
        said += [{"role": "user", "content": f"{i} {turn} {i * 7 % 40}"}, {"role": "assistant", "content": "somebody else said this"}]
    return said[:-1] if i % 4 == 1 else said  # the last question of some has no answer yet


TALKS = [talk(i, 1 + i % 3) for i in range(14)]


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("chat") / "talks.jsonl", [{"messages": m, "id": f"talk-{i}"} for i, m in enumerate(TALKS)])


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def door(folder: Path, questions: Path, tmp_path: Path) -> Callable[..., Path]:
    """``door(*overrides)`` does what `python -m data regenerate` does with these overrides, and returns the file that it wrote."""

    def run(*more: str) -> Path:
        chosen = more if {"data=stdlib", "data=text"} & {*more} else ("data=chat", *path_of(more))
        config = settings(folder, f"out={tmp_path / 'made.jsonl'}", *chosen)
        regenerate.main(config)
        return Path(config["out"])

    def path_of(more: tuple[str, ...]) -> tuple[str, ...]:
        return more if any(m.startswith("path=") for m in more) else (f"path={questions}", *more)

    return run


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short standard library."""
    whole = stdlib.documents
    monkeypatch.setattr(stdlib, "documents", lambda split: ((name, text[:3000]) for name, text in islice(whole(split), 6)))


def settings(folder: Path, *more: str) -> dict[str, Any]:
    where = [f"target.path={folder}", "target.dtype=float32", "target.device=cpu", f"new_tokens={NEW}", "max_length=256"]
    data = [m for m in more if m.startswith("data=")][-1]
    return composed("target=folder", data, *where, *(m for m in more if not m.startswith("data=")), door="regenerate")


def text(target: Any, tokens: list[int]) -> str:
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
