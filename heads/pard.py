"""PARD (2504.18583): a small language model that guesses all depths in one pass, by mask tokens.

It starts as a draft model does (heads/draft_lm.py), best from one that is trained already. Depth 1 of root t is that model's own: the row
of x[t+1], which stays in memory. Depths 2..K are rows of a mask token, at the positions of the K-1 tokens after x[t+1]. They see that row,
what it sees, and the earlier rows of their own root, and are forgotten afterwards. So a pass is one over plain text that ends in masks.
``step`` reads the row of its depth. No row reads the target, so one drafter can guess for every target with the same tokenizer.

The mask is one token for all depths, whose embedding is trained with the model. It should be one that no text contains.

The paper trains depth 1 at every position, and each further depth at a random share of the positions of the depth before (conditional drop
of tokens), so that all rows that a row sees are there. Here, too, few rows are trained: the deeper depths at roots that are drawn at random
(``anchors``), where chains stay whole, as in heads/peagle.py.

Shape suffixes: B batch, T roots, A asked roots, N nodes, D hidden size of the draft model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Draft, Roots, TargetShape, rows_of
from headstart.heads.dflash import asked, check_mask_token, read_row
from headstart.heads.draft_lm import DraftLm
from headstart.heads.memory import Beside, Memory
from headstart.heads.visibility import BlockSees, Sees, blocks_of


class Pard(DraftLm, without=("lora",)):  # LoRA would leave the mask's embedding as it was
    """``depth``: guesses per root. ``mask_token``: None: that of the PARD model to start from, else the last token of the vocabulary.
    ``anchors``: roots that a training step draws from each batch row. Raises UserError for settings and models that do not fit.
    """

    format = "pard"
    only_trained = ("anchors",)
    unrolls = True
    first_everywhere = True
    mask_token: int

    def __init__(self, shape: TargetShape, *, depth: int = 8, mask_token: int | None = None, anchors: int = 64, **more: Any) -> None:
        super().__init__(shape, **more)
        if mask_token is None:
            own = None if self.transplant else self.lm  # of another vocabulary, its mask is another token
            mask_token = getattr(getattr(own, "config", None), "pard_token", shape.vocab_size - 1)
        check_mask_token(mask_token, shape)
        self.mask_token = mask_token
        self.anchors, self.max_depth = anchors, depth
        if self.lm is not None:
            self._describe()

    def _describe(self) -> None:
        super()._describe()
        if self.max_depth is not None:  # else the constructor is not done yet
            self.arguments |= {"depth": self.max_depth, "mask_token": self.mask_token, "anchors": self.anchors}

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Depth 1 as in a draft model. Then one pass for the rows of all deeper depths of the asked roots, some roots at a time."""
        rows, ask_BA = Beside(memory), asked(ask, roots)
        every_BTD, sees, before = self.read_roots(roots, rows, sees)
        found = [first := rows_of(every_BTD, ask)]
        depths = torch.arange(1, self.max_depth or 1, device=ask_BA.device)  # depths 2..K less one: offsets to the position of x[t+1]
        positions_BA, blocks = roots.positions_BT.gather(1, ask_BA) + 1, list[Tensor]()
        for ask_Ba, positions_Ba in zip(blocks_of(ask_BA), blocks_of(positions_BA), strict=True) if len(depths) else ():
            positions_BN = (positions_Ba[..., None] + depths).flatten(1)
            masks_BN = torch.full_like(positions_BN, self.mask_token)
            block = self.states(masks_BN, positions_BN, rows, BlockSees(sees, ask_Ba + before, len(depths), causal=True))
            blocks.append(block.unflatten(1, (-1, len(depths))).flatten(2))
        if blocks:
            found.append(torch.cat(blocks, dim=1))
        return Draft(first, torch.cat(found, dim=-1), first_BTH=every_BTD)

    step = read_row
