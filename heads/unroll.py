"""Training's half of the one computation: a chain of guesses from every root at once, fed with true tokens.

Shape suffixes: B batch, T roots, A roots that are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.memory import Memory, Segment
from headstart.heads.visibility import ChainSees


def unroll(
    drafter: Drafter,
    roots: Roots,
    documents_BT: Tensor | None,
    depth: int,
    closed_form: bool = True,
    ask_BA: Tensor | None = None,
    checkpointing: bool = False,
    memory: Memory | None = None,
) -> list[Draft]:
    """Drafts of depth 1 to ``depth`` for every root, [B, T, ..] each: row t at depth d guesses x[t+1+d].

    ``ask_BA``: for these roots only, [B, A, ..] each (drafters that make all depths in ``begin``: their steps see no other root).
    ``closed_form=False`` uses the dense mask, as the reference. Rows whose chain leaves their document hold values
    without meaning; nobody sees them, and they are never supervised. ``checkpointing``: what is computed within a depth is computed again
    in the backward pass, not kept (1604.06174). ``memory``: an empty one, for those who want to see what is remembered.
    """
    memory, sees = Memory() if memory is None else memory, ChainSees(documents_BT, closed_form=closed_form)

    def made(call: Callable[[Memory], Draft]) -> Draft:
        return _again(call, memory, roots.read_BT) if checkpointing else call(memory)

    def asked(x_BT: Tensor) -> Tensor:
        return x_BT if ask_BA is None else x_BT.gather(1, ask_BA)

    drafts = [made(partial(drafter.begin, roots, sees=sees, ask=ask_BA))]
    for d in range(2, depth + 1):
        tokens_BT = F.pad(roots.chosen_BT, (0, d - 1))[:, d - 1 :]  # x[t+d], the guess of depth d-1 had it been right
        sees = sees.deeper()
        step = partial(drafter.step, d, asked(tokens_BT), drafts[-1], asked(roots.positions_BT) + d - 1, sees=sees)
        drafts.append(made(step))
    return drafts


def _again(call: Callable[[Memory], Draft], memory: Memory, somewhere: Tensor) -> Draft:
    """The call on a memory of its own, so that it can run a second time; what it has written the first time goes to ``memory``.

    ``somewhere``: on whose device random numbers are drawn, the same ones in both.
    """
    before = {layer: list(segments) for layer, segments in memory.layers.items()}

    def run(_: Tensor) -> tuple[Draft, dict[int, list[Segment]]]:
        own = Memory()
        own.layers = {layer: list(segments) for layer, segments in before.items()}
        draft = call(own)
        return draft, {layer: segments[len(before.get(layer, ())) :] for layer, segments in own.layers.items()}

    draft, written = checkpoint(run, somewhere, use_reentrant=False)
    for layer, segments in written.items():
        memory.layers.setdefault(layer, []).extend(segments)
    return draft
