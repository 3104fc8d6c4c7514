"""Decodes several prompts at once, plainly and with guesses, in turn: what drafting still gains where sequences share the machine.

The prompts of a group begin together, and their time ends when the last of them has ended. Groups are taken from the prompts in order; a
last group with too few prompts is not decoded. One prompt at a time is measured by every report anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.figures import accepted_of, as_one, decoding_figures

SHOWN = ("accepted_length", "tokens_per_second", "plain_tokens_per_second", "speedup")


class Unit(NamedTuple):
    """Prompts (by their indices) that were decoded together, their generations, and the seconds of all of them together."""

    prompts: Sequence[int]
    made: Sequence[Generation]
    seconds: float


Together = dict[tuple[int, int], list[Unit]]  # (sequences at once, temperature) -> what a decoder decoded


def sizes_of(sequences: Sequence[int], prompts: int) -> list[int]:
    """The numbers of sequences to be measured, sorted and without 1, which every report measures. Raises UserError for a number larger than
    that of the prompts.
    """
    sizes = sorted(set(sequences) - {1})
    if sizes and sizes[-1] > prompts:
        what = f"{sizes[-1]} at once take as many prompts, there are {prompts}"
        raise UserError(f"decode.sequences: {what}: raise decode.prompts, or give more")
    return sizes


def check_decoders(decoders: Mapping[str, Decoder], longest: int) -> None:
    """Raises UserError for a decoder that cannot decode several sequences of ``longest`` tokens (prompt and answer) at once."""
    for name, decoder in decoders.items():
        if not decoder.batches:
            raise UserError(f"decode.sequences: {name} guesses for one sequence at a time, set it to []; only a drafter's own trees, "
                            "on the target's device, work for several at once")  # fmt: skip
        if (switch := decoder.target.rope_switch) is not None and longest > switch:
            raise UserError(f"decode.sequences: several at once take at most {switch} tokens each, where {decoder.target.name} changes its "
                            f"rotation; a prompt and its answer have {longest}: set it to [], or give shorter ones")  # fmt: skip


def decode_together(
    decoders: Sequence[Decoder], prompts: Sequence[Sequence[int]], how: Callable[[int], SamplingParams], size: int, new_tokens: int
) -> list[list[Unit]]:
    """For each decoder its units of ``size`` prompts. The decoders take turns at going first. ``how(i)``: the sampling of prompt i.

    Raises torch.OutOfMemoryError where they do not fit; UserError instead if several processes share the target.
    """

    def once(decoder: Decoder, places: Sequence[int], new_tokens: int) -> Unit:
        asked = [prompts[i] for i in places]
        try:
            made, seconds = decoder.timed_many(asked, new_tokens=new_tokens, sequences=size, sampling=[how(i) for i in places])
        except torch.OutOfMemoryError as e:
            if decoder.target.sharded:  # of its processes this one alone may know
                raise UserError(
                    f"decode.sequences: {size} at once do not fit into the memory of every process: leave {size} and more out"
                ) from e
            raise
        return Unit(places, made, seconds)

    found: list[list[Unit]] = [[] for _ in decoders]
    for decoder in decoders:  # untimed: first calls are slow, and decode=auto measures its rounds
        once(decoder, range(size), min(WORTH + 1, new_tokens))
    for start in range(0, len(prompts) - size + 1, size):
        first = start // size % len(decoders)
        for at in (*range(first, len(decoders)), *range(first)):
            found[at].append(once(decoders[at], range(start, start + size), new_tokens))
    return found


def greedy_of(together: Together, prompt: int) -> list[list[int]]:
    """All continuations of a prompt that were decoded together with others, at temperature 0."""
    units = [unit for (_, temperature), units in together.items() if temperature == 0 for unit in units if prompt in unit.prompts]
    return [unit.made[unit.prompts.index(prompt)].tokens for unit in units]


def _as_one(unit: Unit) -> Generation:
    return as_one(((g.tokens, g.emitted, accepted_of(g.emitted, g.guesses)) for g in unit.made), unit.seconds)


def batches(alone: Mapping[int, Mapping[str, Any]], drafted: Together, plain: Together, depth: int) -> list[dict[str, Any]]:
    """A row for each temperature and number of sequences. ``alone``: temperature -> figures of one at a time, by the same policy."""
    found = {(1, temperature): figures for temperature, figures in alone.items()}
    for key, units in drafted.items():
        mine, theirs = ([_as_one(unit) for unit in each] for each in (units, plain[key]))
        found[key] = decoding_figures(mine, theirs, depth)
    rows = []
    for (size, temperature), figures in found.items():
        sure = {key: pair for key, pair in figures.get("intervals", {}).items() if key in SHOWN}
        row = {"sequences": size, "temperature": temperature, **{key: figures[key] for key in SHOWN}}
        rows.append(row | ({"intervals": sure} if sure else {}))
    return sorted(rows, key=lambda row: (row["temperature"], row["sequences"]))
