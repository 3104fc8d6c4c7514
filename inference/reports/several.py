"""Several prompts decoded at once, plainly and with guesses, in turn: what drafting still gains where sequences share the machine.

So many prompts begin together, and their seconds are those until the last of them has ended. Prompts are taken in their order, as many
at a time; what is left over, fewer than that, is not decoded. One at a time every report measures anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.figures import as_one, decoding_figures

SHOWN = ("accepted_length", "tokens_per_second", "plain_tokens_per_second", "speedup")


class Unit(NamedTuple):
    """What was made of these prompts (by their places), together, and the seconds of all of it."""

    prompts: Sequence[int]
    made: Sequence[Generation]
    seconds: float


Together = dict[tuple[int, str], list[Unit]]  # (sequences at once, "cold" or "warm") -> what a decoder made of the prompts


def sizes_of(sequences: Sequence[int], prompts: int) -> list[int]:
    """The numbers of sequences that are to be measured beside one at a time. Raises UserError where there are too few prompts for one."""
    sizes = sorted(set(sequences) - {1})
    if sizes and sizes[-1] > prompts:
        what = f"{sizes[-1]} at once take as many prompts, there are {prompts}"
        raise UserError(f"decode.sequences: {what}: raise decode.prompts, or give more")
    return sizes


def check_decoders(decoders: Mapping[str, Decoder], longest: int) -> None:
    """Raises UserError for what is decoded one at a time only. ``longest``: tokens of a prompt and its answer."""
    for name, decoder in decoders.items():
        if not decoder.batches:
            raise UserError(f"decode.sequences: {name} guesses for one sequence at a time, set it to []; several at once take a drafter's "
                            "own trees, beside its target")  # fmt: skip
        if (turn := decoder.target.turn) is not None and longest > turn:
            raise UserError(f"decode.sequences: several at once take at most {turn} tokens each, where {decoder.target.name} changes its "
                            f"rotation; a prompt and its answer have {longest}: set it to [], or give shorter ones")  # fmt: skip


def decode_together(
    decoders: Sequence[Decoder], prompts: Sequence[Sequence[int]], how: Callable[[int], SamplingParams], size: int, new_tokens: int
) -> list[list[Unit]]:
    """Of each decoder its units of ``size`` prompts; they take turns at going first. ``how`` the prompt of a place is decoded."""

    def once(decoder: Decoder, places: Sequence[int], new_tokens: int) -> Unit:
        asked = [prompts[i] for i in places]
        made, seconds = decoder.timed_many(asked, new_tokens=new_tokens, sequences=size, sampling=[how(i) for i in places])
        return Unit(places, made, seconds)

    found: list[list[Unit]] = [[] for _ in decoders]
    for decoder in decoders:  # first calls are slow, and rounds are measured in them
        once(decoder, range(size), min(WORTH + 1, new_tokens))
    for start in range(0, len(prompts) - size + 1, size):
        first = start // size % len(decoders)
        for at in (*range(first, len(decoders)), *range(first)):
            found[at].append(once(decoders[at], range(start, start + size), new_tokens))
    return found


def greedy_of(together: Together, prompt: int) -> list[list[int]]:
    """Everything that was said of a prompt at temperature 0 among others."""
    units = [unit for (_, warmth), units in together.items() if warmth == "cold" for unit in units if prompt in unit.prompts]
    return [unit.made[unit.prompts.index(prompt)].tokens for unit in units]


def batches(alone: Mapping[str, Mapping[str, Any]], drafted: Together, plain: Together, depth: int) -> list[dict[str, Any]]:
    """A row for each temperature and number of sequences. ``alone``: the figures of one at a time, by the same policy."""
    found = {(1, warmth): figures for warmth, figures in alone.items()}
    for key, units in drafted.items():
        mine, theirs = ([as_one(((g.tokens, g.emitted) for g in x.made), x.seconds) for x in each] for each in (units, plain[key]))
        found[key] = decoding_figures(mine, theirs, depth)
    rows = []
    for (size, warmth), figures in found.items():
        sure = {key: pair for key, pair in figures.get("intervals", {}).items() if key in SHOWN}
        row = {"sequences": size, "temperature": int(warmth == "warm"), **{key: figures[key] for key in SHOWN}}
        rows.append(row | ({"intervals": sure} if sure else {}))
    return sorted(rows, key=lambda row: (row["temperature"], row["sequences"]))
