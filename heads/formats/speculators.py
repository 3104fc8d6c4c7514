"""Folders of the speculators library: their config.json in the flat form that the other modules here read. What it does not say is what
vLLM takes it for, or else the library.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.formats.dflash import DFLASH, DFLASH2, DSPARK, XPRESS
from headstart.heads.formats.keys import layers, shown

EAGLE3 = "LlamaForCausalLMEagle3"
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
    """The nested keys of its layer moved to the top, and its own in the words of flat folders. Raises UserError for other kinds."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"of the speculators library, of the kind {shown(kind)}: only its {known} are read here")
    if not isinstance(layer, dict):
        raise UserError(f"transformer_layer_config must be a dictionary, found {shown(layer)}")
    said = {key: value for key, value in config.items() if key not in LIBRARY and value is not None}
    said |= {"architectures": [ARCHITECTURES[kind]]}
    if ARCHITECTURES[kind] == EAGLE3:
        return {"norm_before_residual": kind == "eagle3", **layer, **said}
    taps = layers(said.pop("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids")
    if 0 in taps:
        raise UserError(f"the folder has aux_hidden_state_layer_ids={shown(taps)}: block drafters read outputs of layers, from 1 on")
    # In training it is of layers with a window alone, which no drafter here has. (vLLM takes it for all layers.)
    said.pop("sliding_window_non_causal", None)
    if kind == "xpress":
        ratio, rank = said.pop("xpress_mlp_ratio", 2), said.setdefault("xpress_rank", 256)
        if not (type(ratio) is type(rank) is int):
            raise UserError(f"xpress_mlp_ratio and xpress_rank must be whole numbers, found {shown(ratio)} and {shown(rank)}")
        said["xpress_mlp_hidden"] = ratio * rank
    default = {"sample_from_anchor": False, "block_size": 8}
    return default | layer | said | {"target_layer_ids": [k - 1 for k in taps]}  # they count as our taps
