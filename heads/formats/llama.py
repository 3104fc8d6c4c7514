"""The keys of config.json that all Llama-shaped speculators share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.formats.keys import ABSENT, alike, need, part, shown

# Keys that change what an engine's layer computes, and their values that fit our layers. An absent key fits.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "bias": (False, None),  # of q, k, v, o in one engine, of fc in another
    "tie_word_embeddings": (False, None),
    "logit_scale": (1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
OWN = ("hidden_act", "rms_norm_eps", "rope_theta")  # their defaults depend on the model type, and no tensor reveals them
THETA = 10000.0  # the default where a config has none
BY_MEANING = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")  # compared with the target's, in any spelling
GROWS = ("default", "linear", "llama3")  # kinds of RoPE that do not depend on max_position_embeddings, which engines raise to the target's


def llama_config(shape: TargetShape, layer: Any, layers: int) -> dict[str, Any]:
    """The keys for ``layers`` decoder layers like ``layer``, for a target of that shape."""
    rope = {k: v for k, v in shape.rope.items() if k != "partial_rotary_factor"}  # a drafter rotates whole heads, unlike some targets
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": layer.mlp.gate_proj.out_features,
        "num_attention_heads": layer.self_attn.heads,
        "num_key_value_heads": layer.self_attn.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        **rope_keys(rope),
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that must have exactly the value that ``llama_config`` writes."""
    return {key: value for key, value in config.items() if key not in BY_MEANING}


def rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in all three spellings: engines of 2025 read rope_theta and rope_scaling, transformers 5 reads rope_parameters."""
    default = rope.get("rope_type", "default") == "default"
    scaling = None if default else {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {"rope_theta": rope.get("rope_theta", THETA), "rope_scaling": scaling, "rope_parameters": dict(rope)}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE of a config in any spelling, in the form of transformers 5. Raises UserError where two spellings contradict each other."""
    spelled = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = {k: v for k, v in part(config, name).items() if v is not None}
        kind = given.pop("type", None)
        spelled[name] = given | ({} if kind is None else {"rope_type": given.get("rope_type", kind)})
        _agree(name, {"type": kind}, name, {"type": given.get("rope_type")})
    new, old = spelled.values()
    if new and old:
        _agree("rope_scaling", old, "rope_parameters", {key: new.get(key, ABSENT) for key in old})
    top = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for name, given in spelled.items():
        _agree("the folder", top, name, given)
    said = {key: value for key, value in top.items() if value is not None}
    return {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0} | said | old | new


def _agree(here: str, a: Mapping[str, Any], there: str, b: Mapping[str, Any]) -> None:
    """Raises UserError for a key with two different values. (None means that the key is not given.)"""
    for key, value in a.items():
        other = b.get(key)
        if value is not None and other is not None and not alike(value, other):
            other = "nothing" if other is ABSENT else shown(other)
            raise UserError(f"{here} has {key}={shown(value)}, {there} {key}={other}: engines read one or the other")


def llama_arguments(
    config: Mapping[str, Any], shape: TargetShape, kind: str = "llama", fixed: Mapping[str, tuple[Any, ...]] = FIXED
) -> dict[str, Any]:
    """The arguments for the shape of the layers. Head size, norms and RoPE must be the target's, because our drafters use these.

    ``kind``: the model_type whose defaults apply where a key is absent; ``fixed``: keys that may have certain values only.
    Raises UserError naming a key whose value does not fit.
    """
    need(config, fixed)
    said, model_type = {**config, **part(config, "rope_parameters")}, config.get("model_type", kind)
    if model_type != kind and (absent := [key for key in OWN if key not in said]):
        raise UserError(f"the folder has model_type={shown(model_type)} and no {absent[0]}: what stands for it depends on the engine")
    heads = config["num_attention_heads"]
    head_dim, kv_heads = {"llama": (shape.hidden_size // heads, heads), "qwen3": (128, 32)}[kind]  # the defaults of the model type
    rope, here = rope_of(config), rope_of({"rope_parameters": shape.rope}) | {"partial_rotary_factor": 1.0}
    if rope["rope_type"] == here["rope_type"] == "default":  # the other keys have no effect
        rope, here = ({key: r[key] for key in ("rope_theta", "partial_rotary_factor")} for r in (rope, here))
    found = {f"rope {key}" if key == "factor" else key: (rope.get(key), here.get(key)) for key in rope | here}
    found["head_dim"] = (config.get("head_dim") or head_dim, shape.head_dim)
    found["rms_norm_eps"] = (config.get("rms_norm_eps", 1e-6), shape.norm_eps)
    if rope.get("rope_type", "default") not in GROWS:
        found["max_position_embeddings"] = (config.get("max_position_embeddings"), shape.max_positions)
    for key, (theirs, ours) in found.items():
        if not alike(theirs, ours):
            raise UserError(f"it has {key} {shown(theirs)}, expected {shown(ours)}: such a drafter cannot be loaded")
    window = config.get("sliding_window") is not None and config.get("use_sliding_window") is None
    if window or set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise UserError("the folder has layers with a sliding window, which this drafter does not have")
    kv_heads = config.get("num_key_value_heads", kv_heads) or heads
    return {"heads": heads, "kv_heads": kv_heads, "intermediate_size": config["intermediate_size"]}
