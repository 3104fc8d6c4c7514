"""Layers that read rows one after another, each changing a state: Gated DeltaNet (Qwen3-Next, Qwen3.5), Mamba, short convolutions (LFM2).

Such a state cannot drop a rejected row, cannot branch, and runs on from one packed document into the next. So the memory holds the rows
that a layer read, as it holds keys and values for attention: kept, moved and dropped alike. A row's output is that of the layer after all
rows that it sees, in order of position. Saved states only spare the layer from reading the kept rows again.

Shape suffixes: B batch, N rows of a pass, M rows in memory, D hidden, C chains that are read side by side, L rows of a chain.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.heads.kinds import seen_of
from headstart.heads.memory import BESIDE, Memory, joined
from headstart.heads.visibility import ChainSees, Sees

CHUNK = 64  # rows in a chunk of Gated DeltaNet
Parts = tuple[Tensor, Tensor | None]  # a layer's state after some rows of one sequence: of its convolution, and of its recurrence if any


class State(NamedTuple):
    """The states of all recurrent layers after the first ``rows`` rows of a sequence."""

    rows: int
    layers: dict[int, Parts]


class Call(NamedTuple):
    """Chains of rows that every recurrent layer reads side by side."""

    sequences_CL: Tensor  # the sequence of the pass,
    reads_CL: Tensor  # and the row of its memory
    starts: list[State] | None  # what each chain continues; None: each chain begins a text
    outputs: Tensor  # which of the C * L outputs are wanted,
    rows: Tensor  # and the rows of the pass [B * N] whose outputs they are
    ends: list[State] | None  # the states to fill at the end of each chain; None: they are not needed


class Mixer(NamedTuple):
    """A recurrent layer of a decoder of transformers."""

    module: Any
    place: int  # the layer of memory that holds its rows
    cache: str  # the argument that takes its states
    chunked: bool  # whether ``chunk_size`` can be passed to it

    def run(self, forward: Callable[..., Tensor], x_CLD: Tensor, cache: Any) -> Tensor:
        """Its own ``forward``. On a CPU transformers pads a text to whole chunks of 64 rows, or of Mamba's ``chunk_size``: a text that is
        shorter is read as one chunk of a smaller size.
        """
        inputs, own = {self.cache: cache}, getattr(self.module, "chunk_size", None)
        size = 1 << (x_CLD.shape[1] - 1).bit_length()
        if x_CLD.device.type != "cpu" or size >= (own or CHUNK):
            return forward(x_CLD, **inputs)
        if own is None:
            return forward(x_CLD, **inputs, **({"chunk_size": size} if self.chunked else {}))
        self.module.chunk_size = size
        try:
            return forward(x_CLD, **inputs)
        finally:
            self.module.chunk_size = own


def mixers_of(module: nn.Module) -> list[Mixer]:
    """The recurrent layers of a decoder. All of them have a convolution, which attention has not."""
    found: list[Any] = [m for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    mixers = [m for m in found if any(isinstance(child, nn.Conv1d) for child in m.children())]
    attends = {m.layer_idx for m in found if hasattr(m, "k_proj") and m not in mixers}
    return [_mixer(m, BESIDE - m.layer_idx if m.layer_idx in attends else m.layer_idx) for m in mixers]


def _mixer(module: Any, place: int) -> Mixer:
    takes = inspect.signature(module.forward).parameters
    cache = next((name for name in ("cache_params", "past_key_values") if name in takes), "")
    return Mixer(module, place, cache, any(p.kind is p.VAR_KEYWORD for p in takes.values()))


@contextmanager
def reading(
    mixers: Sequence[Mixer], sees: Sees, before: int, positions_BN: Tensor, keys_BM: Tensor | None, memory: Memory
) -> Iterator[None]:
    """Inside, the recurrent layers read rows at these positions by the rule ``sees``, after ``before`` rows in ``memory``, which gets the
    rows too. ``keys_BM``: positions of the rows in memory.
    """
    if not mixers:
        yield
        return
    states: dict[int, list[State]] = {}
    if isinstance(sees, ChainSees):
        calls = packed(sees, positions_BN)
    else:
        assert keys_BM is not None
        calls, states = planned(seen_of(sees, positions_BN, before), keys_BM, memory)
    own = [vars(mixer.module).get("forward") for mixer in mixers]
    for mixer in mixers:
        mixer.module.forward = partial(_read, mixer, mixer.module.forward, calls, memory)
    try:
        yield
        memory.states.update(states)
    finally:
        for mixer, forward in zip(mixers, own, strict=True):
            del mixer.module.forward
            if forward is not None:  # accelerate's wrapper
                mixer.module.forward = forward


def _read(mixer: Mixer, forward: Callable[..., Tensor], calls: Sequence[Call], memory: Memory, hidden_states: Tensor, **_: Any) -> Tensor:
    """The output [B, N, D] of a recurrent layer. ``forward``: its own. A mask and a cache are ignored: the calls stand for both."""
    x_BND, place, device = hidden_states, mixer.place, hidden_states.device
    rows_BMD = joined(memory.write(place, x_BND[:, None], x_BND[:, None, :, :0]))[0][:, 0]
    out_RD = torch.zeros_like(x_BND).flatten(0, 1)
    for call in calls:
        cache = _OneLayer(mixer.module.layer_idx, [state.layers[place] for state in call.starts or ()])
        x_CLD = rows_BMD[call.sequences_CL.to(device), call.reads_CL.to(device)].to(x_BND.dtype)
        y_CLD = mixer.run(forward, x_CLD, cache if call.starts or call.ends else None)
        out_RD = out_RD.index_copy(0, call.rows.to(device), y_CLD.flatten(0, 1)[call.outputs.to(device)])
        for i, end in enumerate(call.ends or ()):
            end.layers[place] = cache.parts(i)
    return out_RD.view_as(x_BND)


class _OneLayer:
    """A cache of transformers for one layer. ``parts``: its state in each of several sequences; empty: at the beginning of a text."""

    is_compileable = False

    def __init__(self, layer: int, parts: Sequence[Parts]) -> None:
        from transformers.cache_utils import LinearAttentionLayer

        self.held = held = LinearAttentionLayer()
        self.layers = {layer: held}
        if not parts:
            return
        convolutions, recurrences = zip(*parts, strict=True)  # below, cat copies: the layer changes its states in place
        held.conv_states[0], held.conv_kernel_size[0] = torch.cat(convolutions), convolutions[0].shape[-1]
        held.is_conv_states_initialized[0] = held.has_previous_state[0] = True
        if recurrences[0] is not None:
            held.recurrent_states[0], held.is_recurrent_states_initialized[0] = torch.cat(recurrences), True

    def parts(self, i: int) -> Parts:
        """The state of sequence ``i``."""
        recurrence = self.held.recurrent_states[0]
        return self.held.conv_states[0][i : i + 1], None if recurrence is None else recurrence[i : i + 1]

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self.held.has_previous_state[0])

    def update_conv_state(self, x: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        return self.held.update_conv_state(x, *args, **kwargs)

    def update_recurrent_state(self, x: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        return self.held.update_recurrent_state(x, *args, **kwargs)


def packed(sees: ChainSees, positions_BN: Tensor) -> list[Call]:
    """The calls for packed documents in an empty memory: each is a chain. Those of like length are read together, so that padding at the
    end of the shorter ones at most doubles the work.
    """
    B, N = positions_BN.shape
    documents_BN = torch.zeros_like(positions_BN) if sees.documents_BT is None else sees.documents_BT
    row_B1 = torch.arange(B, device=documents_BN.device)[:, None]
    changes = torch.stack([documents_BN, row_B1.expand(B, N)]).flatten(1)
    lengths = changes.unique_consecutive(dim=1, return_counts=True)[1].tolist()
    by_size, first = defaultdict[int, list[tuple[int, int]]](list), 0
    for length in lengths:
        by_size[length.bit_length()].append((first, length))
        first += length
    chains = [[list(range(at, at + n)) for at, n in some] for some in by_size.values()]
    return [_call(some, some, N) for some in chains]


def planned(seen_BNM: Tensor, keys_BM: Tensor, memory: Memory) -> tuple[list[Call], dict[int, list[State]]]:
    """The calls for rows of any tree after those in ``memory``, and the states to hold for each sequence after the pass.

    ``seen_BNM``: row n sees row m of memory; row 0 of the pass is the root row, which all later rows see. ``keys_BM``: positions of the
    rows in memory. Each sequence reads what its saved state lacks up to the last row that is surely kept, then every branch.
    """
    (B, N, M), states = seen_BNM.shape, dict[int, list[State]]()
    seen_BNM, keys_BM = seen_BNM.cpu(), keys_BM.cpu()
    trunks = defaultdict[tuple[int, bool], list[tuple[list[int], list[int], State | None, State]]](list)
    branches: list[tuple[list[int], list[int], State]] = []
    for b, (sequence, real, sure) in enumerate(memory.known(B)):
        if real == 0:
            continue
        seen_NM, keys_M = seen_BNM[b, :real], keys_BM[b]
        count = int(seen_NM[0].sum()) - 1  # kept rows; their positions are 0, 1, ...
        start = next((state for state in reversed(memory.states.get(sequence, [])) if state.rows <= count), None)
        kept, slots, paths = paths_of(seen_NM & (keys_M >= (0 if start is None else start.rows)), keys_M)
        sure = (len(paths[0]) if len(paths) == 1 else 1) if sure is None else sure
        end = State(count + sure, {})
        states[sequence] = [end] if start is None else [start, end]
        here = [b * M + m for m in slots]
        trunk = [b * M + m for m in kept] + [here[n] for n in paths[0][:sure]]
        trunks[len(trunk), start is not None].append((trunk, [b * N + n for n in paths[0][:sure]], start, end))
        branches += [([here[n] for n in path[sure:]], [b * N + n for n in path[sure:]], end) for path in paths if path[sure:]]
    calls = []
    for some in trunks.values():
        reads, rows, starts, ends = (list(x) for x in zip(*some, strict=True))
        calls.append(_call(reads, rows, M, None if starts[0] is None else starts, ends))
    if branches:
        reads, rows, ends = (list(x) for x in zip(*branches, strict=True))
        calls.append(_call(reads, rows, M, ends))
    return calls, states


def paths_of(seen_NM: Tensor, keys_M: Tensor) -> tuple[list[int], list[int], list[list[int]]]:
    """(the kept rows in memory by position, where the memory holds each row of the pass, the rows of the pass on the way to each leaf)."""

    def by_position(seen_M: Tensor) -> list[int]:
        slots = seen_M.nonzero()[:, 0]
        found: list[int] = slots[keys_M[slots].argsort(stable=True)].tolist()
        return found

    assert bool((seen_NM | ~seen_NM[0]).all()), "a row that does not see all that the root row sees continues another text"
    *kept, root = by_position(seen_NM[0])
    N, own_NM = len(seen_NM), seen_NM & ~seen_NM[0]
    if bool((own_NM.sum(1) == torch.arange(N)).all()):  # a chain: each row sees all earlier ones
        return kept, [root, *by_position(own_NM[-1])], [list(range(N))]
    ways = [[root, *by_position(own_M)] for own_M in own_NM]  # ancestors come before descendants
    row_of = {way[-1]: n for n, way in enumerate(ways)}
    inner = {slot for way in ways for slot in way[:-1]}
    return kept, list(row_of), [[row_of[slot] for slot in way] for way in ways if way[-1] not in inner]


def _call(reads: list[list[int]], rows: list[list[int]], M: int, starts: Any = None, ends: Any = None) -> Call:
    """A call of these chains. ``reads``: row m of sequence b in memory is number b * M + m. ``rows``: the rows of the pass at the end of
    each chain, numbered likewise; a row that is on several chains is taken once.
    """
    longest, taken = max(map(len, reads)), dict[int, int]()
    for i, (chain, its) in enumerate(zip(reads, rows, strict=True)):
        for j, row in enumerate(its, start=len(chain) - len(its)):
            taken.setdefault(row, i * longest + j)
    padded_CL = torch.tensor([[*chain, *chain[-1:] * (longest - len(chain))] for chain in reads])
    return Call(padded_CL // M, padded_CL % M, starts, torch.tensor(list(taken.values())), torch.tensor(list(taken)), ends)
