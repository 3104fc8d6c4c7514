"""What a target's files say of it without its layers is what the loaded model says, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.errors import UserError
from headstart.inference.decoding import stored
from headstart.inference.decoding.stored import NotStored, StoredTarget
from headstart.inference.decoding.target import Target
from headstart.inference.settings import read_target
from tests.drafters import make
from tests.tiny_targets import ARCHITECTURES, COMMON, OTHERS

# stored as they are; experts stacked and joined; rows and columns exchanged; logits scaled, capped; embeddings scaled
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "llama4_text": {},
    "granite": dict(logits_scaling=8.0, embedding_multiplier=12.0),
    "cohere": dict(logit_scale=0.25),
    "hyperclovax": dict(logits_scaling=0.25),
    "gemma2": dict(final_logit_softcapping=30.0, sliding_window=16, query_pre_attn_scalar=16),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=256),
}

FEW = ("llama", "deepseek_v3", "gemma2", "gpt2")  # the others add little to these


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A random target with a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    settings = {**COMMON, **(ARCHITECTURES | OTHERS).get(family, {}), **FAMILIES.get(family, {}), **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def check_same(found: StoredTarget, loaded: Target) -> None:
    assert found.fingerprint == loaded.fingerprint and found.card == loaded.card
    for key in ("shape", "name", "dtype", "device", "tokenizer_sha"):
        assert getattr(found, key) == getattr(loaded, key), key
    assert torch.equal(found.ends.head_VD, loaded.ends.head_VD) and found.ends.head_VD.dtype == loaded.dtype
    tokens = torch.arange(96)
    assert torch.equal(found.ends.embed(tokens), loaded.ends.embed(tokens))
    assert (found.ends.softcap, found.ends.scaled) == (loaded.ends.softcap, loaded.ends.scaled)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target is an error."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [pytest.param(each, marks=() if each in FEW else pytest.mark.slow) for each in FAMILIES])
def test_the_files_say_what_the_model_says(family: str, tied: bool, tmp_path: Path) -> None:
    folder, weights = str(save(tmp_path, family, tie_word_embeddings=tied)), set[str]()
    for dtype in ("auto", "bfloat16"):
        how = {"dtype": dtype, "device": "cpu", "attention": "eager"}
        found = StoredTarget(folder, **how)
        weights.add(found.fingerprint["weights"])
        check_same(found, Target.load(folder, **how))  # type: ignore[arg-type]
        same_table = found.ends.embed.weight.data_ptr() == found.ends.head_VD.data_ptr()
        assert same_table == (tied and not found.ends.scaled)  # once in memory
    assert len(weights) == 1  # it is the same target in every dtype


@pytest.mark.parametrize(("wrapper", "family"), [("gemma3", "gemma3_text"), ("llama4", "llama4_text")])
def test_a_multimodal_folder(wrapper: str, family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    save(tmp_path, family)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    text = COMMON | (ARCHITECTURES | OTHERS)[family] | {"model_type": family}
    config = AutoConfig.for_model(wrapper, text_config=text, vision_config=vision, tie_word_embeddings=wrapper == "gemma3")
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    check_same(StoredTarget(str(tmp_path), device="cpu"), Target.load(str(tmp_path), device="cpu"))


def test_several_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, parts = save(tmp_path / "whole", "mixtral"), save(tmp_path / "parts", "mixtral")
    model = AutoModelForCausalLM.from_pretrained(whole)
    (parts / "model.safetensors").unlink()
    model.save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 3
    found = StoredTarget(str(parts), device="cpu")
    assert found.fingerprint == StoredTarget(str(whole), device="cpu").fingerprint
    check_same(found, Target.load(str(parts), device="cpu"))


def test_tables_that_differ_though_the_config_ties_them(tmp_path: Path) -> None:
    """transformers believes the files."""
    save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    found = StoredTarget(str(tmp_path), device="cpu")
    assert not torch.equal(found.ends.embed.weight, found.ends.head_VD)
    check_same(found, Target.load(str(tmp_path), device="cpu"))


def test_a_tied_table_that_is_stored_under_the_name_of_the_head(tmp_path: Path) -> None:
    path = save(tmp_path, tie_word_embeddings=True) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    check_same(StoredTarget(str(tmp_path), device="cpu"), Target.load(str(tmp_path), device="cpu"))


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    save(snapshot)
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):  # as the hub's cache keeps them
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(stored, "hub_answers", lambda: False)
    found = StoredTarget("a/b", device="cpu")
    assert found.name == "a/b" and found.fingerprint == StoredTarget(str(snapshot), device="cpu").fingerprint


@pytest.mark.usefixtures("unloaded")
def test_of_the_layers_a_few_values_are_read(tmp_path: Path) -> None:
    """Everything behind them may be nonsense; another first value is another target."""
    path = save(tmp_path, "mixtral") / "model.safetensors"
    found, tensors = StoredTarget(str(tmp_path), device="cpu"), load_file(path)
    first = {name: tensor.clone() for name, tensor in tensors.items() if "layers" in name}
    for tensor in first.values():
        tensor.flatten()[64:] = float("nan")
    save_file(tensors | first, path, metadata={"format": "pt"})
    assert StoredTarget(str(tmp_path), device="cpu").fingerprint == found.fingerprint
    name = next(name for name in first if ".experts.0." in name and "w1" in name)
    first[name].view(-1)[63] += 1
    save_file(tensors | first, path, metadata={"format": "pt"})
    assert StoredTarget(str(tmp_path), device="cpu").fingerprint != found.fingerprint


def test_the_model_is_loaded_by_who_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(tmp_path))
    found, loaded = StoredTarget(folder, device="cpu"), Target.load(folder, device="cpu")
    eagle, exits = make("eagle", loaded), make("exit_head", loaded)
    eagle.attach(found.ends)
    assert "loading the layers" not in capsys.readouterr().out
    exits.attach(found.ends)  # which shares the target's first layers
    assert capsys.readouterr().out == f"loading the layers of {folder}, of which a drafter is made ...\n"
    assert found.opened() is found.opened() and found.ends.model is found.opened().model
    assert found.ends.head_VD is found.opened().ends.head_VD  # not twice in memory


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": None}, "its config does not say its dtype"),
        ({"transformers_weights": "model.safetensors"}, "quantised, or stored in another way"),
    ],
)
def test_what_files_do_not_say_is_loaded(change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a line says why."""
    path = save(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(NotStored, match=says):
        StoredTarget(str(tmp_path), device="cpu")
    settings = {"name": "mine", "path": str(tmp_path), "dtype": "auto", "device": "cpu", "attention": "sdpa", "config": None}
    assert isinstance(read_target(settings), Target)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("target mine is loaded with its layers: ") and says in said[0]


def test_files_that_lack_something_are_refused_as_ever(tmp_path: Path) -> None:
    path = save(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    settings = {"name": "mine", "path": str(tmp_path), "dtype": "auto", "device": "cpu", "attention": "sdpa", "config": None}
    with pytest.raises(UserError, match=r"its weights lack model\.layers\.3\.mlp\.up_proj\.weight"):
        read_target(settings)
