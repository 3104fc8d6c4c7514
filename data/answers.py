"""Who answers: the target in this process, many prompts at once, or an endpoint (data/endpoint.py). Prompts and answers are tokens.

Both take questions while ``free`` is above 0 and hand back answers as they come. ``drive`` keeps them busy with
conversations, which ask one question after the other, and puts what comes of these back into their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import check_prompt
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import Reader

# The file keeps the order of the source, so conversations that have ended wait in memory for a longer one before them: at most so many
# times as many as are answered at once.
AHEAD = 8


@dataclass(frozen=True)
class Answer:
    """What was said to a prompt."""

    tokens: list[int] | None  # with the stop token; None: the endpoint does not tell
    text: str  # without it
    ended: str  # stop, length, or "unfit": the endpoint found the prompt too long
    count: int  # tokens


Talk = Generator[list[int], Answer, Any]  # asks prompts, is sent answers, returns what came of it


@dataclass(eq=False)
class Line:
    """A conversation that is being answered."""

    number: int
    seed: int
    talk: Talk
    prompt: list[int] | None = None  # that it waits for; None: it is at its end
    result: Any = None

    def go_on(self, answer: Answer | None) -> bool:
        """Give it the answer to its prompt (None: it has not begun). Returns whether it asks another one."""
        try:
            self.prompt = next(self.talk) if answer is None else self.talk.send(answer)
        except StopIteration as end:
            self.prompt, self.result = None, end.value
        return self.prompt is not None


class Answers(Protocol):
    """Whoever answers prompts: the engine of this process, or an endpoint."""

    @property
    def name(self) -> str:
        """What the file says of who answered."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer together, at most."""

    @property
    def free(self) -> int:
        """How many more may be asked now."""

    def unfit(self, prompt: Sequence[int]) -> str | None:
        """Why this prompt cannot be answered; None: it can."""

    def ask(self, line: Line) -> None:
        """Begin with the prompt that a line waits for."""

    def wait(self) -> list[tuple[Line, Answer]]:
        """Until at least one is answered: lines and their answers."""

    def close(self) -> None:
        """Give back what it holds."""


def drive(lines: Iterable[Line], answers: Answers, rows: int, told: Callable[[Answer], object]) -> Iterator[Line]:
    """Run the conversations and yield each when it has ended, in their order. At most ``AHEAD * rows`` are begun at a time. ``told`` is
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
    """The target's own engine answers. ``sampling`` is the same for all prompts, but for the seed, which each line has itself."""

    def __init__(self, target: Target, engine: Engine, sampling: SamplingParams, new_tokens: int) -> None:
        self.target, self.engine, self.sampling, self.new_tokens = target, engine, sampling, new_tokens
        self.name = target.name
        self.running: dict[int, tuple[Line, Row, Reader]] = {}  # by the row's identity

    @property
    def max_length(self) -> int:
        """Of the engine's rows."""
        return self.engine.max_length

    @property
    def free(self) -> int:
        """Rows of the engine that nobody uses."""
        return self.engine.free

    def unfit(self, prompt: Sequence[int]) -> str | None:
        """Too long, or with a token that the target does not have."""
        if len(prompt) + self.new_tokens > self.max_length:
            return too_long(prompt, self.new_tokens, self.max_length)
        try:
            check_prompt(self.target, prompt, self.new_tokens)
        except UserError as error:
            return str(error)
        return None

    def ask(self, line: Line) -> None:
        """Admit it to the engine."""
        assert line.prompt is not None
        row = self.engine.add_request(line.prompt, new_tokens=self.new_tokens, sampling=replace(self.sampling, seed=line.seed))
        self.running[id(row)] = line, row, Reader(self.target.tokenizer, line.prompt)

    def wait(self) -> list[tuple[Line, Answer]]:
        """Step until a row has ended."""
        while not (done := [row for _, row, _ in self.running.values() if row.ended]):  # some end with their first token
            self.engine.step()
        return [self._answer(row) for row in done]

    def _answer(self, row: Row) -> tuple[Line, Answer]:
        line, row, reader = self.running.pop(id(row))
        text = reader.push(row.tokens[:-1] if row.ended == "stop" else row.tokens) + reader.end()
        return line, Answer(row.tokens, text, row.ended, len(row.tokens))

    def close(self) -> None:
        """Drop the rows that still run."""
        for _, row, _ in self.running.values():
            self.engine.drop(row)


def too_long(prompt: Sequence[int], new_tokens: int, max_length: int) -> str:
    """Why a prompt that is too long cannot be answered."""
    return f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the {max_length} that fit"
