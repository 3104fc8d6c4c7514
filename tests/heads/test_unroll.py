"""The unroll against the sentence at the head of heads/base.py: depth d of root t guesses x[t+1+d]."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.heads.base import Draft, Drafter, Roots, TargetShape
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.unroll import unroll
from headstart.heads.visibility import ChainSees, Sees

B, T, DEPTH = 2, 9, 4
SHAPE = TargetShape("toy", 8, 1, 1, 1, 8, 8, 100, T, 1e-6, {}, "float32")


class Recorder(Drafter):
    """Notes what it is given; its vectors say (depth, root)."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.calls: list[tuple[int, Tensor, Tensor, Memory, Sees]] = []

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        assert ask is None
        self.calls.append((1, roots.chosen_BT, roots.positions_BT, memory, sees))
        return self._draft(1)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        assert parent.hidden_BNH.equal(self._draft(depth - 1).hidden_BNH)
        self.calls.append((depth, tokens_BN, positions_BN, memory, sees))
        return self._draft(depth)

    def unembedding(self, depth: int) -> Unembedding:
        raise AssertionError("the unroll makes vectors, not logits")

    @staticmethod
    def _draft(depth: int) -> Draft:
        return Draft(torch.stack([torch.full((B, T), depth), torch.arange(T).expand(B, T)], dim=-1).float())


def roots() -> tuple[Tensor, Roots, Tensor]:
    """Two documents in the first row, one in the second."""
    tokens = torch.randint(1, 100, (B, T), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 4 + [1] * 5, [2] * T])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(T))])
    chosen = torch.cat([tokens[:, 1:], torch.zeros(B, 1, dtype=torch.int64)], dim=1)
    return tokens, Roots(tokens, chosen, {}, positions), documents


def test_tokens_positions_and_rule_of_every_depth() -> None:
    tokens, r, documents = roots()
    drafter = Recorder()
    drafts = unroll(drafter, r, documents, DEPTH)
    assert [d.hidden_BNH[0, 0, 0].item() for d in drafts] == [1, 2, 3, 4] and all(d.hidden_BNH.shape == (B, T, 2) for d in drafts)
    assert [call[0] for call in drafter.calls] == [1, 2, 3, 4]
    for depth, read, positions, memory, sees in drafter.calls:
        for b in range(B):
            for t in range(T):  # depth d guesses x[t+1+d], having read x[t+d]
                assert read[b, t] == (tokens[b, t + depth] if t + depth < T else 0)
                assert positions[b, t] == r.positions_BT[b, t] + depth - 1
        assert memory is drafter.calls[0][3]
        assert isinstance(sees, ChainSees) and sees.depth == depth and sees.closed_form and sees.documents_BT is documents


def test_dense_reference_and_a_depth_beyond_the_row() -> None:
    tokens, r, documents = roots()
    drafter = Recorder()
    unroll(drafter, r, None, T + 2, closed_form=False)
    assert len(drafter.calls) == T + 2 and all(call[1].shape == (B, T) for call in drafter.calls)
    assert not drafter.calls[-1][1].any()
    assert all(isinstance(call[4], ChainSees) and not call[4].closed_form for call in drafter.calls)


def test_a_drafter_that_was_prepacked_is_not_trained() -> None:
    """Its frozen layers pass no gradients on: only the output head would learn."""
    _, r, documents = roots()
    drafter = Recorder()
    drafter._size = 1  # as after prepack
    with pytest.raises(RuntimeError, match="prepacked for decoding"):
        unroll(drafter, r, documents, DEPTH)
    with torch.no_grad():
        assert len(unroll(drafter, r, documents, DEPTH)) == DEPTH
