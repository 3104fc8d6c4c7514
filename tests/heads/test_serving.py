"""The commands that serve a folder: for every drafter what engines want of it, whole as they would read them."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.engines import WITH, WITHOUT
from headstart.heads.serving import Command, Serving, near, own, serving
from headstart.inference.decoding.target import Target
from tests.drafters import CONF, HEADS, make
from tests.tiny_targets import tiny_target

ROOT = Path(__file__).resolve().parents[2]
MASK = dict(mask_token=5)
OLD = dict(fc_norm=False, norm_output=False)
VOCAB = dict(draft_vocab=[3, 5, 8, 90])
# per drafter and settings: vLLM's method with its guesses of 6 that are asked for, what it is given beside, and all engines
FOUND: list[tuple[str, dict[str, Any], tuple[Any, ...] | None, dict[str, Any], set[str]]] = [
    ("eagle", dict(taps=[1, 3, 4]), ("eagle3", 6), {}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("eagle", dict(taps=[1, 3, 4], **VOCAB), ("eagle3", 6), {}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("eagle", dict(taps=[0, 3, 4]), ("eagle3", 6), {}, {"vLLM"}),
    ("eagle", dict(taps=[1, 3, 6]), None, {}, set()),
    ("eagle", dict(taps=[1, 3, 4], qk_norm=True), ("eagle3", 6), {}, {"vLLM"}),
    ("eagle", dict(taps=[1, 3, 4], window=64), ("eagle3", 6), {}, {"vLLM"}),
    ("eagle", dict(taps=[1, 3, 4], **OLD), ("eagle3", 6), {}, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    ("eagle", dict(taps=[1, 3, 4], **OLD, **VOCAB), ("eagle3", 6), {}, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    ("eagle", dict(taps=[1, 3, 4], **OLD, norm_before_fc=True), ("eagle3", 6), {}, {"vLLM", "SGLang", "llama.cpp"}),
    ("eagle", dict(taps=[1, 3, 4], **OLD, norm_before_residual=True), ("eagle3", 6), {}, {"vLLM", "llama.cpp"}),
    ("eagle", dict(taps=[3, 4], **OLD), ("eagle3", 6), {}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("eagle", dict(taps=[1, 3, 4], layers=2, **OLD), ("eagle3", 6), {}, {"vLLM", "SGLang"}),
    ("eagle1", {}, ("eagle", 6), {}, {"vLLM", "SGLang"}),
    ("medusa", {}, ("medusa", 5), {}, {"vLLM"}),
    ("medusa", VOCAB, None, {}, set()),
    ("mlp_speculator", {}, ("mlp_speculator", 5), dict(draft_tensor_parallel_size=1), {"vLLM", "TGI"}),
    ("mlp_speculator", dict(scale_input=True), ("mlp_speculator", 5), dict(draft_tensor_parallel_size=1), {"vLLM"}),
    ("peagle", dict(layers=1, depth=8, **MASK), ("eagle3", 6), dict(parallel_drafting=True), {"vLLM"}),
    ("peagle", dict(layers=1, depth=4, **MASK), ("eagle3", 4), dict(parallel_drafting=True), {"vLLM"}),
    ("peagle", dict(layers=1, qk_norm=True, window=64, own_embedding=True, **MASK), ("eagle3", 5), dict(parallel_drafting=True), {"vLLM"}),
    ("peagle", dict(layers=1), None, {}, set()),
    ("dflash", dict(layers=2, block=16, **MASK), ("dflash", 15), {}, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    ("dflash", dict(layers=2, block=16, **MASK, **VOCAB), ("dflash", 15), {}, {"vLLM"}),
    ("dspark", dict(layers=2, block=7, **MASK, **VOCAB), ("dspark", 7), {}, {"vLLM", "llama.cpp"}),
    ("dspark", dict(layers=2, block=7, window=64, **MASK), ("dspark", 7), {}, {"vLLM", "SGLang"}),  # llama.cpp has no causal window alone
    ("dspark", dict(layers=2, block=7, window=64, window_causal=False, **MASK), ("dspark", 7), {}, {"vLLM", "SGLang", "llama.cpp"}),
    ("jetspec", dict(layers=2, block=8, window=64, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang", "llama.cpp"}),
    ("jetspec", dict(layers=2, block=8, window=64, window_slides=False, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang"}),
    ("dflash", dict(layers=2, block=16, window=64, window_layers=[0], **MASK), ("dflash", 15), {}, {"vLLM", "SGLang"}),
    ("domino", dict(layers=2, block=7, window=64, **MASK), None, {}, {"SGLang"}),
    ("dflash", dict(layers=2), None, {}, set()),
    ("jetspec", dict(layers=2, block=8, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang", "llama.cpp"}),
    ("dflare", dict(layers=2, block=8, **MASK), None, {}, set()),
    ("dflare", dict(layers=2, block=8), None, {}, set()),
    ("dflash2", dict(layers=2, block=8, candidates=4, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    # more candidates than llama.cpp can pack
    ("dflash2", dict(layers=2, block=8, candidates=32, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("xpress", dict(layers=2, block=8, **MASK), ("dflash", 7), {}, {"vLLM"}),
    ("lilicorr", dict(layers=2, block=8, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang", "TensorRT-LLM"}),
    ("lilicorr", dict(layers=2, block=8, window=16, **MASK), ("dflash", 7), {}, {"vLLM", "SGLang"}),
    ("lilicorr", dict(layers=2, block=8), None, {}, set()),
    ("dspark", dict(layers=2, block=7, **MASK), ("dspark", 7), {}, {"vLLM", "SGLang", "llama.cpp"}),
    ("dspark", dict(layers=2, block=7, markov="gated", window=64, **MASK), None, {}, {"SGLang"}),
    ("dspark", dict(layers=2, block=7, markov="rnn", **MASK), None, {}, {"SGLang"}),
    ("dspark", dict(layers=2, block=7, markov="rnn", **MASK, **VOCAB), None, {}, set()),
    ("domino", dict(layers=2, block=7, **MASK), None, {}, {"SGLang"}),
    ("draft_lm", {}, ("draft_model", 6), {}, {"vLLM", "SGLang", "llama.cpp", "transformers"}),
    ("pard", dict(depth=8), ("draft_model", 6), dict(parallel_drafting=True), {"vLLM", "TensorRT-LLM"}),
    ("pard", dict(depth=4), ("draft_model", 4), dict(parallel_drafting=True), {"vLLM", "TensorRT-LLM"}),
    ("mtp", {}, ("eagle", 6), {}, {"vLLM"}),
    ("mtp", dict(heads=2, kv_heads=2, intermediate_size=80), ("eagle", 6), {}, {"vLLM"}),
    ("mtp", dict(modules=2), None, {}, set()),
    ("mtp", VOCAB, None, {}, set()),
    ("mtp", dict(heads=4), None, {}, set()),
    *((head, {}, None, {}, set()) for head in ("hydra", "redrafter", "exit_head")),
    ("own_mtp", {}, None, {}, set()),  # for a Llama; for other targets: test_own_mtp.py
]
BLOCKS = ("dflash", "jetspec", "dflash2", "domino")
DIR = "runs/it's here/speculator"  # a path that has to be quoted


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_every_drafter_is_in_the_table() -> None:
    assert {head for head, *_ in FOUND} == set(HEADS)


@pytest.mark.parametrize(("head", "changes", "method", "more", "engines"), FOUND, ids=[f"{f[0]}-{i}" for i, f in enumerate(FOUND)])
def test_what_engines_are_asked(head: str, changes: Any, method: Any, more: Any, engines: Any, target: Target, tmp_path: Path) -> None:
    drafter = make(head, target, **changes)
    made = serving(drafter, "org/Model-1B", DIR, depth=6)
    check_readable(made)
    assert {c.engine for c in made.commands[:-2]} == engines and [c.engine for c in made.commands[-2:]] == ["Headstart", "transformers"]
    assert bool(made.unserved) == (not engines)
    asked = [c.speculative for c in made.commands if c.speculative]
    assert asked == ([] if method is None else [{"method": method[0], "model": DIR, "num_speculative_tokens": method[1], **more}])
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    if "block_size" in config and asked:  # a block is as long as it was trained: DSpark guesses from its first slot on
        assert config["block_size"] == method[1] + (method[0] != "dspark")
    if method and method[0] == "medusa":
        assert config["num_heads"] == method[1]


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        (dict(), "head.fc_norm=false head.norm_output=false"),
        (dict(fc_norm=False), "head.norm_output=false"),
        (dict(norm_output=False), "head.fc_norm=false"),
        (OLD, ""),
        (dict(layers=2), ""),  # nothing would help
    ],
)
def test_what_llama_cpp_would_load_is_said(changes: dict[str, Any], lacks: str, target: Target) -> None:
    drafter = make("eagle", target, taps=[1, 3, 4], **changes)
    for kind, rope, told in (
        ("llama", {}, True),
        ("olmo3", {}, False),
        ("llama", {"rope_type": "yarn", "factor": 2, "mscale": 1.0}, False),
    ):
        drafter.shape = replace(drafter.shape, model_type=kind, rope=drafter.shape.rope | rope)
        said = serving(drafter, "T", DIR, 6).otherwise
        assert said == (f"llama.cpp loads such a drafter if it was trained with {lacks}" if lacks and told else "")


def test_what_lacks_a_markov_head_is_said(target: Target) -> None:
    """SGLang has them all, vLLM and llama.cpp the simplest alone. Of a target that SGLang does not serve, or with a trimmed vocabulary,
    none is left.
    """
    vanilla = "trained with head.markov=vanilla"
    for kind, changes, engines, otherwise, unserved in (
        ("llama", dict(), {"vLLM", "SGLang", "llama.cpp"}, "", ""),
        ("llama", dict(markov="rnn"), {"SGLang"}, f"vLLM and llama.cpp load such a drafter if it was {vanilla}", ""),
        ("llama", dict(markov="gated", **VOCAB), set(), "", f"vLLM and llama.cpp load such a drafter if it was {vanilla}"),
        ("olmo3", dict(markov="gated"), set(), "", f"vLLM loads such a drafter if it was {vanilla}"),
        ("gpt2", dict(markov="gated"), set(), "", "none hands the layers of a gpt2 target to a drafter"),
    ):
        drafter = make("dspark", target, layers=2, **MASK, **changes)
        drafter.shape = replace(drafter.shape, model_type=kind)
        made = serving(drafter, "T", DIR, 6)
        assert {c.engine for c in made.commands[:-2]} == engines
        assert (made.otherwise, made.unserved) == (otherwise, unserved)


@pytest.mark.parametrize(
    ("kind", "head", "engines"),
    [
        ("mixtral", "eagle", set()),
        ("gemma3_text", "eagle", set()),  # SGLang hands over the output of a layer's MLP, without the stream it is added to
        ("gemma3_text", "eagle1", {"vLLM", "SGLang"}),
        ("gemma4_text", "eagle", {"vLLM", "SGLang"}),
        ("gemma4_text", "dflash", {"vLLM"}),  # SGLang embeds a block's tokens by the target's module, which scales them
        ("vaultgemma", "eagle1", set()),  # so does vLLM's
        ("vaultgemma", "dflash", set()),
        ("gpt_neox", "eagle1", set()),  # its embedding has another name than vLLM asks for
        ("gpt_neox", "eagle", set()),
        ("granitemoe", "eagle", set()),
        ("glm4_moe", "eagle", {"SGLang"}),
        ("gemma", "eagle", set()),
        ("exaone4", "eagle", set()),
        ("granite", "eagle", {"vLLM"}),
        ("seed_oss", "eagle", {"vLLM"}),
        ("qwen2", "eagle", {"vLLM", "SGLang"}),
        ("qwen3_moe", "eagle", {"vLLM", "SGLang", "TensorRT-LLM"}),
        ("gpt2", "dflash", set()),
        ("olmo3", "dflash", {"vLLM"}),
        ("phi3", "dflash", {"vLLM", "SGLang"}),
        ("glm4_moe_lite", "dflash", {"SGLang"}),
        ("llama4_text", "dflash", {"vLLM", "TensorRT-LLM"}),
        ("gemma3_text", "dflash", set()),
        ("mixtral", "eagle1", {"vLLM"}),
        ("starcoder2", "eagle1", {"vLLM"}),
        ("exaone4", "eagle1", {"vLLM", "SGLang"}),
        ("gemma2", "eagle1", set()),  # vLLM finds no output head to share
        ("cohere2", "mtp", set()),
        ("mixtral", "mtp", {"vLLM"}),
        ("mixtral", "medusa", {"vLLM"}),
        ("mixtral", "draft_lm", {"vLLM", "SGLang", "transformers"}),
        ("qwen3", "dflash", {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
        ("qwen3_moe", "dflash", {"vLLM", "SGLang", "TensorRT-LLM"}),  # llama.cpp's converter fails
        ("qwen3_moe", "draft_lm", {"vLLM", "SGLang", "llama.cpp", "transformers"}),
    ],
)
def test_targets_whose_layers_an_engine_keeps_to_itself(kind: str, head: str, engines: set[str], target: Target) -> None:
    drafter = make(head, target, **{"eagle": dict(taps=[1, 3, 4]), "dflash": dict(layers=2, **MASK)}.get(head, {}))
    drafter.shape = replace(drafter.shape, model_type=kind)
    made = serving(drafter, "org/Model-1B", DIR, depth=6)
    assert {c.engine for c in made.commands[:-2]} == engines
    assert made.unserved == ("" if engines else f"none hands the layers of a {kind} target to a drafter")


@pytest.mark.parametrize(
    ("kind", "engines"),
    [("mistral3", {"vLLM"}), ("qwen3_vl", {"vLLM", "SGLang"}), ("internvl", set()), ("llama", {"vLLM", "SGLang", "TensorRT-LLM"})],
)
def test_a_multimodal_target_is_served_as_a_whole(kind: str, engines: set[str], target: Target) -> None:
    """Engines choose a class by the whole model, whatever its text part is."""
    from transformers import AutoConfig

    drafter = make("eagle", target, taps=[1, 3, 4])
    drafter.attach(replace(target.ends, config=AutoConfig.for_model(kind)))
    made = serving(drafter, "org/Model-1B", DIR, depth=6)
    assert {c.engine for c in made.commands[:-2]} == engines
    assert made.unserved == ("" if engines else f"none hands the layers of a {kind} target to a drafter")
    name, program = "AutoModelForCausalLM" if kind == "llama" else "AutoModelForImageTextToText", made.commands[-1].text
    assert name in program.split("\n")[0] and f"model = {name}.from_pretrained('org/Model-1B')" in program


def test_every_kind_in_the_tables_can_be_a_target() -> None:
    """Targets are causal LMs of transformers, or its multimodal models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kinds = set[str]().union(*WITHOUT.values(), *WITH.values())
    loaded = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    assert kinds & CONFIG_MAPPING_NAMES.keys() <= loaded  # others may come with a later transformers


def test_a_draft_model_that_engines_take_for_mtp_modules(target: Target) -> None:
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, vocab_size=96)
    both = {"vLLM", "SGLang"}
    for kind, without in {"glm4_moe": both, "ernie4_5_moe": both, "qwen3_moe": {"SGLang"}, "llama": set(), "mixtral": set()}.items():
        drafter = hub.build("draft_lm", target.shape, config={"model_type": kind, "head_dim": 16, **small})
        made = {c.engine: c for c in serving(drafter, "org/Model-1B", DIR, depth=6).commands[:-2]}
        run = {"llama.cpp"} if kind == "llama" else set()
        assert made.keys() == {"vLLM", "SGLang", "transformers"} - without | run, kind
        assert ("vLLM" in made and "has experts too" in made["vLLM"].needs) == (kind in ("mixtral", "qwen3_moe"))


def test_a_parallel_draft_model(target: Target) -> None:
    """TensorRT-LLM is told the mask; of a kind that vLLM takes for MTP modules no engine loads it."""
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, vocab_size=96)
    for kind, engines in {"llama": {"vLLM", "TensorRT-LLM"}, "mistral": {"vLLM"}, "glm4_moe": set()}.items():
        drafter = hub.build("pard", target.shape, config={"model_type": kind, "head_dim": 16, **small}, mask_token=7)
        made = serving(drafter, "org/Model-1B", DIR, depth=6)
        assert {c.engine for c in made.commands[:-2]} == engines and ("glm4_moe only for" in made.unserved) == (not engines)
        for command in made.commands:
            if command.engine == "TensorRT-LLM":
                said = yaml.safe_load(shlex.split(command.text)[1])["speculative_config"]
                assert said == {"decoding_type": "PARD", "max_draft_len": 6, "speculative_model_dir": DIR, "mask_token_id": 7}


def test_a_draft_model_with_fewer_positions_than_the_target(target: Target) -> None:
    """SGLang starts it with a context of its own only."""
    small = yaml.safe_load((CONF / "draft_lm.yaml").read_text())["config"]
    for positions, limited in ((target.shape.max_positions // 2, True), (target.shape.max_positions, False)):
        drafter = hub.build("draft_lm", target.shape, config=small | {"max_position_embeddings": positions})
        made = {c.engine: c for c in serving(drafter, "org/Model-1B", DIR, depth=6).commands[:-2]}
        for engine, flag in (("vLLM", "--max-model-len"), ("SGLang", "--context-length"), ("llama.cpp", "-c")):
            assert (shlex.split(made[engine].text)[-2:] == [flag, str(positions)]) == limited
            assert (f"{positions} tokens" in made[engine].needs) == limited


def test_what_a_release_would_do_silently_is_said(target: Target) -> None:
    """SGLang reads is_causal from 0.5.17 on; of a Domino's block it drafts all but the deepest token."""
    block = dict(layers=2, block=7, **MASK)
    of = {head: next(c for c in serving(make(head, target, **block), "T", DIR, 6).commands if c.engine == "SGLang") for head in BLOCKS}
    assert of["jetspec"].needs == "0.5.17 or newer" and of["dflash"].needs == "0.5.11 or newer"
    assert "6 of the 7 tokens" in of["domino"].needs and of["domino"].text.endswith(" --speculative-domino-candidate-pool-size 0")


def test_what_the_norms_of_eagle_3_1_need_is_said(target: Target) -> None:
    """The card and the documentation name the same release of TensorRT-LLM."""
    for changes, needs in ((dict(), "1.3.0rc21 or newer"), (dict(fc_norm=False, norm_output=False), "")):
        drafter = make("eagle", target, taps=[1, 3, 4], **changes)
        said = next(c.needs for c in serving(drafter, "T", DIR, 6).commands if c.engine == "TensorRT-LLM")
        assert (needs in said) and bool(needs) == ("norm_output" in said)
    assert "TensorRT-LLM 1.3.0rc21 or newer" in (ROOT / "docs/engines.md").read_text()


def test_what_a_rope_needs_is_said(target: Target) -> None:
    drafter = make("eagle", target, taps=[1, 3, 4])
    drafter.shape = replace(drafter.shape, rope={"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0})
    needs = {c.engine: c.needs for c in serving(drafter, "org/Model-1B", DIR, depth=6).commands}
    assert needs["vLLM"].endswith("for this rope 0.32 or newer") and needs["SGLang"].endswith("for this rope 0.5.23 or newer")


@pytest.mark.parametrize("said", [{}, {"truncate": True}, {"truncate": False}])
def test_a_rope_that_an_engine_turns_otherwise(said: dict[str, bool], target: Target) -> None:
    """TensorRT-LLM rounds the bounds of yarn's interpolation, whatever gpt-oss's config says."""
    drafter = make("eagle", target, taps=[1, 3, 4])
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64} | said
    drafter.shape = replace(drafter.shape, rope=rope, model_type="gpt_oss")
    engines = {c.engine for c in serving(drafter, "org/Model-1B", DIR, depth=6).commands[:-2]}
    assert engines == {"vLLM", "SGLang"} | ({"TensorRT-LLM"} if said.get("truncate", True) else set())


@pytest.mark.parametrize(("factor", "served"), [(None, True), (0.1 * log(4) + 1, True), (1.0, False)])
def test_a_rope_that_engines_scale_otherwise(factor: float | None, served: bool, target: Target) -> None:
    """They ignore yarn's attention_factor, without a warning."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": factor}
    for head, changes, engines in [
        ("eagle", dict(taps=[1, 3, 4]), {"vLLM", "SGLang", "TensorRT-LLM"}),
        ("peagle", dict(layers=1, **MASK), {"vLLM"}),
        ("dflash", dict(layers=2, **MASK), {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}),
    ]:
        drafter = make(head, target, **changes)
        drafter.shape = replace(drafter.shape, rope=rope)
        made = serving(drafter, "org/Model-1B", DIR, depth=6)
        assert {c.engine for c in made.commands[:-2]} == (engines if served else set())
        assert ("attention_factor" in made.unserved) == (not served)
    drafter = make("medusa", target)  # it turns nothing
    drafter.shape = replace(drafter.shape, rope=rope)
    assert serving(drafter, "org/Model-1B", DIR, depth=6).commands[0].engine == "vLLM"


def test_ropes_of_llama_cpp(target: Target) -> None:
    """Its converter leaves out Llama 3's rope of a block drafter, without a word. (That of EAGLE-3 is converted as a Llama's.)"""
    given = {"eagle": dict(taps=[1, 3, 4], **OLD), "dflash": dict(layers=2, **MASK), "dspark": dict(layers=2, **MASK)}
    for head, changes in given.items():
        for kind in ("default", "linear", "yarn", "llama3"):
            drafter = make(head, target, **changes)
            drafter.shape = replace(drafter.shape, rope={"rope_type": kind, "factor": 2.0})
            served = "llama.cpp" in {c.engine for c in serving(drafter, "T", DIR, 6).commands}
            assert served == (kind != "llama3" or head == "eagle")
            drafter.shape = replace(drafter.shape, rope={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0})
            assert "llama.cpp" not in {c.engine for c in serving(drafter, "T", DIR, 6).commands}


def test_layers_of_ones_own_are_told(target: Target) -> None:
    """TensorRT-LLM reads them from its settings alone; SGLang reads them one too low of some targets."""
    for taps, layers in (([1, 3, 5], [0, 2, 4]), ([2, 3], [1, 2]), ([2, 4, 5], [1, 3, 4])):
        drafter = make("eagle", target, taps=taps)
        for kind, served in (("deepseek_v2", taps[0] == 2), ("glm_moe_dsa", taps[0] == 2), ("llama", True)):
            drafter.shape = replace(drafter.shape, model_type=kind)
            of = {c.engine: c.text for c in serving(drafter, "org/Model-1B", DIR, depth=6).commands}
            assert ("SGLang" in of) == served
        said = yaml.safe_load(shlex.split(of["TensorRT-LLM"])[1])["speculative_config"]
        assert said["eagle3_layers_to_capture"] == layers
    for more in (dict(layers=2), dict(fc_norm=False, norm_before_fc=True)):
        engines = {c.engine for c in serving(make("eagle", target, taps=[1, 3, 4], **more), "org/Model-1B", DIR, depth=6).commands}
        assert "TensorRT-LLM" not in engines and {"vLLM", "SGLang"} <= engines


def check_readable(made: Serving) -> None:
    """As a shell, vLLM, TensorRT-LLM and Python read them."""
    for command in made.commands:
        if command.language == "python":
            names = [n.value for n in ast.walk(ast.parse(command.text)) if isinstance(n, ast.Constant)]
            assert DIR in names and names.count("org/Model-1B") == 2
            continue
        words = shlex.split(command.text)
        named = {"TGI": 0, "llama.cpp": 1 if "draft-simple" in words else 2}  # llama.cpp converts the target, and a drafter that reads it
        assert command.language == "bash" and sum("org/Model-1B" in word for word in words) == named.get(command.engine, 1)
        if command.engine == "vLLM":
            assert words[:3] == ["vllm", "serve", "org/Model-1B"] and words[3] == "--speculative-config" and len(words) == 5
            assert json.loads(words[4]) == command.speculative
        if command.engine == "SGLang" and words[0] == "python":
            flags = dict(zip(words[3::2], words[4::2], strict=True))
            assert flags["--speculative-draft-model-path"] == DIR
            if "--speculative-num-steps" in flags:  # its window counts the last known token
                assert int(flags["--speculative-num-draft-tokens"]) == int(flags["--speculative-num-steps"]) + 1
        if command.engine == "llama.cpp":
            target, draft, serve = command.text.split(" && ")
            assert shlex.split(target)[-1] == "target.gguf" and shlex.split(draft)[-1] == "draft.gguf" and DIR in shlex.split(draft)
            assert shlex.split(serve)[:5] == ["llama-server", "-m", "target.gguf", "-md", "draft.gguf"]
        if command.engine == "TensorRT-LLM":
            said = yaml.safe_load(words[1])["speculative_config"]
            assert said["speculative_model_dir"] == DIR and words[-1] == words[3]
            in_vllm = next(c.speculative for c in made.commands if c.speculative)
            assert said["max_draft_len"] == in_vllm["num_speculative_tokens"]
            kinds = {"eagle3": "Eagle", "dflash": "DFlash", "draft_model": "PARD"}
            assert said["decoding_type"] == kinds[in_vllm["method"]]  # 1.2.1 knows no Eagle3


def test_our_own_command_composes(target: Target) -> None:
    from hydra import compose, initialize_config_dir

    command = serving(make("medusa", target), "/models/a, b=c", DIR, depth=3, attention="eager").commands[-2]
    words = shlex.split(command.text)
    assert words[:3] == ["headstart", "infer", "serve"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("serve", words[3:])
    assert (config.speculator, config.target.path, config.target.attention) == (DIR, "/models/a, b=c", "eager")
    assert config.target.name == "a--b-c"


def test_a_path_by_which_vllm_would_choose_another_method(target: Target, tmp_path: Path) -> None:
    """It obeys four methods whatever the path says; for others the path has to be free of their names."""
    given = {"eagle": dict(taps=[1, 3, 4]), "dflash": dict(layers=2, **MASK), "draft_lm": {}, "medusa": {}}
    for word in ("draft_lm+eagle-tiny", "EAGLE3", "old/dflash", "my-DSpark"):
        folder = tmp_path / "it's here" / word / "speculator"
        folder.mkdir(parents=True)
        for head, changes in given.items():
            command = next(c for c in serving(make(head, target, **changes), "T", str(folder), 3).commands if c.engine == "vLLM")
            *link, serve = command.text.split(" && ")
            assert json.loads(shlex.split(serve)[4]) == command.speculative
            assert bool(link) == (head in ("draft_lm", "medusa"))
            assert command.speculative and command.speculative["model"] == ("draft" if link else str(folder))
            for line in link * 2:  # again, as of an earlier command
                subprocess.run(line, shell=True, check=True, cwd=tmp_path)
                assert (tmp_path / "draft").resolve() == folder
    plain = serving(make("draft_lm", target), "T", "runs/draft_lm+eagle", 3).commands[0]
    assert plain.text.startswith("vllm serve ") and plain.speculative and plain.speculative["model"] == "runs/draft_lm+eagle"


def test_a_run_folder_needs_no_quotes(target: Target) -> None:
    """The doors quote key=a=b for hydra themselves (door/arguments.py)."""
    from headstart.door.arguments import as_typed

    command = own("T", "runs/eagle-tiny-stdlib-steps=40/speculator", "sdpa")[0].text
    assert "speculator=runs/eagle-tiny-stdlib-steps=40/speculator " in command and "'" not in command and '"' not in command
    assert [as_typed(word) for word in shlex.split(command)[3:4]] == ["speculator='runs/eagle-tiny-stdlib-steps=40/speculator'"]


def test_the_copy_for_sglang_has_its_architecture(target: Target, tmp_path: Path) -> None:
    hub.save(make("eagle1", target), tmp_path / "s", target.card, torch.float32)
    command = next(c for c in serving(make("eagle1", target), "T", str(tmp_path / "s"), 3).commands if c.engine == "SGLang")
    copy, rename, launch = command.text.split(" && ")
    subprocess.run(f"{copy} && {rename}", shell=True, check=True)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("s", "s-sglang"))
    assert before.pop("architectures") == ["LlamaForCausalLM"] and after.pop("architectures") == ["LlamaForCausalLMEagle"]
    assert before == after and str(tmp_path / "s-sglang") in shlex.split(launch)


def test_paths_stand_as_one_types_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    assert (
        near(tmp_path / "a" / "b") == "b"
        and near("b") == "b"
        and near(Path.cwd()) == str(Path.cwd())
        and near(tmp_path) == str(tmp_path)
        and near("org/name") == "org/name"
    )


def test_the_documentation_says_what_the_table_says(target: Target) -> None:
    """Each drafter as conf/head has it, with a token for the mask where it has one: what vLLM, SGLang and llama.cpp are started with. (An
    EAGLE-3 for llama.cpp has fewer norms, an MTP module of the target's own kind a target of such a kind.)
    """
    wanted = [c.text for head in HEADS for c in documented(head, target)]
    wanted += [c.text for c in documented("eagle", target, taps=[1, 3, 4], **OLD) + documented("own_mtp", tiny_target("qwen3_5_text"))]
    pages = [(ROOT / page).read_text() for page in ("docs/engines.md", "README.md")]
    assert [text for text in wanted if text not in pages[0]] == []
    said = [line for page in pages for line in page.splitlines() if line.startswith(("vllm serve ", "python -m sglang", "python convert"))]
    assert said and [line for line in said if line.partition("  #")[0].strip() not in wanted] == []


def test_the_shipped_drafter_says_what_the_table_says() -> None:
    from transformers import AutoConfig

    folder = ROOT / "assets" / "tiny_eagle"
    shape = TargetShape.of(AutoConfig.from_pretrained(ROOT / "assets" / "tiny"))
    commands = serving(hub.load(folder, shape), "assets/tiny", "assets/tiny_eagle", depth=5).commands
    said = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith(("vllm", "python -m sglang"))]
    assert said == [c.text for c in commands if c.engine in ("vLLM", "SGLang")]


def documented(head: str, target: Target, **more: Any) -> list[Command]:
    given = yaml.safe_load((CONF / f"{head}.yaml").read_text())  # the tests' own drafters guess fewer
    changes = {key: given[key] for key in ("block", "depth") if given.get(key)} | {key: 5 for key in ("mask_token",) if key in given}
    found = serving(make(head, target, **changes, **more), "TARGET", "DIR", depth=6).commands
    return [c for c in found if c.engine in ("vLLM", "SGLang", "llama.cpp") and c.text.startswith(("vllm ", "python "))]
