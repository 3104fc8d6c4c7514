"""The thoughts of reasoning models: the marks that enclose them, and an answer's tokens divided into thought and answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the fields in which endpoints and data sets keep an assistant's thought
BEGUN = re.compile(r"<think>\s*$")  # the generation prompt of some templates already opens the thought
# The marks that begin a thought, end it, and (in some vocabularies) begin an answer without a thought.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)
TAIL = 16  # tokens of a prompt's end that are looked at, white space included

Marks = tuple[tuple[int, ...], ...]  # the tokens of one row of MARKS


@functools.lru_cache(maxsize=16)
def marks_of(tokenizer: Any) -> Marks | None:
    """The marks of this vocabulary: the first row of ``MARKS`` whose marks begin and end with added tokens, which no text has by chance.
    None: there is no such row.
    """
    for row in MARKS:
        found = tuple(tuple(tokenizer(mark, add_special_tokens=False)["input_ids"]) for mark in row)
        if all(ids and {ids[0], ids[-1]} <= tokenizer.added_tokens_decoder.keys() for ids in found):
            return found
    return None


def begun(tokenizer: Any, marks: Marks, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with the mark that begins a thought, white space apart: many templates end with it."""
    begin, tail = list(marks[0]), list(prompt[-TAIL:])
    while tail and tail[-len(begin) :] != begin and not tokenizer.decode(tail[-1:]).strip():
        tail.pop()
    return tail[-len(begin) :] == begin


class Splitter:
    """Divides the tokens of an answer, as they come, into those of a thought at its beginning and those after it, without the marks.

    ``open``: None until it is known whether there is a thought, True within the thought, False after it or without one. ``held``: the last
    tokens, while they may become a mark.
    """

    def __init__(self, marks: Marks | None, begun: bool = False) -> None:
        self.marks, self.held = marks, list[int]()
        self.open: bool | None = False if marks is None else True if begun else None

    def split(self, tokens: Sequence[int], last: bool = False) -> tuple[list[int], list[int]]:
        """The tokens of the thought and of the answer that are certain now and were not before. ``last``: no more tokens come."""
        seen, self.held = [*self.held, *tokens], []
        if self.open is None:
            seen = self._begin(seen, last)
        if not self.open or self.marks is None:
            return [], seen
        end = self.marks[1]
        for at in range(len(seen)):
            part = tuple(seen[at : at + len(end)])
            if part == end:
                self.open = False
                return seen[:at], seen[at + len(end) :]
            if part == end[: len(part)] and not last:
                self.held = seen[at:]
                return seen[:at], []
        return seen, []

    def _begin(self, seen: list[int], last: bool) -> list[int]:
        """The first tokens without the mark that they begin with, if any; none as long as they may become a mark."""
        assert self.marks is not None
        begin, _, *others = self.marks
        for mark in (begin, *others):
            part = tuple(seen[: len(mark)])
            if part == mark:
                self.open = mark == begin
                return seen[len(mark) :]
            if part == mark[: len(part)] and not last:
                self.held = seen
                return []
        self.open = False
        return seen
