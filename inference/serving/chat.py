"""``python -m inference chat``: a conversation in the terminal that shows which tokens were guessed and which the target added."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from rich.console import Console

from headstart.heads.errors import UserError
from headstart.heads.spelling import HALF
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow, Messages, Reader, asking, ids, in_history, render, spoken
from headstart.inference.settings import open_decode, open_guesser, open_target

GUESSED, OWN, ASIDE = "bold green", "default", "dim"
MEASURES = "the first answer takes some seconds longer: decode=auto measures what rounds cost on this machine"
KEYS = "Ctrl-C stops an answer; at the prompt it ends the conversation, as Ctrl-D does."
HELP = f"highlighted: guessed and accepted. /new forgets the conversation. {KEYS}"
NO_TEMPLATE = f"this target has no chat template: each line is continued as plain text, and forgotten. {KEYS}"
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, which a terminal would obey

Decode = Callable[..., Any]  # called with a prompt, new_tokens=, and on_tokens=, which gets the tokens of each round


def chat(
    target: Target, decode: Decode, *, max_length: int, new_tokens: int, console: Console | None = None, ask: Callable[[str], str] = input
) -> None:
    """Hold a conversation until ``ask`` raises EOFError or KeyboardInterrupt. ``max_length``: the most tokens of a conversation."""
    console, templated, messages = console or Console(highlight=False), bool(target.tokenizer.chat_template), Messages()
    console.print(HELP if templated else NO_TEMPLATE, style=ASIDE)
    while True:
        try:
            said = ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return console.print()
        if said == "/new":
            messages = []
            console.print("a new conversation", style=ASIDE)
        elif said == "/help":
            console.print(HELP if templated else NO_TEMPLATE, style=ASIDE)
        if said in ("", "/new", "/help"):
            continue
        asked = [*messages, {"role": "user", "content": said}]
        try:
            prompt = asking(target.tokenizer, asked) if templated else ids(target.tokenizer, said, special=True)
            most = min(new_tokens, min(max_length, longest(target, len(prompt))) - len(prompt))
            if most < 1:
                raise UserError(f"the conversation's {len(prompt)} tokens fill the {max_length} there are: /new begins another")
            answer = show(target, decode, prompt, most, console)
            if templated:
                answer = in_history(target.tokenizer, asked, render(target.tokenizer, asked, ask=True), answer)
                messages = [*asked, {"role": "assistant", "content": answer}]
        except (BadRow, UserError) as error:
            console.print(str(error), style="red", markup=False)


def show(target: Target, decode: Decode, prompt: list[int], most: int, console: Console) -> str:
    """Print the answer as it comes, then a line of figures about it. Returns its text (see ``spoken``)."""
    reader, stop, said = Reader(target.tokenizer, prompt), set(target.stop_ids), list[int]()
    pieces, rounds = list[str](), list[int]()  # tokens of each round, the prompt's own pass first
    began = time.perf_counter()

    def write(text: str, style: str) -> None:
        pieces.append(text)
        console.print(COMMANDS.sub(HALF, text), style=style, end="", markup=False, soft_wrap=True)

    def take(tokens: list[int]) -> None:
        """Write the tokens of a round. The last one is the target's own, unless the answer ends before it."""
        rounds.append(len(tokens))
        for place, token in enumerate(tokens, 1):
            if token not in stop:
                said.append(token)
                write(reader.push([token]), GUESSED if place < len(tokens) else OWN)

    with suppress(KeyboardInterrupt):
        decode(prompt, new_tokens=most, on_tokens=take)
    seconds, count, passes = time.perf_counter() - began, sum(rounds), max(len(rounds) - 1, 1)
    write(reader.end(), OWN)
    console.print(f"\n{count} tokens, {count / seconds:.0f} tokens/s, accepted length {sum(rounds[1:]) / passes:.2f}", style=ASIDE)
    return spoken(target.tokenizer, "".join(pieces), said)


def take_any_character() -> None:
    """Keep characters outside the terminal's encoding from ending the conversation: printed, they become question marks; a prompt with one
    is refused.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def main(config: dict[str, Any]) -> None:
    """A conversation in the terminal, until its end is typed."""
    with suppress(ImportError):  # not on every system; it gives arrow keys and a history at the prompt
        import readline  # noqa: F401
    take_any_character()
    how = open_decode(config["decode"])
    sampling = replace(how.sampling, temperature=config["temperature"])
    target = open_target(config["target"], to_decode=True)
    guesses = config["speculator"] is not None or how.proposer != {"kind": "drafter"}
    drafter, proposer, policy = open_guesser(how, config["speculator"], target) if guesses else (None, None, how.policy)
    if policy is None:
        print("decode.json: speculation did not pay on this machine for one sequence; decoding without")
    max_length = min(config["max_length"], target.shape.max_positions)
    guessing = None if policy is None else proposer or drafter
    decoder = Decoder(target, guessing, policy, rule=sampling.rule, max_length=max_length)
    answers = count()

    def decode(prompt: list[int], **how: Any) -> Any:  # asked again, it samples another answer
        return decoder.generate(prompt, sampling=replace(sampling, seed=sampling.seed + next(answers)), **how)

    if decoder.alone is not None and decoder.alone.kind == "auto":
        print(MEASURES)
    chat(target, decode, max_length=max_length, new_tokens=config["new_tokens"])
