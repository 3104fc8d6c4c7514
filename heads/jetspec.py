"""JetSpec (2606.18394): DFlash's block with causal attention inside, so that a slot knows the ones before it and not those behind.

Trained with forward KL at equal weights; decoded with trees.
"""

from __future__ import annotations

from headstart.heads.dflash import Dflash


class Jetspec(Dflash):
    """DFlash with attention to earlier slots only."""

    causal = True
