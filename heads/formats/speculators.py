"""Folders of the speculators library: their config.json in the flat form that the other modules here read. Missing keys get the defaults
of vLLM, or else those of the library.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.errors import UserError, warn_once
from headstart.heads.formats.dflash import DFLASH, DFLASH2, DSPARK, XPRESS
from headstart.heads.formats.eagle3 import EAGLE3, QWEN3_EAGLE3
from headstart.heads.formats.keys import flag, layers, need, shown
from headstart.heads.formats.windows import FROM_ANCHOR, FULL, SLIDING

NON_CAUSAL = "sliding_window_non_causal"
ARCHITECTURES = {  # by speculators_model_type
    "eagle3": EAGLE3,
    "peagle": EAGLE3,
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "xpress": XPRESS,
}
LIBRARY = ("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version", "auto_map")


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config as a flat folder has it: the nested keys of its layer moved to the top, and the library's own keys translated. Raises
    UserError for kinds of drafters that are not read here, and for malformed keys.
    """
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"of the speculators library, of the kind {shown(kind)}: only its {known} are read here")
    if not isinstance(layer, dict):
        raise UserError(f"transformer_layer_config must be a dictionary, found {shown(layer)}")
    said = {key: value for key, value in config.items() if key not in LIBRARY and value is not None}
    said |= {"architectures": [ARCHITECTURES[kind]]}
    if ARCHITECTURES[kind] == EAGLE3:
        if layer.get("model_type") == "qwen3":
            said["architectures"] = [QWEN3_EAGLE3]
        return {"norm_before_residual": kind == "eagle3", FROM_ANCHOR: kind == "eagle3", **layer, **said}
    taps = layers(said.pop("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids")
    if 0 in taps:
        raise UserError(f"the folder has aux_hidden_state_layer_ids={shown(taps)}: block drafters read outputs of layers, from 1 on")
    if kind == "xpress":
        ratio, rank = said.pop("xpress_mlp_ratio", 2), said.setdefault("xpress_rank", 256)
        if not (type(ratio) is type(rank) is int):
            raise UserError(f"xpress_mlp_ratio and xpress_rank must be whole numbers, found {shown(ratio)} and {shown(rank)}")
        said["xpress_mlp_hidden"] = ratio * rank
    default = {"sample_from_anchor": False, "block_size": 8, NON_CAUSAL: kind in ("dflash", "dflash2"), FROM_ANCHOR: True}
    found = default | layer | said | {"target_layer_ids": [k - 1 for k in taps]}  # theirs count as our taps do
    return found | _causality(str(kind), found)


def _causality(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """What a flat folder has for ``NON_CAUSAL``. In the library, layers with a window look both ways inside a block where it is true, and
    layers without a window always do. vLLM 0.33 applies it to all layers (for dspark to none; it does not load the library's xpress),
    unless the config has ``is_causal``. Warns where vLLM and the library differ. Raises UserError where ``is_causal`` contradicts the
    library.
    """
    both_ways, types = flag(found, NON_CAUSAL), found.get("layer_types") or [FULL]
    need(found, {"is_causal": (False, None) if both_ways or SLIDING not in types else (None,)})
    differs = {"dspark": both_ways and SLIDING in types, "xpress": False}.get(kind, not both_ways and FULL in types)
    if differs and found.get("is_causal") is None:
        warn_once(f"vLLM would run this {kind} of the speculators library otherwise than it was trained, because {NON_CAUSAL} is "
                  f"{str(both_ways).lower()}, and guess worse; as Headstart saves it, engines run it as trained")  # fmt: skip
    return {"is_causal": False} if both_ways else {}
