"""Checks whether the drafter's inputs and outputs are connected as in training. It tries every known alternative connection, and reports
the one that improves the guesses most.

The guesses are those of chains over the target's own greedy text, from one teacher-forced pass per text. A connection counts as wrong if
with the alternative a round has at least a tenth more tokens, and if the gain over the texts is beyond chance. A drafter that is connected
as in training loses with every alternative. A drafter that has learned nothing gains with none.

Shape suffixes: T tokens, K depths, N roots, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Drafter, TargetEnds
from headstart.heads.layers import Rope
from headstart.heads.vocab import OutputHead
from headstart.inference.decoding.target import Target
from headstart.inference.reports.expected import greedy_walk
from headstart.inference.reports.recorded import Recorded
from headstart.inference.reports.walk import Walk
from headstart.trainers.diagnosis.case import Case, Finding

GAIN, SIGMAS = 1.1, 3.0  # the least gain in tokens per round, as a factor; and in standard errors
LOST = 0.05  # the least share of the target's tokens outside a trimmed vocabulary
THETAS = (0.02, 0.1, 10.0, 50.0)  # factors of the drafter's rope base: usual bases are 1e4, 1e5, 5e5, 1e6
SWITCHES = ("norm_output",)  # settings of drafters that choose which side of a norm is read
LEFT_OUT = ("fc_norm", "input_norm")  # norms of the tapped states, which older engines leave out


@dataclass
class Other:
    """An alternative connection."""

    key: str  # of CURES
    what: str  # description
    states: Callable[[Told, int], Tensor] | None = None  # the states to feed for a tap; None: the tap's own
    within: Callable[[], AbstractContextManager[None]] = nullcontext  # the context that changes the drafter


@dataclass
class Told:
    """A text of the target with its states."""

    recorded: Recorded  # with the states of the taps and of the layers next to them
    before_norm: Tensor  # [1, T, D], the input of the final norm


def wiring(case: Case) -> list[Finding]:
    """At most one finding: the alternative connection that gains most."""
    texts = [read(case.target, case.drafter, p, made.tokens) for p, made in zip(case.prompts, case.said, strict=True) if made.emitted]
    if not texts:
        return []
    depth = case.chain.depth
    own = [walked(case.drafter, each, depth) for each in texts]
    found = []
    for other in others(case.target, case.drafter):
        with other.within():
            tried = [walked(case.drafter, each, depth, other.states) for each in texts]
        lengths = [sum(w.tokens for w in walks) / sum(w.rounds for w in walks) for walks in (own, tried)]
        gains = [a.rounds / a.tokens - b.rounds / b.tokens for a, b in zip(own, tried, strict=True)]
        if lengths[1] > GAIN * lengths[0] and beyond_chance(gains):
            evidence = f"{other.what}, a round of a chain of {depth} has {lengths[1]:.2f} tokens instead of {lengths[0]:.2f}"
            found.append((lengths[1], Finding.of(other.key, evidence)))
    return [max(found, key=lambda each: each[0])[1]] if found else []


def beyond_chance(gains: Sequence[float]) -> bool:
    """Whether the mean of these is above 0 by more than SIGMAS standard errors."""
    return len(gains) > 1 and mean(gains) > SIGMAS * stdev(gains) / sqrt(len(gains))


def vocabulary(case: Case) -> list[Finding]:
    """Whether a trimmed vocabulary lacks many tokens of the target's texts."""
    ids_V = case.drafter.unembedding(1).ids_V
    if ids_V is None:
        return []
    known, words = set(ids_V.tolist()), [t for made in case.said for t in made.tokens]
    lost = sum(t not in known for t in words) / max(len(words), 1)
    if lost < LOST:
        return []
    worst = max(set(words) - known, key=words.count)
    share = f"{lost:.1%} of what the target says to these prompts is outside the {len(known)} tokens that the drafter knows"
    return [Finding.of("vocabulary", f"{share}, most often {case.text([worst])}: a rejection each, whatever it learns")]


def read(target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int]) -> Told:
    """Run the target over prompt and continuation, and record the states of the tapped layers and of those next to them."""
    taps = sorted({t for tap in drafter.taps for t in (tap - 1, tap, tap + 1) if 0 <= t <= target.shape.layers})
    with before_final_norm(target) as seen:
        recorded = Recorded.by(target, taps, prompt, said)
    return Told(recorded, next((x for x, y in seen if torch.equal(y, recorded.final_1TD)), recorded.final_1TD))


@contextmanager
def before_final_norm(target: Target) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, collects (input, output) of the direct children of the target's body that keep the shape, the final norm among them."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, given: Any, out: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor) and given[0].shape == out.shape:
            seen.append((given[0], out))

    hooks = [m.register_forward_hook(note) for m in target.body.children() if not isinstance(m, nn.ModuleList)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def walked(drafter: Drafter, told: Told, depth: int, states: Callable[[Told, int], Tensor] | None = None) -> Walk:
    """Walk over a text with chains of ``depth`` guesses at temperature 0. ``states``: gives the states to feed in place of each tap's."""
    recorded, dtype = copy.copy(told.recorded), next(drafter.parameters()).dtype
    fed = {tap: told.recorded.states[tap] if states is None else states(told, tap) for tap in drafter.taps}
    recorded.states = {tap: state.to(dtype) for tap, state in fed.items()}
    return greedy_walk(drafter, recorded, depth)


# ---- alternative connections ----


def others(target: Target, drafter: Drafter) -> Iterator[Other]:
    """All alternative connections that this drafter can have."""
    N, named = target.shape.layers, ", ".join(map(str, drafter.taps))
    for off in (-1, 1) if drafter.taps else ():
        place = "after" if off > 0 else "before"
        yield Other("tap", f"fed with the layers {place} those it names ({named})", partial(_tapped, off, N))
    if N in drafter.taps:
        yield Other("norm", "fed with the target's state before its final norm", partial(_unnormed, N))
    for name in SWITCHES:
        if isinstance(now := getattr(drafter, name, None), bool):
            yield Other("norm", f"with {name}={not now}".lower(), within=partial(replaced, drafter, name, not now))
    for name in LEFT_OUT:
        if drafter._modules.get(name) is not None:
            yield Other("norm", f"without {name}", within=partial(left_out, drafter, name))
    for off in (-1, 1):
        what = f"with the positions of guesses one {'later' if off > 0 else 'earlier'}"
        yield Other("positions", what, within=partial(stepped, drafter, off))
    for what, frequencies in rotations(target, drafter):
        yield Other("positions", f"rotated by {what}", within=partial(rotated, drafter, frequencies))
    for words, factor in (("times", target.shape.hidden_size**0.5), ("divided by", target.shape.hidden_size**-0.5)):
        yield Other("embedding", f"with the embedding {words} the square root of the hidden size", within=partial(scaled, drafter, factor))
    for what, ids_V in maps(drafter):
        yield Other("vocabulary", f"with the ids of the draft vocabulary {what}", within=partial(mapped, drafter, ids_V))


def _tapped(off: int, layers: int, told: Told, tap: int) -> Tensor:
    return told.recorded.states[min(max(tap + off, 0), layers)]


def _unnormed(layers: int, told: Told, tap: int) -> Tensor:
    return told.before_norm if tap == layers else told.recorded.states[tap]


def rotations(target: Target, drafter: Drafter) -> Iterator[tuple[str, Tensor]]:
    """Other rope frequencies, described: the target's if the drafter has others, and those of other bases."""
    own = Rope(target.shape.rope, target.shape.head_dim, target.shape.max_positions).frequencies
    found = next((m.frequencies.cpu() for m in drafter.modules() if isinstance(m, Rope)), None)
    if found is None:
        return
    if found.shape == own.shape and not torch.allclose(found, own):
        yield "the target's rotation", own
    rope, sizes = drafter.shape.rope, (drafter.shape.head_dim, drafter.shape.max_positions)
    plain = Rope({"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}, *sizes).frequencies
    if found.shape == plain.shape and not torch.allclose(found, plain):
        yield f"its base without the scaling ({rope.get('rope_type')})", plain
    for times in THETAS:
        yield f"{times:g} times the base (rope_theta)", found * times ** -(torch.arange(len(found)) / len(found))


def maps(drafter: Drafter) -> Iterator[tuple[str, Tensor]]:
    """Other maps from rows to token ids of a trimmed vocabulary, described: off by one, or ids and offsets confused."""
    ids_V = next((m.ids for m in drafter.modules() if isinstance(m, OutputHead) and m.ids is not None), None)
    if ids_V is None:
        return
    rows_V, most = torch.arange(len(ids_V), device=ids_V.device), drafter.shape.vocab_size - 1
    yield "one lower", (ids_V - 1).clamp(0, most)
    yield "one higher", (ids_V + 1).clamp(0, most)
    yield "read as offsets (id = row + d2t)", (rows_V + ids_V).clamp(0, most)
    yield "read as ids, not offsets", (ids_V - rows_V).clamp(0, most)
    yield "left out (row i is token i)", rows_V


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the attribute ``name`` of ``owner`` has another value."""
    before = owner.__dict__.get(name, owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is owner else setattr(owner, name, before)


@contextmanager
def left_out(drafter: Drafter, name: str) -> Iterator[None]:
    """Inside, the drafter has no module of this name."""
    before, drafter._modules[name] = drafter._modules[name], None
    try:
        yield
    finally:
        drafter._modules[name] = before


@contextmanager
def scaled(drafter: Drafter, factor: float) -> Iterator[None]:
    """Inside, the drafter reads the target's embeddings times ``factor``."""
    ends = drafter.ends

    class Scaled(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return ends.embed(tokens) * factor

    with replaced(drafter, "_ends", [TargetEnds(Scaled(), ends.head_VD, ends.softcap, ends.whole, ends.scaled)]):
        yield


@contextmanager
def stepped(drafter: Drafter, off: int) -> Iterator[None]:
    """Inside, the positions of the drafter's guesses are shifted by ``off``."""
    step = drafter.step

    def moved(depth: int, tokens_BN: Tensor, parent: Any, positions_BN: Tensor, memory: Any, sees: Any) -> Any:
        return step(depth, tokens_BN, parent, positions_BN + off, memory, sees)

    with replaced(drafter, "step", moved):
        yield


@contextmanager
def rotated(drafter: Drafter, frequencies: Tensor) -> Iterator[None]:
    """Inside, the drafter's rope has other frequencies."""
    with _swapped([m for m in drafter.modules() if isinstance(m, Rope)], "frequencies", frequencies):
        yield


@contextmanager
def mapped(drafter: Drafter, ids_V: Tensor) -> Iterator[None]:
    """Inside, the rows of the drafter's trimmed vocabulary are the tokens ``ids_V``."""
    with _swapped([m for m in drafter.modules() if isinstance(m, OutputHead) and m.ids is not None], "ids", ids_V):
        yield


@contextmanager
def _swapped(modules: Sequence[nn.Module], name: str, value: Tensor) -> Iterator[None]:
    """Inside, the buffer ``name`` of these modules has another value."""
    before = [getattr(module, name) for module in modules]
    for module, old in zip(modules, before, strict=True):
        setattr(module, name, value.to(old))
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, name, old)
