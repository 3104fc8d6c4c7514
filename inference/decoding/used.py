"""Which settings of conf/decode shape the trees of which kind. Without torch, because door/ reads this before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPE = ("depth", "nodes", "branch", "expand", "least")
USED = {  # kind of trees -> those of SHAPE that change them
    "auto": SHAPE,
    "dynamic": SHAPE,
    "best_first": ("depth", "nodes", "branch", "least"),  # it expands as many nodes as it keeps
    "chain": ("depth",),
    "fixed": (),  # decode.paths says it all
    "tuned": (),  # decode.json says it all
}
UNREAD = {  # kind of proposer -> those of SHAPE that it does not read, whatever the kind of trees
    "ngram": ("expand", "least"),  # matches have no probabilities
    "suffix": ("expand",),
    "cascade": ("branch", "expand", "least"),  # it proposes a chain
}


def idle(decode: Mapping[str, Any]) -> list[str]:
    """Those of ``SHAPE`` that change nothing. ``decode``: the settings of conf/decode."""
    unread = UNREAD.get(decode["proposer"]["kind"], ())
    return [key for key in SHAPE if key not in USED[decode["kind"]] or key in unread]
