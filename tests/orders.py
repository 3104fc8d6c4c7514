"""Fakes which storage order of a matrix is measured as the fastest, so that tests of prepacked models cover all orders on any processor."""

from __future__ import annotations

import pytest
from torch import Tensor

from headstart.heads import orders

ORDERS = ("dense", "onednn", "panels")


def faster(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """From now on, measuring finds ``order`` to be the fastest, or oneDNN's for a matrix that cannot be stored in ``order``."""

    def measured(weight: Tensor) -> orders.Times:
        seconds = {"onednn": 2.0, order: 1.0}
        return {other: dict.fromkeys(orders.ROWS, seconds.get(other, 3.0)) for other in ("dense", *orders.packers(weight))}

    monkeypatch.setattr(orders, "LEAST", 1)
    monkeypatch.setattr(orders, "measured", measured)
    monkeypatch.setattr(orders, "TIMES", {})
