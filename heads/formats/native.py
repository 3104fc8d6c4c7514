"""Our own names, for drafters that no serving engine loads as they are; the bundled inference module does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.base import Drafter


def names(drafter: Drafter) -> dict[str, str]:
    return {name: name for name in drafter.state_dict()}


def extras(drafter: Drafter) -> dict[str, Tensor]:
    return {}


def config(drafter: Drafter) -> dict[str, Any]:
    return {"architectures": [type(drafter).__name__], "hidden_size": drafter.shape.hidden_size, "vocab_size": drafter.shape.vocab_size}
