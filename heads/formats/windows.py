"""The keys of sliding windows in a config.json, as engines read them: the type of each layer, and one size for all windows.

Engines count a window from each row, and so do most who train. A drafter that was trained to count it from the root of its guesses, as the
speculators library does for some kinds, says so by a key of ours (``FROM_ANCHOR``). Engines do not know that key: there such a drafter
misses some of the farthest positions, at most as many as it guesses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.formats.keys import flag, need, shown

SLIDING, FULL, FROM_ANCHOR = "sliding_attention", "full_attention", "sliding_window_from_anchor"
KEYS = ("layer_types", "sliding_window", "use_sliding_window")


def window_keys(windowed: Collection[int], layers: int, window: int | None, slides: bool) -> dict[str, Any]:
    """The keys where the layers ``windowed`` of ``layers`` have a window."""
    keys = {"layer_types": [SLIDING if i in windowed else FULL for i in range(layers)], "use_sliding_window": bool(windowed)}
    return keys | {"sliding_window": window, FROM_ANCHOR: not slides} if windowed else keys


def windows(said: dict[str, Any]) -> dict[str, Any]:
    """The settings of a sliding window; none where no layer has one. Raises UserError for keys that engines refuse or read in two ways."""
    types, window = said.get("layer_types") or [], said.get("sliding_window")
    if SLIDING not in types:
        return {}
    if len(types) != said.get("num_hidden_layers", 1) or {*types} - {SLIDING, FULL} or type(window) is not int or window < 1:
        raise UserError(f"the folder has layer_types={shown(types)} and sliding_window={shown(window)}: layers with a "
                        f"sliding window need its size, and each layer its type, {SLIDING} or {FULL}")  # fmt: skip
    need({"use_sliding_window": None, **said}, {"use_sliding_window": (True,), "swa_window_size": (window, None)})
    where = [i for i, kind in enumerate(types) if kind == SLIDING]
    return {"window": window, "window_layers": where, "window_slides": not flag(said, FROM_ANCHOR)}


def without_windows(said: dict[str, Any]) -> dict[str, Any]:
    """The config without the keys that ``windows`` has read; unchanged where no layer has a window."""
    return {key: value for key, value in said.items() if key not in KEYS} if windows(said) else said
