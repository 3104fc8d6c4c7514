"""Attacks on the commands by invalid input: command lines, names, files with any content, request bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attacks.outcome import Outcome, door, judged
from benchmarks.attacks.world import World
from headstart.inference.decoding.target import Target
from tests.hostile import HOSTILE

DICE = random.Random(0)
TALK = b'{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}'
TEXTS: dict[str, bytes] = {  # contents that any file may have
    "nothing": b"",
    "spaces": b" \n\n \t",
    "NUL bytes": bytes(300),
    "noise": DICE.randbytes(5000),
    "latin-1": '{"text": "é", "prompt": "é"}\n'.encode("latin-1"),
    "UTF-16": '{"text": "a b c"}\n'.encode("utf-16"),
    "a lone surrogate": b'{"prompt": "\\ud800", "text": "%s", "messages": [%s]}' % (b"a b\\ud800 c " * 500, TALK),
    "100,000 brackets": b"[" * 100_000,
    "100,000 braces": b'{"a":' * 100_000,
    "50,000 levels": b'{"text": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
    "a number": b"5\n",
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "an endless number": b'{"text": 1' + b"0" * 5000 + b"}\n",
    "not a number": b'{"text": NaN, "prompt": Infinity, "messages": -Infinity}\n',
    "a word": b'"text"\n',
    "an unfinished object": b'{"text": "a b c',
    "two roots": b'{"a": 1}{"b": 2}\n',
    "wrong types": b'{"prompt": 5, "messages": "a", "turns": {}, "conversations": [5], "text": []}\n',
}
THINGS = ("a folder", "a pipe", "a link to itself", "a link to nothing", "unreadable", "an error when read")
NAMES: dict[str, str] = {  # words that may be typed for any path; argv holds bytes that are not UTF-8 as surrogates
    "a surrogate": "a\udcff",
    "a line break": "a\nb",
    "an escape": "\x1b[31mred",
    "a tab": "a\tb",
    "a NUL": "a\0b",
    "300 characters": "n" * 300,
    "300 characters of two bytes": "é" * 150,
    "a path of 5,000": "d/" * 2500,
    "a part of 300": f"a/{'n' * 300}/b",
    "spaces": " ",
    "nobody's home": "~nobody-of-that-name/a",
    "below a device": "/dev/null/a",
    "in proc": "/proc/nosuch",
    "brackets": "[" * 5000,
    "a dictionary": "{a: 1}",
    "an interpolation": "${nosuch}",
    "half an interpolation": "${",
    "a quote": "'",
}


BRACKETS = ("head.taps", "loss.terms", "arms", "target.config", "decode.paths", "trainer.betas", "tracker", "prompts")
Attack = tuple[str, list[str]]  # a command and its arguments


def given(words: list[str], **others: str) -> list[str]:
    """The same command line with other values."""
    keys = {key.replace("__", "."): value for key, value in others.items()}
    return [word for word in words if word.partition("=")[0] not in keys] + [f"{key}={value}" for key, value in keys.items()]


def without_depth(words: list[str]) -> list[str]:
    """The same command line for a fixed tree, whose paths say how deep it is."""
    return [word for word in words if not word.startswith("decode.depth=")]


def lines(world: World, every: int) -> Iterator[Outcome]:
    """The lines of tests/hostile.txt: refused in one line that names the fault, before a target is loaded; nothing is written."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a target was loaded")

    folder = world.folder / "lines"
    for hostile in HOSTILE[::every]:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Target, "load", load)
            called = door(hostile.door, hostile.arguments, folder)
        came = judged(called, hostile.says)
        written = [path.name for path in folder.iterdir()]
        yield Outcome(shown(hostile.door, hostile.arguments), "silent" if came == "runs" or written else came, called.said)
        shutil.rmtree(folder)


def shown(door: str, words: list[str]) -> str:
    text = f"{door}: {' '.join(words)}"
    return text if len(text) < 300 else f"{text[:200]} ... {text[-90:]}"


def tried(world: World, name: str, attack: Attack, may_run: bool = False) -> Outcome:
    called = door(*attack, world.folder)
    came = judged(called)
    return Outcome(f"{name}: {shown(*attack)}", "silent" if came == "runs" and not may_run else came, called.said)


# ---- names ----


def places(world: World, name: str) -> list[Attack]:
    """Every setting that names a file, a folder or a word."""
    out = world.folder / "new"
    train, fixed = world.run(out), [*without_depth(world.decoding), "decode=fixed"]
    captured = [*given(train, data="shards", path=str(world.folder / "shards"), trainer__length="32")]
    return [
        *(
            ("train", given(train, **{key: name}))
            for key in ("out", "path", "target__path", "target__name", "trainer__start", "out_fallback")
        ),
        ("train", given(train, head="draft_lm", head__folder=name)),
        ("train", given(captured, data__prompts_file=name)),
        ("train", given(captured, path=name)),
        ("data", given(world.shards(out), out=name)),
        *(("data regenerate", given(world.answers(out), **{key: name})) for key in ("out", "speculator", "url", "key")),
        *(("inference", given(world.decoding, **{key: name})) for key in ("speculator", "prompts", "out", "drafter_device")),
        ("inference", given(fixed, decode__paths=name)),
        ("inference tune", given(world.tuning, out=name)),
        *(("inference serve", [*world.target, "port=0", f"{key}={name}"]) for key in ("host", "api_key", "speculator")),
        ("inference chat", [*world.target, f"speculator={name}"]),
    ]


def names(world: World, every: int) -> Iterator[Outcome]:
    found = [(kind, attack) for kind, name in NAMES.items() for attack in places(world, name)]
    for kind, attack in found[::every]:
        key = attack[1][-1].partition("=")[0]
        # these may run: only the endpoint reads a key from the environment, and any word may name a target
        yield tried(world, kind, attack, may_run=key in ("key", "target.name"))
        shutil.rmtree(world.folder / "new", ignore_errors=True)
    for key in BRACKETS[::every]:
        for value in ("[" * 100_000, "[" * 30_000 + "]" * 30_000, "{a:" * 30_000 + "1" + "}" * 30_000):
            yield tried(world, "brackets", ("inference" if key == "prompts" else "train", [f"{key}={value}"]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield tried(world, "a port in use", ("inference serve", [*world.target, f"port={taken.getsockname()[1]}"]))


# ---- files ----


def made(path: Path, what: str) -> Path:
    """Make the file, or something in its place that is not a file."""
    if what in TEXTS:
        path.write_bytes(TEXTS[what])
    elif what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what.startswith("a link"):
        path.symlink_to(path if what == "a link to itself" else path.with_name("nowhere"))
    elif what == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    else:
        path.symlink_to("/proc/self/mem")
    return path


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def readers(world: World, path: Path) -> list[Attack]:
    """Every command that reads a file named by a setting."""
    out, file = world.folder / "new", str(path)
    train = world.run(out)
    captured = [*given(train, data="shards", path=str(world.folder / "shards"), trainer__length="32")]
    return [
        ("inference", given(world.decoding, prompts=file)),
        ("inference tune", given(world.tuning, prompts=file)),
        ("inference", [*without_depth(world.decoding), "decode=fixed", f"decode.paths={file}"]),
        *(("train", given(train, data=source, path=file)) for source in ("chat", "text", "regenerated")),
        ("train", given(captured, data__prompts_file=file)),
        ("data", given(world.shards(out), path=file)),
        ("data regenerate", given(world.answers(out), path=file)),
        ("data regenerate", world.answers(path)),
    ]


def files(world: World, every: int) -> Iterator[Outcome]:
    """Any content instead of prompts, conversations, texts or answers: refused; existing files stay unchanged."""
    path = world.folder / "any.jsonl"
    found = [(what, number) for what in (*TEXTS, *THINGS) for number in range(len(readers(world, path)))]
    for what, number in found[::every]:
        made(path, what)
        before = path.read_bytes() if what in TEXTS else b""
        attack = readers(world, path)[number]
        is_out = attack[1][-1].startswith("out=") and attack[0] == "data regenerate" and str(path) in attack[1][-1]
        outcome = tried(world, what, attack, may_run=is_out and what in ("nothing", "a link to nothing"))
        if what in TEXTS and outcome.came != "runs" and path.read_bytes() != before:
            outcome = outcome._replace(came="lost")
        yield outcome
        gone(path)
        gone(world.folder / "nowhere")
        gone(world.folder / "new")


def inside(world: World, every: int) -> Iterator[Outcome]:
    """Any content in a file of a target's folder (it may run, since targets have no digest), a speculator or a run."""
    copy, whole = world.folder / "copy", {"target": world.folder / "target", "speculator": world.speculator, "run": world.folder / "run"}
    places = {
        "target": ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json"),
        "speculator": ("config.json", "model.safetensors", "decode.json", "README.md"),
        "run": ("metrics.jsonl", "config.json", "report.json", ".lock", "speculator/README.md", "checkpoints"),
    }
    doors: dict[str, Attack] = {
        "target": ("inference", given(world.decoding, target__path=str(copy))),
        "speculator": ("inference", given(world.decoding, speculator=str(copy), out=str(world.folder / "new"))),
        "run": ("train", world.run(copy)),
    }
    found = [(of, name, what) for of, its in places.items() for name in its for what in (*TEXTS, *THINGS)]
    for of, name, what in found[::every]:
        shutil.copytree(whole[of], copy)
        gone(copy / name)
        made(copy / name, what)
        strict = name in ("config.json", "model.safetensors") and of != "run"
        yield tried(world, f"{of}, {name}: {what}", doors[of], may_run=not strict or (of == "target" and what in TEXTS))
        shutil.rmtree(copy)
        gone(world.folder / "new")


# ---- what is typed and sent ----


def typed(world: World, every: int) -> Iterator[Outcome]:
    """Text typed into a conversation in a terminal."""
    words = [*world.target, f"speculator={world.speculator}", "new_tokens=4"]
    for text in (b"", b"\xff\xfe\n", b"\xed\xa0\x80\n", b"a" * 100_000 + b"\n", b"\0\n", b"/nosuch\n", b"[" * 5000 + b"\n", b"\n\n \n")[
        ::every
    ]:
        called = door("inference chat", words, world.folder, stdin=text)
        yield Outcome(f"chat: {text[:40]!r}", "refused" if judged(called) == "runs" else "traceback", called.said)


def sent(world: World, every: int) -> Iterator[Outcome]:
    """Requests to the endpoint: answered with a 4xx status and a message."""
    from tests.inference.serving.served import CHAT, COMPLETIONS, client
    from tests.inference.serving.test_requests import BAD, BAD_CHATS

    bodies: list[tuple[str, Any]] = [(COMPLETIONS, body) for body, *_ in BAD] + [(CHAT, body) for body, *_ in BAD_CHATS]
    bodies += [(path, text) for path in (COMPLETIONS, CHAT) for text in TEXTS.values()]
    found: list[Outcome] = []

    async def ask() -> None:
        async with client(drafted=False) as it:
            for path, body in bodies[::every]:
                if isinstance(body, dict) and path == COMPLETIONS:
                    body = {"prompt": "a"} | body if body else body
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with it.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
                    text = await answer.text()
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        right = 400 <= answer.status < 500 and bool(json.loads(text)["error"]["message"])
                    came = "refused" if right else "silent" if answer.status == 200 else "traceback"
                    found.append(Outcome(f"{path}: {data[:80]!r}", came, f"{answer.status} {text[:500]}"))

    asyncio.run(ask())
    yield from found
