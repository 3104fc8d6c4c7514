"""Checks what must hold for every tree, whichever proposer made it.

Shape suffixes as in inference/decoding/tree.py; X drawn nodes of all sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headstart.inference.decoding.tree import NO_NODE, Tree


def validate(tree: Tree, vocab_size: int) -> None:
    """Raises AssertionError naming what is wrong with trees that proposers have made."""
    shape, R = tree.tokens_BN.shape, len(tree) + 1
    for name, x in (("tokens", tree.tokens_BN), ("parents", tree.parents_BN), ("depths", tree.depths_BN)):
        if x.dtype != torch.int64 or x.shape != shape:
            raise AssertionError(f"tree: {name} must be int64 {list(shape)}, found {x.dtype} {list(x.shape)}")
    here_BN = tree.parents_BN != NO_NODE
    if bool((((tree.tokens_BN < 0) | (tree.tokens_BN >= vocab_size)) & here_BN).any()):
        raise AssertionError(f"tree: a token lies outside the vocabulary of {vocab_size}")
    if bool((tree.parents_BN < NO_NODE).any()) or bool((tree.parents_BN >= torch.arange(R - 1, device=here_BN.device)).any()):
        raise AssertionError("tree: every parent must be -1 or the index of an earlier node")
    parent_depth_BN = F.pad(tree.depths_BN, (1, 0)).gather(1, (tree.parents_BN + 1).clamp(min=0))
    if not torch.equal(tree.depths_BN, torch.where(here_BN, parent_depth_BN + 1, 0)) or bool((tree.depths_BN > tree.depth).any()):
        raise AssertionError("tree: the depth of a node must be its parent's plus 1, and none may exceed the tree's")
    if (tree.drawn_BN is None) != (tree.q_BRV is None):
        raise AssertionError("tree: drawn and q go together")
    if tree.drawn_BN is None or tree.q_BRV is None:
        return
    if tree.drawn_BN.dtype != torch.bool or tree.drawn_BN.shape != shape or tree.q_BRV.shape != (shape[0], R, vocab_size):
        raise AssertionError(f"tree: drawn must be booleans {list(shape)} and q {[shape[0], R, vocab_size]}")
    b, n = (tree.drawn_BN & here_BN).nonzero().unbind(1)
    q_XV = tree.q_BRV[b, tree.parents_BN[b, n] + 1]
    if not bool((q_XV >= 0).all()) or not torch.allclose(q_XV.sum(-1), q_XV.new_ones(len(b)), atol=1e-4):
        raise AssertionError("tree: q must be a probability distribution in every row with a drawn child")
    if not bool((q_XV.gather(1, tree.tokens_BN[b, n][:, None]) > 0).all()):
        raise AssertionError("tree: a drawn token has probability 0 under q")
