"""benchmarks/accepted.py without the other library: what its trainer is given, and what is made of the figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import accepted, accepted_side


def test_a_document_is_a_sample() -> None:
    row = {name: torch.arange(10 * width).view(10, -1).squeeze(-1) for name, width in dict(tokens=1, states=6, final=2, mask=1).items()}
    row["documents"] = torch.tensor([0, 0, 0, 1, 2, 2, 0, 0, 0, 0])  # numbers may come again
    made = list(accepted_side.samples(row))
    assert [s["input_ids"].tolist() for s in made] == [[0, 1, 2], [4, 5], [6, 7, 8, 9]]  # of a single token nothing is left
    assert [s["position_ids"].tolist() for s in made] == [[0, 1, 2], [0, 1], [0, 1, 2, 3]]
    assert [int(s["lengths"]) for s in made] == [3, 2, 4] and torch.equal(made[1]["hidden_states"], row["states"][4:6])


def test_row_by_row_the_loss_is_the_mean_over_all_tokens() -> None:
    class Peer(nn.Module):
        def forward(self, loss_mask: Tensor, values: Tensor, **_: Any) -> Any:
            assert len(values) == 1, "it takes one row"
            return "drafted", (values * loss_mask).sum() / loss_mask.sum(), {}

    peer, values = Peer(), torch.randn(3, 5)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    accepted_side.row_by_row(peer)
    loss = peer(input_ids=values, loss_mask=mask, values=values, error_records=0)[1]
    assert float(loss) == pytest.approx(float(values[mask].mean()))


def test_each_side_is_taken_at_its_best_and_ours_at_the_default_rate_where_rates_are_equal() -> None:
    rows = [
        dict(side=side, rate=rate, accepted_T0=length)
        for side, rate, length in (
            ("headstart", 4e-3, 3.0),
            ("headstart", 8e-3, 3.6),
            ("headstart", 16e-3, 4.0),
            ("speculators", 1e-3, 1.6),
            ("speculators", 4e-3, 2.5),
            ("speculators, our optimiser", 8e-3, 2.0),
            ("speculators, our optimiser", 8e-3, 3.0),
        )
    ]
    found = accepted.figures(rows, 8e-3)
    assert found == pytest.approx({"accepted_over_peer": 4.0 / 2.5, "accepted_over_peer_equal_rate": 3.6 / 3.0})
    assert accepted.figures(rows[:3], 8e-3) == {}
