"""The terminal shows the target's own text, highlights exactly the guesses that were accepted, and survives what a user does."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from headstart.heads.base import Drafter
from headstart.heads.spelling import HALF
from headstart.inference import settings
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.plans import ALONE
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving import chat
from headstart.inference.serving.text import asking
from tests.inference.serving import speech
from tests.inference.serving.speech import NEW, POLICY, target, text_of, tokenizer


def drafter() -> Drafter:
    return speech.drafter(*(tuple(asking(tokenizer(), [{"role": "user", "content": text}])) for text in ("Hi", "so")))


def engine(drafted: bool = True) -> Engine:
    return Engine(target(), drafter() if drafted else None, sequences=1, max_length=120, plans=POLICY)


def static(drafted: bool = True) -> chat.Decode:
    """By an engine, as on a GPU."""
    decoder = Decoder(target(), drafter() if drafted else None, POLICY, max_length=120)
    decoder.by_engine = lambda tokens: True  # type: ignore[method-assign]
    return decoder.generate


def talk(said: list[Any], decode: chat.Decode | None = None, **how: Any) -> tuple[str, list[list[int]], list[str]]:
    """What the console shows (as a terminal is told), the prompts that were decoded, and their answers."""
    left, prompts, console = iter(said), list[list[int]](), Console(file=io.StringIO(), force_terminal=True, highlight=False, width=400)
    inner = decode or static()

    def ask(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, type):
            raise line
        return line

    def noting(prompt: list[int], **how: Any) -> None:
        prompts.append(prompt)
        inner(prompt, **how)

    chat.chat(target(), noting, **{"max_length": 120, "new_tokens": NEW} | how, console=console, ask=ask)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    return shown, prompts, Text.from_ansi(shown).plain.rstrip().splitlines()


def test_accepted_guesses_are_highlighted_and_counted() -> None:
    for drafted in (True, False):
        shown, (prompt,), lines = talk(["Hi"], static(drafted))
        alone = engine(drafted)
        row = alone.add_request(prompt, new_tokens=NEW)
        while not row.done:
            alone.step()
        assert row.tokens == generate(target(), None, prompt, new_tokens=NEW).tokens
        assert not any(HALF in text_of([token]) for token in row.tokens)  # each is a text of its own
        rounds = [1, *row.emitted]
        marks = [place < n for n in rounds for place in range(1, n + 1)]
        answer = Text.from_ansi(shown.split("\n", 1)[1])
        bold = "".join(answer.plain[s.start : s.end] for s in answer.spans if getattr(s.style, "bold", False))
        expected = [text_of([token]) for token, guessed in zip(row.tokens, marks, strict=True) if guessed]
        assert bold.replace("\n", "") == "".join(expected).replace("\n", "")
        assert (sum(marks) > 0) == drafted == bool(bold)
        assert text_of(row.tokens).replace("\n", "") in answer.plain.replace("\n", "")
        assert lines[-1].startswith(f"{NEW} tokens, ") and lines[-1].endswith(f"accepted length {row.accepted_length:.2f}")


def test_a_conversation_goes_on_until_it_is_forgotten_or_full() -> None:
    shown, prompts, _ = talk(["Hi", "", "so", "/new", "so", "no" * 60, "so"])
    first = text_of(generate(target(), None, prompts[0], new_tokens=NEW).tokens)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}, {"role": "user", "content": "so"}]
    assert prompts[1] == asking(tokenizer(), turns) and prompts[2] == asking(tokenizer(), turns[2:])
    assert shown.count("a new conversation") == 1
    assert len(prompts) == 4 and "fill the 120" in shown  # the full one was not decoded, and the conversation went on without it
    assert "Ctrl-C stops an answer; at the prompt it ends the conversation" in shown
    assert text_of(prompts[3]).startswith(text_of(prompts[2])) and "no" * 60 not in text_of(prompts[3])


def test_an_answer_ends_at_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target whose rope has one: no sequence may cross it."""
    prompt = asking(tokenizer(), [{"role": "user", "content": "Hi"}])
    monkeypatch.setattr(Target, "rope_switch", len(prompt) + 3)
    _, prompts, lines = talk(["Hi"])
    assert prompts == [prompt] and lines[-1].startswith("3 tokens, ")


def test_an_interrupt_stops_the_answer_and_not_the_conversation() -> None:
    inner, made = static(), 0

    def interrupted(prompt: list[int], new_tokens: int, on_tokens: Callable[[list[int]], None]) -> None:
        def until(tokens: list[int]) -> None:
            nonlocal made
            on_tokens(tokens)
            made += 1
            if made == 3:
                raise KeyboardInterrupt

        inner(prompt, new_tokens=new_tokens, on_tokens=until)

    _, prompts, lines = talk(["Hi", "so", KeyboardInterrupt], interrupted)
    said = generate(target(), None, prompts[0], new_tokens=NEW).tokens
    cut = text_of(prompts[1]).removeprefix("u:Hi\na:").removesuffix("\nu:so\na:")
    assert cut and text_of(said).startswith(cut) and len(cut) < len(text_of(said))
    assert sum(" tokens/s" in line for line in lines) == 2 and lines[-1].startswith(f"{NEW} tokens")


def test_the_tokenizers_own_end_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    speech = tokenizer()
    speech.eos_token = "b"
    monkeypatch.setattr(target(), "tokenizer", speech)
    _, _, lines = talk(["Hi"], lambda prompt, new_tokens, on_tokens: on_tokens(speech("yob")["input_ids"]))
    assert lines[1:-1] == ["yo"]


def test_without_a_template_lines_are_continued_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target(), "tokenizer", tokenizer(None))
    dynamic = partial(generate, target(), Drafting(drafter()), policy=POLICY, sampling=SamplingParams())
    shown, prompts, _ = talk(["Hi", "a\udc80", "so"], dynamic)
    assert [text_of(p) for p in prompts] == ["Hi", "so"]
    assert "no chat template" in shown and "surrogate" in shown


def test_commands_for_the_terminal_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tokenizer()), "decode", lambda self, tokens, **how: "\x1b[2Jok\x9b1A [red]" if 95 in tokens else "")
    shown, _, _ = talk(["Hi"], lambda prompt, new_tokens, on_tokens: on_tokens([95]))
    assert "\x1b[2J" not in shown and "\x9b" not in shown and "[red]" in shown


def test_bytes_that_are_no_characters_end_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\na\0b\n" + b"no" * 150_000 + b"\nso\n"), encoding="utf-8")
    told, raw = list[str](), io.BytesIO()
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    chat.take_any_character()

    def decode(prompt: list[int], new_tokens: int, on_tokens: Callable[[list[int]], None]) -> None:
        told.append(text_of(prompt))
        on_tokens(tokenizer()("é")["input_ids"])

    chat.chat(target(), decode, max_length=120, new_tokens=NEW, console=Console(width=400))
    said = raw.getvalue().decode("ascii")
    assert "surrogate" in said and "300" in said and said.count("accepted length") == 2 and len(told) == 2 and "?" in said
    assert told[1].endswith("u:so\na:")


def test_the_same_question_gets_another_sample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second conversation, which is asked the same, gets the same answers."""
    auto: Any = OmegaConf.to_container(OmegaConf.load(Path(chat.__file__).parents[2] / "conf" / "decode" / "auto.yaml"))
    prompt, seeds = asking(tokenizer(), [{"role": "user", "content": "Hi"}]), list[int]()
    monkeypatch.setattr(chat, "open_target", lambda *_, **__: target())
    monkeypatch.setattr(settings, "open_speculator", lambda *_: drafter())
    monkeypatch.setattr(Decoder, "generate", lambda *_, sampling, **__: seeds.append(sampling.seed))
    monkeypatch.setattr(chat, "chat", lambda target, decode, **_: [decode(prompt, new_tokens=NEW) for _ in range(3)])
    for _ in range(2):
        chat.main({"decode": auto | {"seed": 5}, "target": {}, "speculator": "x", "temperature": 1.0, "new_tokens": NEW, "max_length": 120})
    assert seeds == [5, 6, 7, 5, 6, 7] and capsys.readouterr().out.count(chat.MEASURES) == 2


def test_help_is_no_question() -> None:
    shown, asked, _ = talk(["/help"])
    assert shown.count(chat.KEYS) == 2 and not asked


@pytest.mark.parametrize(("plan", "kind", "guesses", "words"), [
    (None, "tuned", False, "did not pay on this machine for one sequence; decoding without"),
    (TreePolicy("chain", depth=2), "tuned", True, "tree of decode.json: chain of 2"),
    (None, "dynamic", True, ""),
])  # fmt: skip
def test_what_the_tuner_found_for_one_sequence_decides(
    plan: TreePolicy | None, kind: str, guesses: bool, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode: Any = OmegaConf.to_container(OmegaConf.load(Path(chat.__file__).parents[2] / "conf" / "decode" / "auto.yaml"))
    prompt, rounds = asking(tokenizer(), [{"role": "user", "content": "Hi"}]), list[list[int]]()
    monkeypatch.setattr(chat, "open_target", lambda *_, **__: target())
    monkeypatch.setattr(settings, "open_speculator", lambda *_: drafter())
    monkeypatch.setattr("headstart.inference.settings.load_plans", lambda *_: {ALONE: plan})
    monkeypatch.setattr(chat, "chat", lambda target, decode, **_: decode(prompt, new_tokens=NEW, on_tokens=rounds.append))
    chat.main(
        {"decode": decode | {"kind": kind}, "target": {}, "speculator": "x", "temperature": 0.0, "new_tokens": NEW, "max_length": 120}
    )
    assert (max(map(len, rounds)) > 1) == guesses
    said = capsys.readouterr().out
    assert words in said and said.count("\n") == bool(words)
