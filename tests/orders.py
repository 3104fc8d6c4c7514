"""Fakes which storage order of a matrix is measured as the fastest, so that tests of prepacked models cover all orders on any processor."""

from __future__ import annotations

import pytest
from torch import Tensor

from headstart.heads import orders

ORDERS = ("dense", "onednn", "both", "panels")  # the fastest one; both: dense below 4 rows, onednn from 4 rows on


def faster(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """From now on, measuring finds ``order`` to be the fastest, or oneDNN's for a matrix that cannot be stored in ``order``."""

    def seconds(other: str, rows: int) -> float:
        if order == "both":
            return {"dense": 1.0 if rows < 4 else 3.0, "onednn": 2.0, "panels": 9.0}[other]
        return 1.0 if other == order else 2.0 if other == "onednn" else 3.0

    def measured(weight: Tensor) -> orders.Times:
        return {other: {rows: seconds(other, rows) for rows in orders.ROWS} for other in ("dense", *orders.packers(weight))}

    monkeypatch.setattr(orders, "LEAST", 1)
    monkeypatch.setattr(orders, "measured", measured)
    monkeypatch.setattr(orders, "TIMES", {})
