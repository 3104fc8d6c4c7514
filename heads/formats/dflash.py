"""The folder of DFlash and the drafters built on it, as vLLM and SGLang load it (Domino: SGLang alone; DFlare: AngelSlim;
DFlash, DFlash 2 and LiLiCorr: TensorRT-LLM too).

Names are Qwen3's without a prefix. Embedding and head are the target's and not in the file; the mask is a token of the target. With a
trimmed vocabulary, the file has the head and the maps of ``heads/vocab.py``, as EAGLE-3's does. Only vLLM reads them. It would not notice
that one is missing in a DFlash folder, so such a folder is refused here.

``target_layer_ids`` count the outputs of layers from 0: one less than our taps. ``is_causal`` is at the top level, where both engines
read it, and holds for all layers. It is always written, because its default differs between the engines. null means that layers with a
sliding window are causal and the others are not: engines then go by ``layer_types`` (heads/formats/windows.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from headstart.heads.base import TargetShape
from headstart.heads.dspark import MARKOV
from headstart.heads.formats import keys, llama
from headstart.heads.formats.blocks import in_llama_cpp, releases
from headstart.heads.formats.keys import agree, architecture, flag, need, part
from headstart.heads.formats.llama import llama_arguments, llama_config
from headstart.heads.formats.llama import read as read
from headstart.heads.formats.windows import window_keys, windows, without_windows
from headstart.heads.serving import Command, llama_cpp, sglang, tensorrt_llm, vllm
from headstart.heads.vocab import ids_of, maps_of

DFLASH, DFLASH2, DSPARK, XPRESS = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "Qwen3XPressModel"
DFLARE = "QwenDFlareDraftModel"  # of AngelSlim, the library of its authors
LILICORR = "LiLiCorrDraftModel"
THEIRS = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "gate.weight": "markov_head.gate_proj.weight",
    "gate.bias": "markov_head.gate_proj.bias",
    "joint.weight": "markov_head.joint_proj.weight",
    "joint.bias": "markov_head.joint_proj.bias",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
    "gru_input.weight": "prefix_gru.weight_ih_l0",
    "gru_state.weight": "prefix_gru.weight_hh_l0",
    "narrow.weight": "embed_proj.0.weight",
    "widen": "embed_proj.2.weight",
    "predecessor.weight": "candidate_selector.predecessor_codebook",
    "successor": "candidate_selector.successor_codebook",
    "slot_projection.weight": "candidate_selector.hidden_projection.weight",
    "token_latent.weight": "xpress_head.w1.weight",
    "slot_latent.weight": "xpress_head.down_h.weight",
    "mean_latent.weight": "xpress_head.down_g.weight",
    "fuse.weight": "xpress_head.in_proj.weight",
    "mixer": "xpress_head.mix.L",
    "mlp.gate_proj.weight": "xpress_head.mlp.gate_proj.weight",
    "mlp.up_proj.weight": "xpress_head.mlp.up_proj.weight",
    "mlp.down_proj.weight": "xpress_head.mlp.down_proj.weight",
    "readout": "xpress_head.w2.weight",
}
LIBRARY = {  # XPress's names in the speculators library -> vLLM's names
    f"refiner_head.{library}": f"xpress_head.{engine}"
    for library, engine in {
        "token_embed.weight": "w1.weight",
        **{f"{name}.weight": f"{name}.weight" for name in ("down_h", "down_g", "in_proj")},
        "mix_l": "mix.L",
        **{f"mlp_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
        "readout.weight": "w2.weight",
    }.items()
}

# Embedding and head are the target's, whether it ties them or not.
LAYERS = {key: values for key, values in llama.FIXED.items() if key != "tie_word_embeddings"}
FIXED: dict[str, tuple[Any, ...]] = {
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (None,),
    "is_neox_style": (True, None),
    "use_aux_hidden_state": (True, None),
    "has_own_lm_head": (False, None),
    "input_embedding_scale": (1.0, None),
    "output_multiplier": (1.0, None),
    "final_logit_softcapping": (None,),
    "dspark_config": (None,),
    "dspark_target_layer_ids": (None,),
}
DSPARK_ONLY: dict[str, tuple[Any, ...]] = {
    "sample_from_anchor": (True, None),
    "markov_head_type": (*MARKOV, None),
    "enable_confidence_head": (True, None),
    "confidence_head_with_markov": (True, None),
}
TRIMMABLE = ("dflash", "jetspec", "dspark")  # may have a trimmed vocabulary
ARCHITECTURE = {"dspark": DSPARK, "dflash2": DFLASH2, "xpress": XPRESS, "dflare": DFLARE, "lilicorr": LILICORR}  # all others: DFLASH
CONV = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}
SELECTOR = {"rank": "selector_rank", "candidates": "selector_top_k"}
LATTICE = {
    ours: f"lilicorr_{theirs}"
    for ours, theirs in {
        "candidates": "candidate_topk",
        "width": "hidden_size",
        "factors": "factor_dim",
        "lattice_layers": "num_layers",
        "lattice_heads": "num_heads",
        "lattice_mlp": "mlp_ratio",
        "logit_scale": "logit_scale",
        "vector_eps": "vector_eps",
    }.items()
}
NUMBERED = {  # names in LiLiCorr's head, as libraries may number its layers -> the names that all engines know
    "lilicorr.feature_mlp.0.": "lilicorr.feature_norm.",
    "lilicorr.feature_mlp.1.": "lilicorr.feature_mlp.up_proj.",
    "lilicorr.feature_mlp.3.": "lilicorr.feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
REFINER = {"rank": ("xpress_rank", 256), "mlp_hidden": ("xpress_mlp_hidden", 512)}  # our setting, vLLM's key, its default
DOMINO_ONLY: dict[str, tuple[Any, ...]] = {"shift_label": (True, None), "pure_draft_prefix_len": (1, None)}
LILICORR_ONLY: dict[str, tuple[Any, ...]] = {"sample_from_anchor": (False, None), "lilicorr_enabled": (True, None)}
ONLY = {"dspark": DSPARK_ONLY, "domino": DOMINO_ONLY, "lilicorr": LILICORR_ONLY}
PROJECTORS = ("dflash", "dspark", "domino", "lilicorr")  # SpecForge's and ModelOpt's values of projector_type


def names(drafter: Any) -> dict[str, str]:
    """Qwen3's names, which ours are; what other drafters add gets its authors' names, which are ours in LiLiCorr."""
    return {name: THEIRS.get(name, name) for name in drafter.state_dict()}


def canonical(name: str) -> str:
    """The engines' name for a name in a file: without the prefix of a whole model, or translated from the speculators library's names."""
    name = LIBRARY.get(name, name.removeprefix("model."))
    if name.startswith("lilicorr."):
        for numbered, named in NUMBERED.items():
            name = name.replace(numbered, named)
    return name


def extras(drafter: Any) -> dict[str, Tensor]:
    """The maps of a trimmed vocabulary."""
    return maps_of(drafter.draft_ids, drafter.shape.vocab_size)


def config(drafter: Any) -> dict[str, Any]:
    """Qwen3's keys. The keys of the block are at the top level for DSpark, in ``dflash_config`` for the others."""
    head, layers = drafter.config["head"], len(drafter.layers)
    keys = llama_config(drafter.shape, drafter.layers[0], layers) | {
        "architectures": [ARCHITECTURE.get(head, DFLASH)],
        "model_type": "qwen3",
        "is_causal": None if drafter.windowed and drafter.window_causal and not drafter.causal else drafter.causal,
        "block_size": drafter.block,
        "num_target_layers": drafter.shape.layers,
    }
    keys |= window_keys(drafter.windowed, layers, drafter.window, drafter.window_slides)
    if drafter.draft_ids is not None:
        keys["draft_vocab_size"] = len(drafter.draft_ids)
    block = {"mask_token_id": drafter.mask_token, "target_layer_ids": [k - 1 for k in drafter.taps]}
    if head == "dspark":
        markov = {"markov_rank": drafter.rank, "markov_head_type": drafter.markov, "sample_from_anchor": True}
        return keys | block | markov | {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if head == "domino":
        block |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
        block |= {"gru_hidden_dim": drafter.gru, "emb_dim": drafter.widen.shape[1]}
    if head == "dflash2":
        block |= {theirs: drafter.config[ours] for ours, theirs in (CONV | SELECTOR).items()}
    if head == "lilicorr":
        sizes = drafter.config | {"width": drafter.width, "factors": drafter.factors}
        block |= {theirs: sizes[ours] for ours, theirs in LATTICE.items()} | {"lilicorr_enabled": True}
        block |= {theirs: drafter.config[ours] or 0 for ours, theirs in CONV.items()}
    if head == "xpress":
        # Engines refine whole blocks in passes. Each pass settles at least one more slot, so with as many passes as slots they guess what
        # step by step drafting guesses. xpress_topc=0: they choose among all tokens, not only among the backbone's likeliest ones.
        keys |= {"xpress_block_size": drafter.block, "xpress_num_passes": drafter.max_depth, "xpress_topc": 0}
        keys |= {theirs: drafter.config[ours] for ours, (theirs, _) in REFINER.items()}
    return keys | {"dflash_config": block}


def recognises(config: dict[str, Any]) -> bool:
    """A folder with one of the architecture names."""
    return _architecture(config) in (DFLASH, *ARCHITECTURE.values())


def _architecture(config: dict[str, Any]) -> str:
    """The architecture's name. SpecForge exports a DSpark under a name that engines use for DeepSeek-V4's; vLLM tells by model_type."""
    name = architecture(config)
    return DSPARK if name == "DSparkDraftModel" and config.get("model_type") == "qwen3" else name


def arguments(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape) -> tuple[str, dict[str, Any]]:
    """Which drafter it is, and its sizes. Raises UserError for keys that would change what engines compute."""
    said = _said(config)
    named = {name: head for head, name in ARCHITECTURE.items()}.get(_architecture(config))
    head = named or ("domino" if said.get("projector_type") == "domino" else "jetspec" if _causal(said) else "dflash")
    need(said, FIXED | {"projector_type": (head, None) if head in PROJECTORS else (None,)})
    need(said, {"num_target_layers": (shape.layers, None), "dspark_noise_token_id": (said["mask_token_id"], None)})
    need(said, ONLY.get(head, {"sample_from_anchor": (False, None)}))
    if head != "jetspec":
        need(said, dict.fromkeys(("is_causal", "causal"), (False, None)))
    found = llama_arguments(without_windows(said), shape, "qwen3", LAYERS) | windows(said)
    if "window" in found and head != "jetspec":  # is_causal=null: layers with a window are causal
        found["window_causal"] = all(said.get(key) is None for key in ("is_causal", "causal"))
    found |= {
        "layers": said["num_hidden_layers"],
        "block": said.get("block_size", 16),
        "taps": [k + 1 for k in keys.layers(said["target_layer_ids"], "target_layer_ids")],
        "mask_token": said["mask_token_id"],
    }
    ids = ids_of(tensors, shape.vocab_size) if head in TRIMMABLE else None
    if head in TRIMMABLE:
        found["draft_vocab"] = ids
    size = (shape.vocab_size, None) if ids is None else (len(ids),)
    need({"draft_vocab_size": said.get("draft_vocab_size")}, {"draft_vocab_size": size})
    if head == "dspark":
        found |= {"rank": said["markov_rank"], "markov": said.get("markov_head_type") or MARKOV[0]}
    if head == "domino":
        found |= {"gru": said["gru_hidden_dim"], "rank": said["emb_dim"]}
    if head == "dflash2":
        found |= {ours: said[theirs] for ours, theirs in (CONV | SELECTOR).items()}
    if head == "lilicorr":
        found |= {ours: said[theirs] for ours, theirs in LATTICE.items()}
        found |= {ours: said.get(theirs) or None for ours, theirs in CONV.items()}  # 0 in engines: no convolutions
        found["width"] = found["width"] or shape.hidden_size
    if head == "xpress":  # the passes of engines, and their number of candidates, decide how close they come, not what the drafter is
        found |= {ours: said.get(theirs, default) for ours, (theirs, default) in REFINER.items()}
        found["block"] = said.get("xpress_block_size") or found["block"]
        need(said, {"block_size": (found["block"],)})
    return head, found


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of both places where engines look. Raises UserError where a key has a different value in each."""
    nested = part(config, "dflash_config")
    for key in sorted(nested.keys() & config.keys()):
        agree(key, config[key], f"dflash_config.{key}", nested[key])
    return config | nested


def _causal(said: dict[str, Any]) -> bool:
    values = {key: flag(said, key) for key in ("is_causal", "causal") if said.get(key) is not None}
    if len(values) == 2:
        agree("is_causal", values["is_causal"], "causal", values["causal"])
    return True in values.values()


def serving(drafter: Any, target: str, folder: str, guesses: int) -> list[Command]:
    """A block is filled in one pass at its trained length, so engines draft all of it, whatever depth is requested."""
    whole, head = drafter.max_depth, drafter.config["head"]
    for_vllm, for_sglang = releases(drafter)
    if head == "domino":
        needs = f"{for_sglang}, CUDA, bf16; it drafts {whole - 1} of the {whole} tokens"
        return [sglang(target, folder, "DFLASH", needs, domino_candidate_pool_size=0)]  # 0: of the whole vocabulary, as trained
    kind = "dspark" if head == "dspark" else "dflash"
    lacks = "" if drafter.config.get("markov", MARKOV[0]) == MARKOV[0] else f"head.markov={MARKOV[0]}"  # SGLang alone has the others
    found = [replace(vllm(target, folder, kind, whole, for_vllm), lacks=lacks)]
    if in_llama_cpp(drafter):
        found.append(llama_cpp(target, folder, f"draft-{kind}", whole, lacks))
    if drafter.draft_ids is not None or head == "xpress":  # SGLang always takes the target's head, and does not know XPress
        return found
    if head == "dspark":
        return [*found, sglang(target, folder, "DSPARK", for_sglang)]
    found.append(sglang(target, folder, "DFLASH", for_sglang, num_draft_tokens=drafter.block))  # includes the last known token
    if head in ("dflash", "dflash2", "lilicorr") and not drafter.windowed:  # TensorRT-LLM has no causal blocks, and other windows
        found.append(tensorrt_llm(target, folder, whole, "a build of its main branch of 2026", kind="DFlash"))
    return found
