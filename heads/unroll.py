"""Training's half of the one computation: a chain of guesses from every root at once, fed with true tokens.

Shape suffixes: B batch, T roots, A roots that are asked.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.memory import Memory
from headstart.heads.visibility import ChainSees


def unroll(
    drafter: Drafter,
    roots: Roots,
    documents_BT: Tensor | None,
    depth: int,
    closed_form: bool = True,
    ask_BA: Tensor | None = None,
) -> list[Draft]:
    """Drafts of depth 1 to ``depth`` for every root, [B, T, ..] each: row t at depth d guesses x[t+1+d].

    ``ask_BA``: for these roots only, [B, A, ..] each (drafters that make all depths in ``begin``: their steps see no other root).
    ``closed_form=False`` uses the dense mask, as the reference. Rows whose chain leaves their document hold values
    without meaning; nobody sees them, and they are never supervised.
    """
    memory, sees = Memory(), ChainSees(documents_BT, closed_form=closed_form)
    drafts = [drafter.begin(roots, memory, sees, ask_BA)]

    def asked(x_BT: Tensor) -> Tensor:
        return x_BT if ask_BA is None else x_BT.gather(1, ask_BA)

    for d in range(2, depth + 1):
        tokens_BT = F.pad(roots.chosen_BT, (0, d - 1))[:, d - 1 :]  # x[t+d], the guess of depth d-1 had it been right
        sees = sees.deeper()
        drafts.append(drafter.step(d, asked(tokens_BT), drafts[-1], asked(roots.positions_BT) + d - 1, memory, sees))
    return drafts
