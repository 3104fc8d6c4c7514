"""Training's half of the shared computation: a chain of guesses from every root at once, fed with true tokens.

Shape suffixes: B batch, T roots, A asked roots.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.memory import Memory, Segment
from headstart.heads.summed import summed
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
    detach: bool = False,
) -> list[Draft]:
    """Drafts of depth 1 to ``depth`` for every root, [B, T, ..] each: row t at depth d guesses x[t+1+d].

    ``documents_BT``: number of each root's document; None: each batch row is one. ``ask_BA``: drafts for these roots only, [B, A, ..] each
    (for drafters that make all depths in ``begin``, whose steps see no other root). ``closed_form=False`` uses the dense mask, as the
    reference. Rows whose chain leaves their document hold meaningless values: no row sees them, and they are never supervised.
    ``checkpointing``: activations within a depth are not kept but computed again in the backward pass (1604.06174). ``memory``: an empty
    one, for callers that want to inspect it afterwards. ``detach``: no gradient flows into the draft of the depth before, whose state is
    read as a constant (2408.15766). Keys and values of earlier depths in memory still pass gradients to the weights, but no further.
    Raises RuntimeError for a drafter that was prepacked for decoding.
    """
    if torch.is_grad_enabled() and drafter._size:  # no gradient would reach the layers
        raise RuntimeError("a drafter that was prepacked for decoding cannot be trained: load it again")
    memory, sees = Memory() if memory is None else memory, ChainSees(documents_BT, closed_form=closed_form)

    def made(call: Callable[[Memory], Draft]) -> Draft:
        return _again(call, memory, roots.read_BT) if checkpointing else call(memory)

    def asked(x_BT: Tensor) -> Tensor:
        return x_BT if ask_BA is None else x_BT.gather(1, ask_BA)

    # not under checkpointing, where depths are computed again later, outside this context
    with nullcontext() if checkpointing or not torch.is_grad_enabled() else summed(drafter):
        drafts = [made(partial(drafter.begin, roots, sees=sees, ask=ask_BA))]
        for d in range(2, depth + 1):
            tokens_BT = F.pad(roots.chosen_BT, (0, d - 1))[:, d - 1 :]  # x[t+d]: the guess of depth d-1 if it was right
            sees = sees.deeper()
            parent = _detached(drafts[-1]) if detach else drafts[-1]
            step = partial(drafter.step, d, asked(tokens_BT), parent, asked(roots.positions_BT) + d - 1, sees=sees)
            drafts.append(made(step))
    return drafts


def _detached(draft: Draft) -> Draft:
    return Draft(draft.hidden_BNH.detach(), None if draft.state_BNH is None else draft.state_BNH.detach())


def _again(call: Callable[[Memory], Draft], memory: Memory, somewhere: Tensor) -> Draft:
    """Run the call under checkpointing, on a copy of ``memory``, because the call runs twice. ``memory`` gets the rows of the first run.

    ``somewhere``: a tensor on the device whose random numbers must be the same in both runs.
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
