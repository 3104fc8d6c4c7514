"""JetSpec (2606.18394): DFlash with causal attention inside the block, so that a slot sees the slots before it and not those after it.

The paper trains it with forward KL, with equal weights for all depths, and decodes with trees.
"""

from __future__ import annotations

from headstart.heads.dflash import Dflash


class Jetspec(Dflash, without=("window_causal",)):
    """DFlash whose slots attend only to themselves and earlier slots."""

    causal = True
