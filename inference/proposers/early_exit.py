"""Early exit: the target's first layers guess, with its final norm, output head and key-value cache (LayerSkip, 2404.16710)."""

from __future__ import annotations

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.base import check_whole
from headstart.inference.proposers.layers import Itself, SomeLayers, values_returned


class EarlyExit(Itself):
    """``layers``: how many of the target's first layers guess; None: a third of them. Raises UserError for a number that does not fit."""

    def __init__(self, target: Target, *, layers: int | None = None) -> None:
        layers = max(target.shape.layers // 3, 1) if layers is None else layers
        check_whole("early_exit", layers=layers)
        if layers >= target.shape.layers:
            raise UserError(f"proposer early_exit: layers={layers} must be fewer than the {target.shape.layers} of {target.name}")
        super().__init__(SomeLayers(target, values_returned(target, "early_exit", ())))
        self.drafter.left_out = dict.fromkeys(target.layers[layers:], True)
