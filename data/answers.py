"""Answering prompts: by the target's engine in this process, many prompts at once, or by an endpoint (data/endpoint.py). Prompts and
answers are tokens.

Both accept prompts while ``free`` is above 0, and return answers as they finish. A conversation asks its prompts one after the other.
``drive`` runs many conversations at once and yields them in their original order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import check_prompt
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import Reader

if TYPE_CHECKING:
    from headstart.data.endpoint import ByEndpoint

Answers: TypeAlias = "ByEngine | ByEndpoint"

# The output file keeps the order of the source. So finished conversations wait in memory for a longer one before them. At most AHEAD times
# as many conversations are begun as are answered at once.
AHEAD = 8


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt."""

    tokens: list[int] | None  # with the stop token; None: the endpoint does not return tokens
    text: str  # without the stop token; if unfit, the reason
    ended: str  # "stop", "length", or "unfit": the endpoint found the prompt too long
    count: int  # of generated tokens


Talk = Generator[list[int], Answer, Any]  # a conversation: yields prompts, is sent their answers, returns its result


@dataclass(eq=False)
class Line:
    """A conversation that is being answered."""

    number: int
    seed: int
    talk: Talk
    prompt: list[int] | None = None  # the prompt whose answer it waits for; None: it has ended, or not begun
    result: Any = None  # once it has ended

    def go_on(self, answer: Answer | None) -> bool:
        """Continue the conversation with the answer to its prompt (None: begin it). Returns whether it asks another prompt."""
        try:
            self.prompt = next(self.talk) if answer is None else self.talk.send(answer)
        except StopIteration as end:
            self.prompt, self.result = None, end.value
        return self.prompt is not None


def drive(lines: Iterable[Line], answers: Answers, rows: int, told: Callable[[Answer], object]) -> Iterator[Line]:
    """Run the conversations, and yield them in their order as they end. At most ``AHEAD * rows`` are begun and not yet yielded. ``told`` is
    called with every answer.
    """
    fresh, begun, asking = iter(lines), deque[Line](), deque[Line]()
    more = True
    while more or begun:
        while answers.free and (asking or (more and len(begun) < AHEAD * rows)):
            if asking:
                answers.ask(asking.popleft())
            elif (line := next(fresh, None)) is None:
                more = False
            else:
                begun.append(line)
                if line.go_on(None):
                    asking.append(line)
        while begun and begun[0].prompt is None:
            yield begun.popleft()
        if begun:
            for line, answer in answers.wait():
                told(answer)
                if line.go_on(answer):
                    asking.append(line)


class ByEngine:
    """Answers prompts by the target's engine in this process. ``sampling`` applies to all prompts, but each line has its own seed."""

    def __init__(self, target: Target, engine: Engine, sampling: SamplingParams, new_tokens: int) -> None:
        self.target, self.engine, self.sampling, self.new_tokens = target, engine, sampling, new_tokens
        self.name, self.max_length = target.name, engine.max_length
        self.running: dict[int, tuple[Line, Row, Reader]] = {}  # by the id() of the row

    @property
    def free(self) -> int:
        """The number of free engine rows."""
        return self.engine.free

    def unfit(self, prompt: Sequence[int]) -> str | None:
        """The reason why the prompt cannot be answered (too long, or a token that the target does not have), or None."""
        if len(prompt) + self.new_tokens > self.max_length:
            return too_long(prompt, self.new_tokens, self.max_length)
        try:
            check_prompt(self.target, prompt, self.new_tokens)
        except UserError as error:
            return str(error)
        return None

    def ask(self, line: Line) -> None:
        """Add the prompt of a line to the engine."""
        assert line.prompt is not None
        row = self.engine.add_request(line.prompt, new_tokens=self.new_tokens, sampling=replace(self.sampling, seed=line.seed))
        self.running[id(row)] = line, row, Reader(self.target.tokenizer, line.prompt)

    def wait(self) -> list[tuple[Line, Answer]]:
        """Step the engine until at least one row has ended. Returns the ended lines with their answers."""
        while not (done := [row for _, row, _ in self.running.values() if row.ended]):  # some end with their first token
            self.engine.step()
        return [self._answer(row) for row in done]

    def _answer(self, row: Row) -> tuple[Line, Answer]:
        line, row, reader = self.running.pop(id(row))
        text = reader.push(row.tokens[:-1] if row.ended == "stop" else row.tokens) + reader.end()
        return line, Answer(row.tokens, text, row.ended, len(row.tokens))

    def close(self) -> None:
        """Drop all rows that still run."""
        for _, row, _ in self.running.values():
            self.engine.drop(row)


def too_long(prompt: Sequence[int], new_tokens: int, max_length: int) -> str:
    """The reason why a prompt that is too long cannot be answered."""
    return f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the {max_length} that fit"
