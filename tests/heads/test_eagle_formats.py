"""The folders of EAGLE-3 and P-EAGLE with a sliding window, with Qwen3's layers, with an embedding of their own: as engines compute them,
and as the speculators library writes them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from headstart.heads import hub
from tests.drafters import guesses, make
from tests.heads.reference import Reference
from tests.heads.test_formats import compare
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
SLIDING = "sliding_attention"
VARIANTS: list[dict[str, Any]] = [dict(window=6), dict(qk_norm=True, layers=2), dict(window=6, qk_norm=True, layers=2)]


@pytest.mark.parametrize("settings", VARIANTS)
def test_eagle3_as_engines_compute_it(settings: dict[str, Any], tmp_path: Path) -> None:
    drafter = make("eagle", TARGET(), **settings)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    compare(Reference(tmp_path / "s", TARGET().model), "eagle3", drafter, TARGET(), list(drafter.taps))


@pytest.mark.parametrize("head", ["eagle", "peagle"])
def test_the_keys_are_those_that_vllm_reads(head: str, tmp_path: Path) -> None:
    """vLLM 0.32: config/speculative.py, transformers_utils/configs/eagle.py, models/llama.py, models/qwen3_eagle3.py. It reads them through
    the config class of transformers that model_type names, and takes an architecture's name as it is if it begins or ends in Eagle3.
    """
    some: dict[str, Any] = {} if head == "eagle" else dict(depth=4, mask_token=95)
    window = dict(layer_types=[SLIDING] * 2, sliding_window=64, use_sliding_window=True)
    for settings, model_type, name, more in (
        (dict(window=64), "llama", "LlamaForCausalLMEagle3", window),
        (dict(window=64, qk_norm=True), "qwen3", "Eagle3Qwen3ForCausalLM", window),
        (dict(qk_norm=True), "qwen3", "Eagle3Qwen3ForCausalLM", {}),
        ({}, "llama", "LlamaForCausalLMEagle3", {}),
    ):
        drafter: Any = make(head, TARGET(), **(some | dict(layers=2) | settings))
        hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
        config = json.loads((tmp_path / "s" / "config.json").read_text())
        assert config["model_type"] == model_type and config["architectures"] == [name]
        assert {key: config[key] for key in window if key in config} == more
        read = AutoConfig.for_model(**config)
        assert getattr(read, "sliding_window", None) == (64 if more else None)
        assert set(getattr(read, "layer_types", None) or ["full_attention"]) == {SLIDING if more else "full_attention"}
        norms = {key for key in load_file(tmp_path / "s" / "model.safetensors") if "q_norm" in key or "k_norm" in key}
        places = [f"{layer}.self_attn.{x}_norm.weight" for layer in ("midlayer", "layers.1") for x in "qk"]
        assert norms == set(places if model_type == "qwen3" else [])


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings"), [
    ("eagle3", dict(fc_norm=False, norm_before_fc=True, norm_before_residual=True, window=6, window_slides=False)),
    ("eagle3", dict(fc_norm=False, norm_output=False, qk_norm=True, layers=2, window=6, window_slides=False, draft_vocab=[3, 5, 8, 90])),
    ("peagle", dict(fc_norm=False, norm_before_residual=True, qk_norm=True, depth=8, window=8, own_embedding=True, mask_token=95)),
])  # fmt: skip
def test_a_folder_of_the_speculators_library_loads(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """As version 0.9.0 writes it by default; the library itself is asked in test_speculators_eagle.py."""
    drafter: Any = make("peagle" if kind == "peagle" else "eagle", TARGET(), **settings)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    path = tmp_path / "s" / "config.json"
    flat = json.loads(path.read_text())
    qwen3, own = settings.get("qk_norm", False), ("draft_vocab_size", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    layer_keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "tie_word_embeddings",
                  "attention_bias", "layer_types", "sliding_window", "use_sliding_window")  # fmt: skip
    layer = {key: flat[key] for key in layer_keys} | {"model_type": "qwen3" if qwen3 else "llama"}
    said = {key: flat.get(key, False) for key in own} | {"eagle_aux_hidden_state_layer_ids": list(drafter.taps)}
    said |= {"speculators_model_type": kind, "speculators_version": "0.9.0", "speculators_config": {"algorithm": kind}}
    said |= {"transformer_layer_config": layer, "architectures": [f"{kind.title()}DraftModel"], "target_hidden_size": None}
    path.write_text(json.dumps(said | ({"mask_token_id": 95} if kind == "peagle" else {})))
    loaded = hub.load(tmp_path / "s", TARGET().shape)
    loaded.attach(TARGET().ends)
    same = ("window", "window_slides", "qk_norm", "own_embedding", "norm_before_residual", "norm_before_fc", "norm_output", "head")
    assert {key: loaded.config[key] for key in same if key in drafter.config} == {k: v for k, v in drafter.config.items() if k in same}
    for a, b in zip(guesses(loaded, TARGET()), guesses(drafter, TARGET()), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_an_embedding_of_its_own() -> None:
    """It starts as the target's, is trained, and is read in the place of the target's, for the mask too."""
    settings: dict[str, Any] = dict(layers=1, depth=3, mask_token=95)
    plain = make("peagle", TARGET(), **settings)
    own: Any = make("peagle", TARGET(), own_embedding=True, **settings)
    own.start_from(TARGET().ends)
    assert torch.equal(own.embed_tokens.weight, TARGET().ends.embed(torch.arange(96)))
    assert own.size == plain.size + 96 * 32
    own.load_state_dict(plain.state_dict() | {"embed_tokens.weight": own.embed_tokens.weight})
    for a, b in zip(guesses(own, TARGET()), guesses(plain, TARGET()), strict=True):
        assert torch.equal(a, b)
    own.embed_tokens.weight[95] += 1
    same = [torch.equal(a, b) for a, b in zip(guesses(own, TARGET()), guesses(plain, TARGET()), strict=True)]
    assert same == [True, False, False]  # no token of the text is the mask
