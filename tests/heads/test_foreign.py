"""Folders that others have written: every key that changes what an engine computes is taken over or refused, never passed over."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads import formats, hub
from headstart.heads.errors import UserError
from tests.drafters import SERVED, make
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
SMALL: dict[str, dict[str, Any]] = {"eagle": dict(taps=[1, 3, 5]), "dflash": dict(layers=1, block=4, mask_token=95)}
SMALL |= SERVED | {"dspark,rnn": SERVED["dspark"]}
LLAMA = [head for head in SMALL if head not in ("medusa", "mlp_speculator")]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As engines' own tools would leave them: without our block."""
    found = {}
    for head, settings in SMALL.items():
        folder = found[head] = tmp_path_factory.mktemp(head)
        hub.save(make(head, TARGET(), **settings), folder, TARGET().card, torch.float32)
        config = json.loads((folder / "config.json").read_text())
        del config["headstart"]
        if head == "eagle1":
            config["architectures"] = ["LlamaForCausalLMEagle"]
        (folder / "config.json").write_text(json.dumps(config))
        hub.load(folder, TARGET().shape)
    return found


def test_a_folder_is_of_one_format(folders: dict[str, Path]) -> None:
    """No two modules of heads/formats take the same config.json for theirs, so their order does not matter."""
    modules = [importlib.import_module(f"{formats.__name__}.{path.stem}") for path in Path(formats.__file__).parent.glob("[a-z]*.py")]
    found = {}
    for head, folder in folders.items():
        config = json.loads((folder / "config.json").read_text())
        (found[head],) = (m.__name__.rpartition(".")[2] for m in modules if hasattr(m, "recognises") and m.recognises(config))
    assert found == {head: make(head, TARGET(), **SMALL[head]).format for head in SMALL}
    assert set(found.values()) == {m.__name__.rpartition(".")[2] for m in modules if hasattr(m, "recognises")}


def changed(folder: Path, copy: Path, **changes: Any) -> Path:
    """``...``: the key is taken away. A dictionary is laid over the one that is there."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for key, value in changes.items():
        old = config.pop(key, None)
        if value is not ...:
            config[key] = {**(old or {}), **value} if isinstance(value, dict) else value
    (copy / "config.json").write_text(json.dumps(config))
    return copy


COMMON: list[tuple[dict[str, Any], str]] = [
    (dict(hidden_act="gelu"), "hidden_act='gelu', this drafter needs 'silu'"),
    (dict(attention_bias=True), "attention_bias=True"),
    (dict(mlp_bias=True), "mlp_bias=True"),
    (dict(bias=True), "bias=True"),
    (dict(logit_scale=0.5), r"logit_scale=0\.5"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config=.*fp8"),
    (dict(rope_theta=5e5), r"the folder has rope_theta=500000\.0, rope_parameters rope_theta=10000\.0: engines read one or the other"),
    (dict(rope_theta=5e5, rope_parameters=...), r"rope_theta 500000\.0, expected 10000\.0"),
    (dict(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}), r"rope_theta 500000\.0, expected 10000\.0"),
    (dict(rope_scaling={"type": "yarn", "factor": 2.0}), "rope_scaling has factor=2.0, rope_parameters factor=nothing"),
    (dict(rope_scaling={"type": "yarn", "factor": 2.0}, rope_parameters=...), "rope_type 'yarn', expected 'default'"),
    (dict(rope_parameters={"type": "linear", "rope_type": "default"}), "rope_parameters has type='linear', rope_parameters type='default'"),
    (dict(partial_rotary_factor=0.5), r"partial_rotary_factor 0\.5, expected 1\.0"),
    (dict(rms_norm_eps=0.1), "rms_norm_eps 0.1"),
    (dict(head_dim=8), "head_dim 8, expected 16"),
    (dict(num_attention_heads=0), "of the wrong kind"),
    (dict(num_attention_heads="2"), "num_attention_heads|heads must be|wrong kind"),
    (dict(model_type="qwen2", rms_norm_eps=...), "model_type='qwen2' and no rms_norm_eps"),
    (dict(layer_types=["sliding_attention"]), "sliding window"),
    (dict(sliding_window=8, use_sliding_window=...), "sliding window"),
    (dict(use_sliding_window=True), "use_sliding_window=True"),
    (dict(num_hidden_layers=2), "is missing|num_hidden_layers=2"),
    (dict(architectures=[5]), r"architectures must be a list of names, found \[5\]"),
    (dict(architectures=5), "architectures must be a list of names, found 5"),
    (dict(architectures="LlamaForCausalLM"), "architectures must be a list of names"),
    (dict(architectures=["\ud800"]), "neither saved by Headstart nor a known speculator format"),
    (dict(hidden_size="\ud800"), r"hidden size '\\ud800'"),
]
WINDOW = dict(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=True)
OWN: list[tuple[str, dict[str, Any], str]] = [
    ("eagle", dict(tie_word_embeddings=True), "tie_word_embeddings=True"),
    ("eagle1", dict(tie_word_embeddings=True), "tie_word_embeddings=True"),
    ("eagle", dict(norm_before_residual="yes"), "norm_before_residual='yes', this drafter needs True or False"),
    ("eagle", dict(norm_before_fc=True, fc_norm=True), "head.norm_before_fc is one norm over all"),
    ("eagle", dict(norm_before_fc=True, fc_norm=False), "input_norm.weight"),
    ("eagle", dict(eagle_config={"norm_before_fc": True}, norm_before_fc=False), "norm_before_fc=False, this drafter needs True"),
    ("peagle", dict(norm_before_residual="yes"), "norm_before_residual='yes', this drafter needs True or False"),
    ("peagle", dict(norm_before_fc=True, fc_norm=False), "input_norm.weight"),
    ("peagle", WINDOW | dict(sliding_window_from_anchor=True), "this drafter counts its window from each row"),
    ("peagle", WINDOW | dict(sliding_window=7), r"head\.window=7 must be at least head\.depth=8"),
    ("eagle", WINDOW | dict(sliding_window_from_anchor="no"), "sliding_window_from_anchor='no', this drafter needs True or False"),
    ("eagle", WINDOW | dict(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]), "in some of its layers"),
    ("eagle", WINDOW | dict(use_sliding_window=False), "use_sliding_window=False, this drafter needs True"),
    ("eagle", dict(architectures=["Eagle3Qwen3ForCausalLM"]), "self_attn.k_norm.weight is missing"),
    ("eagle1", WINDOW, "sliding window|use_sliding_window"),
    ("eagle", dict(eagle_config={"use_aux_hidden_state": False}), r"eagle_config\.use_aux_hidden_state=False"),
    ("eagle", dict(eagle_config={"new": 1}), r"eagle_config\.new=1, which is not known here"),
    ("eagle", dict(eagle_config=[1]), "eagle_config must be a dictionary"),
    ("eagle", dict(fc_norm="false"), "fc_norm='false', this drafter needs True or False"),
    ("eagle", dict(use_aux_norm=False), "use_aux_norm=False"),
    ("eagle", dict(draft_vocab_size=50), "draft_vocab_size=50, its tensors a vocabulary of 96"),
    ("eagle", dict(draft_vocab_size=None), "draft_vocab_size=None"),
    ("eagle", dict(target_hidden_size=64), "target_hidden_size=64"),
    ("eagle", dict(num_aux_hidden_states=4), "num_aux_hidden_states=4, this drafter needs 3"),
    ("eagle", {IDS: [1, 2, 5]}, rf"{IDS}=\[1, 2, 5\], but eagle_config\.{IDS}=\[0, 2, 4\], which are layers \[1, 3, 5\]"),
    ("eagle", {IDS: [], "eagle_config": ...}, rf"{IDS}=\[\], expected a list of layers"),
    ("eagle", {IDS: ..., "eagle_config": {IDS: [0, 2, -1]}}, "expected a list of layers"),
    ("eagle", dict(target_layer_ids=[1, 2]), "target_layer_ids"),
    ("peagle", dict(pard_token=3), "pard_token=3, this drafter needs 95"),
    ("eagle1", dict(num_hidden_layers=2), "num_hidden_layers=2, this drafter needs 1"),
    ("eagle1", dict(hot_vocab_size=8), "hot_vocab_size=8"),
    ("dflash", dict(dflash_config={"causal": True}), "is_causal=False, but causal=True"),
    ("dflash", dict(mask_token_id=3), r"mask_token_id=3, but dflash_config\.mask_token_id=95"),
    ("dflash", dict(dflash_config={"target_layer_ids": []}), "expected a list of layers"),
    ("dflash", dict(dflash_config={"use_swa": True}), "use_swa=True"),
    ("dflash", WINDOW | dict(layer_types=["sliding_attention"] * 2), "layer_types=.*each layer its type"),
    ("dflash", WINDOW | dict(layer_types=["chunked_attention"]), "use_sliding_window=True"),
    ("dflash", WINDOW | dict(sliding_window="8"), "sliding_window='8'"),
    ("dflash", WINDOW | dict(sliding_window=3), r"head\.window=3 must be at least head\.block=4"),
    ("dflash", WINDOW | dict(use_sliding_window=...), "use_sliding_window=None, this drafter needs True"),
    ("dflash", WINDOW | dict(dflash_config={"swa_window_size": 9}), "swa_window_size=9, this drafter needs 8"),
    ("dflash2", WINDOW | dict(dflash_config={"causal": True}), "is_causal=False, but causal=True|causal=True"),
    ("dflash", dict(dflash_config={"sample_from_anchor": True}), "sample_from_anchor=True"),
    ("dflash", dict(dflash_config={"projector_type": "other"}), "projector_type='other', this drafter needs 'dflash' or None"),
    ("dspark", dict(dflash_config={"projector_type": "domino"}), "projector_type='domino', this drafter needs 'dspark' or None"),
    ("dflash2", dict(dflash_config={"projector_type": "dspark"}), "projector_type='dspark', this drafter needs None$"),
    ("dflash", dict(dflash_config={"output_multiplier": 2.0}), r"output_multiplier=2\.0"),
    ("dflash", dict(num_target_layers=9), "num_target_layers=9"),
    ("dflash", dict(block_size=10**9), "block=1000000000 does not fit"),
    ("dflare", WINDOW, "window"),
    ("dflare", dict(is_causal=True), "is_causal=True"),
    ("dflare", dict(draft_vocab_size=50), "draft_vocab_size=50"),
    ("dflash2", dict(dflash_config={"selector_top_k": 200}), r"head\.candidates must be from 1 to the target's 96 tokens, found 200"),
    ("dflash2", dict(dflash_config={"selector_rank": 4}), "selector"),
    ("dflash2", dict(dflash_config={"conv_group_size": 8}), "kernel_projection"),
    ("dflash2", dict(is_causal=True), "is_causal=True"),
    ("lilicorr", dict(dflash_config={"lilicorr_enabled": False}), "lilicorr_enabled=False, this drafter needs True or None"),
    ("lilicorr", dict(dflash_config={"lilicorr_logit_scale": "8"}), r"head\.logit_scale must be a number, found '8'"),
    ("lilicorr", dict(dflash_config={"lilicorr_candidate_topk": 12}), r"head\.candidates=12: engines take"),
    ("lilicorr", dict(dflash_config={"lilicorr_factor_dim": 16}), r"lilicorr\.\w+\.\w+"),
    ("lilicorr", dict(dflash_config={"conv_kernel_size": 2, "conv_group_size": 8}), "attention_conv"),
    ("lilicorr", dict(dflash_config={"conv_kernel_size": 2}), r"head\.conv_taps=2 and head\.conv_group=None"),
    ("lilicorr", dict(has_own_lm_head=True), "has_own_lm_head=True"),
    ("lilicorr", dict(is_causal=True), "is_causal=True"),
    ("xpress", dict(xpress_block_size=3), "block_size=4, this drafter needs 3"),
    ("xpress", dict(xpress_rank=20), r"head\.rank=20: engines take powers of two from 16 on"),
    ("xpress", dict(xpress_rank=32), "xpress_head"),
    ("xpress", dict(xpress_mlp_hidden=...), r"xpress_head\.mlp\.\w+_proj\.weight"),
    ("xpress", dict(sample_from_anchor=True), "sample_from_anchor=True"),
    ("xpress", dict(is_causal=True), "is_causal=True"),
    ("dspark", dict(markov_head_type="lstm"), "markov_head_type='lstm', this drafter needs 'vanilla' or 'gated' or 'rnn' or None"),
    ("dspark", dict(markov_head_type="gated"), r"markov_head\.gate_proj\.bias is missing \(2 missing, 0 unknown\)"),
    ("dspark,rnn", dict(markov_head_type=None), r"markov_head\.joint_proj\.bias is not a tensor of this drafter"),
    ("dspark,rnn", dict(markov_head_type="gated"), r"markov_head\.gate_proj\.bias is missing \(2 missing, 2 unknown\)"),
    ("dspark", dict(dspark_config={"markov_rank": 4}), "dspark_config"),
    ("dspark", dict(dspark_noise_token_id=3), "dspark_noise_token_id=3, this drafter needs 95 or None"),
    ("dspark", dict(mask_token_id=...), "mask_token_id"),
    ("dspark", dict(is_causal=True), "is_causal=True"),
    ("domino", dict(dflash_config={"pure_draft_prefix_len": 2}), "pure_draft_prefix_len=2"),
    ("medusa", dict(medusa_num_heads=3), "medusa_num_heads=3, but num_heads=2"),
    ("medusa", dict(original_lm_head=True), "original_lm_head=True"),
    ("medusa", dict(medusa_fc_bias="yes"), "medusa_fc_bias='yes'"),
    ("mlp_speculator", dict(emb_dim=...), "emb_dim=None"),
    ("mlp_speculator", dict(scale_input="no"), "scale_input='no'"),
    ("mlp_speculator", dict(n_predict=2), "n_predict=2, but 3 numbers in top_k_tokens_per_head"),
]


@pytest.mark.parametrize("head", LLAMA)
def test_what_every_llama_has(head: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for i, (changes, message) in enumerate(COMMON):
        with pytest.raises(UserError, match=message) as e:
            hub.load(changed(folders[head], tmp_path / str(i), **changes), TARGET().shape)
        assert "\n" not in str(e.value) and str(tmp_path) in str(e.value), changes


@pytest.mark.parametrize(("head", "changes", "message"), OWN, ids=range(len(OWN)))
def test_what_each_format_has(head: str, changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        hub.load(changed(folders[head], tmp_path / "s", **changes), TARGET().shape)


def test_rope_of_a_target_that_is_scaled(tmp_path: Path) -> None:
    """In the spelling of old configs, which transformers keeps beside its own."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    target = tiny_target(rope_scaling=dict(yarn), rope_theta=5e5)
    assert target.shape.rope["type"] == target.shape.rope["rope_type"] == "yarn"
    hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
    hub.load(tmp_path / "s", target.shape, target.card)
    with pytest.raises(UserError, match="rope_type 'yarn', expected 'default'"):
        hub.load(tmp_path / "s", TARGET().shape)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    del config["headstart"], config["rope_parameters"]
    for name, scaling, says in (
        ("old", yarn, ""),
        ("other", yarn | {"factor": 8.0}, r"rope factor 8\.0, expected 4\.0"),
        ("none", None, "rope_type"),
    ):
        folder = shutil.copytree(tmp_path / "s", tmp_path / name)
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
        if not says:
            hub.load(folder, target.shape)
            continue
        with pytest.raises(UserError, match=says):
            hub.load(folder, target.shape)


def test_what_changes_nothing_is_no_reason(folders: dict[str, Path], tmp_path: Path) -> None:
    """Keys with their defaults, other spellings of the same, the embedding of a target that ties it."""
    nvidia = {"next_layer_regular": True, "use_last_layernorm": True, "parallel_draft_step": 1, "use_aux_hidden_state": True}
    for i, (head, changes) in enumerate(
        [
            ("eagle", dict(eagle_config=nvidia, hidden_act="swish", logit_scale=1.0, target_hidden_size=32, quantization_config=None)),
            ("eagle", dict(rope_parameters=..., rope_scaling=..., model_type="qwen2", sliding_window=4096, use_sliding_window=False)),
            ("eagle", dict(rope_theta=..., rope_scaling=..., attention_bias=..., mlp_bias=..., num_aux_hidden_states=...)),
            ("eagle", dict(architectures=["LlamaForCausalLM"])),  # its authors'
            ("eagle", dict(mask_token_id=None)),
            ("dflash", dict(tie_word_embeddings=True, mask_token_id=95, num_target_layers=...)),
            ("dflash", dict(dflash_config={"projector_type": "dflash"})),  # SpecForge's
            ("dspark", dict(dspark_noise_token_id=95)),
            ("dspark", dict(dflash_config={"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0})),
            ("medusa", dict(medusa_num_heads=2, num_heads=..., medusa_num_layers=1)),
        ]
    ):
        folder = changed(folders[head], tmp_path / str(i), **changes)
        loaded = hub.load(folder, TARGET().shape)
        assert not hub.is_language_model(folder)
        expected = hub.load(folders[head], TARGET().shape)
        assert loaded.config == expected.config
        assert all(torch.equal(v, expected.state_dict()[k]) for k, v in loaded.state_dict().items())


@pytest.mark.parametrize("head", ["dspark", "dspark,rnn"])
def test_a_dspark_as_specforge_exports_it(head: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Before its own script makes it ready for engines. DeepSeek-V4's have the same name."""
    config = json.loads((folders[head] / "config.json").read_text())
    keys = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    block = {key: config[key] for key in keys} | {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"}
    without = dict.fromkeys([*keys, "sample_from_anchor", "is_causal"], ...)
    raw: dict[str, Any] = without | dict(architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"})
    loaded = hub.load(changed(folders[head], tmp_path / "raw", **raw, dflash_config=block), TARGET().shape)
    expected = hub.load(folders[head], TARGET().shape)
    assert loaded.config == expected.config
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in loaded.state_dict().items())
    with pytest.raises(UserError, match="neither saved by Headstart nor a known speculator format"):
        hub.load(changed(folders[head], tmp_path / "v4", **raw | dict(model_type="deepseek_v4"), dflash_config=block), TARGET().shape)


@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_tensors_that_are_no_weights(head: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[head], tmp_path / "s")
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = max(whole)
    for kind in (torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64, torch.complex64):
        word = str(kind).removeprefix("torch.")
        save_file(whole | {name: whole[name].to(kind)}, path)
        with pytest.raises(UserError, match=rf"model\.safetensors: {name} is {word}, weights are float32, bfloat16, float16"):
            hub.load(folder, TARGET().shape)
        save_file({k: v.to(kind) for k, v in whole.items()}, path)  # all of them
        with pytest.raises(UserError, match=f"is {word}"):
            hub.load(folder, TARGET().shape)
    for value in (float("nan"), float("inf")):
        for place in (0, whole[name].numel() // 2, -1):
            planted = whole[name].clone()
            planted.view(-1)[place] = value
            save_file(whole | {name: planted}, path)
            with pytest.raises(UserError, match=rf"{name} holds NaN or infinite values"):
                hub.load(folder, TARGET().shape)
    save_file(whole | {f"model.{name}": whole[name].clone()}, path)
    if head == "eagle":
        with pytest.raises(UserError, match=f"{name} is there twice"):
            hub.load(folder, TARGET().shape)


def test_tensors_of_several_types_are_not_rounded(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["eagle"], tmp_path / "s")
    whole = load_file(folder / "model.safetensors")
    save_file({k: v if "norm" in k else v.bfloat16() for k, v in whole.items()}, folder / "model.safetensors")
    loaded = hub.load(folder, TARGET().shape).state_dict()
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor if "norm" in name else tensor.bfloat16().float())


def test_maps_are_whole_numbers(tmp_path: Path) -> None:
    hub.save(make("eagle", TARGET(), draft_vocab=[1, 5, 9]), tmp_path / "s", TARGET().card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    del config["headstart"]
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "s" / "model.safetensors"
    whole = load_file(path)
    save_file(whole | {"d2t": whole["d2t"].int()}, path)
    ids = hub.load(tmp_path / "s", TARGET().shape).unembedding(1).ids_V
    assert ids is not None and ids.tolist() == [1, 5, 9]
    for name, kind in (("d2t", torch.float32), ("d2t", torch.bool), ("t2d", torch.float32), ("t2d", torch.int64)):
        save_file(whole | {name: whole[name].to(kind)}, path)
        with pytest.raises(UserError, match=rf"{name}|draft_vocab_size|draft vocabulary"):
            hub.load(tmp_path / "s", TARGET().shape)
