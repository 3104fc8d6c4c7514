"""Evaluates a suite of prompts: plain decoding, a drafter and other sides decode each prompt in turn, and its results are kept at once.

The later turns of a conversation follow the answers that the same side gave to the earlier ones, as in real use. Sides take turns at
going first, so that a noisy machine disturbs them alike. Several sequences at once are prompts of the same category, measured together as
one unit: intervals are then drawn over units, not over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import Generation, longest
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.figures import accepted_of, as_one, decoding_figures, repetition
from headstart.inference.reports.lossless import differs
from headstart.inference.reports.progress import watched
from headstart.inference.reports.results import Key, Line, Results
from headstart.inference.reports.sides import PLAIN, Side

ALL = "overall"


class Question(NamedTuple):
    """A prompt of a suite. ``group``: the name under which its category is summed up."""

    name: Any  # its id in the file
    category: str
    group: str
    turns: Sequence[str]


class Words(NamedTuple):
    """Conversion between text and tokens. ``ask(turns, answers)``: the prompt for the last turn, given the answers to the earlier ones.
    ``spell(prompt, tokens)``: the text of the tokens that answer a prompt.
    """

    ask: Callable[[Sequence[str], Sequence[str]], list[int]]
    spell: Callable[[Sequence[int], Sequence[int]], str]


class How(NamedTuple):
    """The settings of an evaluation. ``cut``: a prompt too long for the context loses its beginning; else its conversation ends there."""

    temperatures: Sequence[float]
    sequences: Sequence[int]
    sampling: SamplingParams
    new_tokens: int
    cut: bool


def units(questions: Sequence[Question], how: How) -> list[Key]:
    """The units to be measured, in order: each a number of sequences at once, a temperature and the questions decoded together. The last
    questions of a category are left out if they are too few for a unit: fewer at once would be another measurement. Raises UserError
    where no category has as many questions as a number of sequences asks for.
    """
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.group, []).append(i)
    most = max(map(len, groups.values()), default=0)
    if too_many := [B for B in how.sequences if most < B]:
        raise UserError(f"sequences={too_many[0]}: no category has as many prompts (count=N limits them, too)")
    return [
        Key(B, temperature, tuple(each[at : at + B]))
        for B in how.sequences
        for each in groups.values()
        for at in range(0, len(each) - B + 1, B)
        for temperature in how.temperatures
    ]


def evaluate(target: Target, sides: Sequence[Side], questions: Sequence[Question], words: Words, how: How, results: Results) -> None:
    """Measure the units that ``results`` do not have yet, and add each to it. ``sides``: plain decoding first. Raises as ``units`` does."""
    left = [unit for unit in units(questions, how) if unit not in results.lines]
    warm = set[tuple[int, float]]()
    with ExitStack() as held:
        for side in sides:
            held.callback(side.close)
        for i, unit in enumerate(watched(left, "evaluated")):
            here = [side for side in sides if unit.sequences == 1 or side.batches]
            if (unit.sequences, unit.temperature) not in warm:  # warm-up: first calls are slow, and decode=auto measures its rounds
                warm.add((unit.sequences, unit.temperature))
                for side in here:
                    _talk(target, side, questions, unit, words, how._replace(new_tokens=min(WORTH + 1, how.new_tokens)), turns=1)
            at = i // len(how.temperatures) % len(here)
            made = {side.name: _talk(target, side, questions, unit, words, how) for side in here[at:] + here[:at]}
            made = {side.name: made[side.name] for side in here}  # in the usual order, whoever went first
            results.add(unit, questions[unit.questions[0]].group, made, _differences(target, made, how) if unit.temperature == 0 else {})


def _talk(
    target: Target, side: Side, questions: Sequence[Question], unit: Key, words: Words, how: How, turns: int | None = None
) -> dict[str, Any]:
    """Decode all turns of the unit's questions with one side. Returns the ``seconds`` of each turn, for each question its answers with
    their prompts (``talks``), and how many prompts were ``cut`` and turns ``left_out``.
    """
    asked = [questions[i] for i in unit.questions]
    talks: list[list[dict[str, Any]]] = [[] for _ in asked]
    seconds, cut, left_out = [], 0, 0
    for turn in range(max(len(q.turns) for q in asked) if turns is None else turns):
        prompts: dict[int, list[int]] = {}
        for place, q in enumerate(asked):
            if turn < len(q.turns) and len(talks[place]) == turn:
                prompt = words.ask(q.turns[: turn + 1], [said["text"] for said in talks[place]])
                most = longest(target, len(prompt)) - how.new_tokens
                if len(prompt) <= most or (how.cut and most > 0):
                    prompts[place], cut = prompt[-most:], cut + (len(prompt) > most)
                else:
                    left_out += len(q.turns) - turn
        if not prompts:
            break
        each = [replace(how.sampling, temperature=unit.temperature, seed=how.sampling.seed + unit.questions[p]) for p in prompts]
        made, took = side.decode(list(prompts.values()), each, how.new_tokens, unit.sequences)
        seconds.append(took)
        for (place, prompt), g in zip(prompts.items(), made, strict=True):
            text = words.spell(prompt, g.tokens)
            rounds = {"emitted": list(g.emitted), "accepted": accepted_of(g.emitted, g.guesses)}
            talks[place].append({"text": text, "tokens": list(g.tokens), **rounds, "prompt": prompt})
    return {"seconds": seconds, "talks": talks, "cut": cut, "left_out": left_out}


def _differences(target: Target, made: dict[str, Any], how: How) -> dict[str, list[dict[str, Any]]]:
    """side -> its answers that differ from plain decoding of the same prompt, as ``differs`` describes them, each with its turn."""
    found: dict[str, list[dict[str, Any]]] = {}
    penalty = how.sampling.repetition_penalty
    for name in made:
        for turn, a, b in _same_prompt(made, name):
            if x := differs(target, b["prompt"], b["tokens"], [a["tokens"]], new_tokens=how.new_tokens, penalty=penalty):
                found.setdefault(name, []).append(x | {"turn": turn})
    return found


def _same_prompt(made: dict[str, Any], name: str) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield (turn, the side's answer, plain decoding's answer), up to the first pair that differs: after it the prompts differ too."""
    for theirs, plain in zip(made[name]["talks"], made[PLAIN]["talks"], strict=True):
        for turn, (a, b) in enumerate(zip(theirs, plain, strict=False)):
            yield turn, a, b
            if a["text"] != b["text"]:
                break


# Figures -------------------------------------------------------------------------------------------------------------------


def together(line: Line, name: str) -> Generation:
    """All answers of a side in a unit, as a single Generation with the rounds and the seconds of all of them."""
    turns = [turn for talk in line.made[name]["talks"] for turn in talk]
    said = (
        (t["tokens"], t["emitted"], t.get("accepted", accepted_of(t["emitted"], ()))) for t in turns
    )  # earlier versions kept no "accepted"
    return as_one(said, sum(line.made[name]["seconds"]))


def figures(lines: dict[Key, Line], depth: int) -> list[dict[str, Any]]:
    """A row for each number of sequences, temperature, category (first all together) and side. ``depth``: the deepest acceptance shown."""
    lines = {key: line for key, line in lines.items() if len(key.questions) == key.sequences}  # earlier versions kept incomplete units
    kinds = dict.fromkeys((key.sequences, key.temperature) for key in lines)
    groups = [ALL, *dict.fromkeys(line.group for line in lines.values())]
    rows = []
    for sequences, temperature in kinds:
        for group in groups:
            here = {k: x for k, x in lines.items() if k[:2] == (sequences, temperature) and group in (ALL, x.group)}
            for name in dict.fromkeys(name for line in here.values() for name in line.made):
                rows.append(
                    {"name": name, "temperature": temperature, "sequences": sequences, "category": group, **_row(here, name, depth)}
                )
    return rows


def _row(lines: dict[Key, Line], name: str, depth: int) -> dict[str, Any]:
    drafted, plain = ([together(line, side) for line in lines.values()] for side in (name, PLAIN))
    if not any(g.tokens for g in drafted):
        raise UserError(f"{name} said nothing at all: no figures can be made of that")
    found = decoding_figures(drafted, plain, depth)
    del found["conditional_acceptance_by_depth"]  # the depth of each round's guesses is not kept
    said = [turn["tokens"] for line in lines.values() for talk in line.made[name]["talks"] for turn in talk]
    prompts = sum(len(key.questions) for key in lines)
    return {"prompts": prompts, "answers": len(said), **found, "repetition": repetition(said)}


def lossless(lines: dict[Key, Line]) -> dict[str, dict[str, int]]:
    """side -> at temperature 0, how many answers were compared with plain decoding's, how many differ, and how many of these at ties."""
    found: dict[str, dict[str, int]] = {}
    for key, line in lines.items():
        for name in line.made if key.temperature == 0 else ():
            if name != PLAIN:
                of = found.setdefault(name, {"compared": 0, "differing": 0, "ties": 0})
                different = line.differences.get(name, [])
                of["compared"] += sum(1 for _ in _same_prompt(line.made, name))
                of["differing"] += len(different)
                of["ties"] += sum(x["tie"] for x in different)
    return found
