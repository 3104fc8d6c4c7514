"""Save and load of every drafter, and what is refused."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import files, hub, seal
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from tests.drafters import HEADS, MADE, depth_of, fresh, make, random_tokens, roots_of
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
DTYPES = [torch.float32, torch.bfloat16]
CARD = {"model_type": "llama", "hidden_size": 32, "layers": 6, "vocab_size": 96, "tokenizer": "abc"}


@torch.no_grad()
def drafts(drafter: Drafter, target: Target) -> list[Tensor]:
    roots = roots_of(target, drafter, torch.tensor([random_tokens(12, 1)]))
    dtype = next(drafter.parameters()).dtype
    roots.states = {tap: s.to(dtype) for tap, s in roots.states.items()}
    out = unroll(drafter, roots, None, depth_of(drafter))
    return [drafter.unembedding(d).logits(x.hidden_BNH) for d, x in enumerate(out, start=1)]


def saved(head: str, folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    drafter = make(head, TARGET())
    hub.save(drafter, folder, CARD, dtype)
    return drafter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", MADE)
def test_loading_back_is_bit_equal(head: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target, folder = TARGET(), tmp_path / "run" / "speculator"
    drafter = saved(head, folder, dtype)
    loaded = hub.load(folder, target.shape, CARD)
    assert type(loaded) is type(drafter) and loaded.config == drafter.config
    ours, theirs = drafter.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == dtype and torch.equal(theirs[name], tensor.to(dtype)), name
    loaded.attach(target.ends)
    for a, b in zip(drafts(drafter.to(dtype), target), drafts(loaded.eval(), target), strict=True):
        assert torch.equal(a, b)
    again = tmp_path / "again"
    hub.save(loaded, again, CARD, dtype)
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("head", HEADS)
def test_config_says_what_the_folder_is(head: str, tmp_path: Path) -> None:
    drafter = saved(head, tmp_path / "s", torch.bfloat16)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["headstart"]["head"] == head and config["headstart"]["target"] == CARD
    assert config["headstart"]["arguments"] == json.loads(json.dumps({k: v for k, v in drafter.config.items() if k != "head"}))
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and config["vocab_size"] == 96
    assert len(config["architectures"]) == 1
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    plain = config["headstart"]["format"] in ("causal_lm", "pard")
    own = ["config.json", "generation_config.json", "model.safetensors"] if plain else ["config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == own
    if not plain:  # the target's embedding stays with the target
        assert not any("embed_tokens" in k for k in tensors)
    weights = hashlib.sha256((tmp_path / "s" / "model.safetensors").read_bytes()).hexdigest()
    assert config["headstart"]["sha256"]["model.safetensors"] == weights


def test_who_fine_tuned_with_one_token_more_is_told_what_to_do() -> None:
    """Trainers add a pad token, and the drafter that is to be trained further is refused for it."""
    cure = r"\. If tokens were only added to it, such as a pad token, put the earlier tokenizer's files beside the target's weights$"
    with pytest.raises(UserError, match=r"tokenizer is xyz here, .* in training" + cure):
        hub.check_target(CARD, CARD | {"tokenizer": "xyz"}, "DIR")
    with pytest.raises(UserError, match=r"tokenizer is xyz here, [^.]* in training$"):  # more differs: it is another target
        hub.check_target(CARD, CARD | {"tokenizer": "xyz", "vocab_size": 100}, "DIR")


@pytest.mark.parametrize("head", HEADS)
def test_another_target_is_refused_by_name(head: str, tmp_path: Path) -> None:
    saved(head, tmp_path / "s")
    shape = TARGET().shape
    for key, value in (("hidden_size", 64), ("vocab_size", 100), ("tokenizer", "xyz"), ("layers", 7), ("model_type", "other")):
        with pytest.raises(UserError, match=f"another target: {key} is {value} here, {CARD[key]} in training"):
            hub.load(tmp_path / "s", shape, CARD | {key: value})
    for key, value in (("hidden_size", 64), ("vocab_size", 100), ("layers", 7), ("model_type", "other")):  # even without a card
        with pytest.raises(UserError, match=f"another target: {key} is {value} here"):
            hub.load(tmp_path / "s", replace(shape, **{key: value}))
    for key in CARD:
        edit(tmp_path / "s", lambda config, key=key: config["headstart"].update(target={k: v for k, v in CARD.items() if k != key}))  # type: ignore[misc]
        with pytest.raises(UserError, match=rf"config\.json: headstart\.target lacks {key}"):
            hub.load(tmp_path / "s", shape)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("head", HEADS)
def test_damaged_tensors_are_refused_by_name(head: str, tmp_path: Path) -> None:
    folder, shape = tmp_path / "s", TARGET().shape
    saved(head, folder)
    whole = load_file(folder / "model.safetensors")
    as_saved = (folder / "model.safetensors").read_bytes()
    for name in (min(whole), max(whole)):
        rewrite(folder, lambda t, name=name: (t.clear(), t.update(whole), t.pop(name)))
        with pytest.raises(UserError, match=rf"model.safetensors: {name} is missing \(1 missing, 0 unknown\)"):
            hub.load(folder, shape, CARD)
        rewrite(folder, lambda t, name=name: (t.clear(), t.update(whole), t.update({name: whole[name][:-1].clone()})))
        with pytest.raises(UserError, match=rf"{name} is \[.*\], expected \[.*\]"):
            hub.load(folder, shape, CARD)
    rewrite(folder, lambda t: (t.clear(), t.update(whole), t.update(stranger=torch.zeros(3))))
    with pytest.raises(UserError, match="stranger is not a tensor of this drafter"):
        hub.load(folder, shape, CARD)
    save_file(whole, folder / "model.safetensors")  # the same tensors in another file: nobody has to find out what differs
    with pytest.raises(UserError, match=r"model\.safetensors is not what was saved"):
        hub.load(folder, shape, CARD)
    (folder / "model.safetensors").write_bytes(as_saved)
    hub.load(folder, shape, CARD)


@pytest.mark.parametrize("head", HEADS)
def test_damaged_files_are_refused_by_name(head: str, tmp_path: Path) -> None:
    folder, shape = tmp_path / "s", TARGET().shape
    saved(head, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for cut in (0, 4, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"model.safetensors is damaged or truncated"):
            hub.load(folder, shape, CARD)
    weights.write_bytes(b"\xff" * 8 + whole[8:])  # a header of 2^64 bytes
    with pytest.raises(UserError, match="damaged"):
        hub.load(folder, shape, CARD)
    weights.unlink()
    with pytest.raises(UserError, match=r"model.safetensors does not exist"):
        hub.load(folder, shape, CARD)
    weights.write_bytes(whole)
    for wrong, message in ((text[:-20], "not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "neither saved by Headstart nor")):
        config.write_text(wrong)
        with pytest.raises(UserError, match=f"config.json.*{message}"):
            hub.load(folder, shape, CARD)
    config.unlink()
    with pytest.raises(UserError, match=r"config.json does not exist"):
        hub.load(folder, shape, CARD)
    with pytest.raises(UserError, match="nowhere"):
        hub.load(tmp_path / "nowhere", shape)


def numbers(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in numbers(v, (*path, k))]
    return [path] if isinstance(value, int | None) and not isinstance(value, bool) else []


@pytest.mark.parametrize("head", HEADS)
def test_no_number_in_a_config_allocates_or_crashes(head: str, tmp_path: Path) -> None:
    """Every whole number among the saved arguments, made huge, negative or a word: loaded all the same, or one clear line."""
    folder, shape = tmp_path / "s", TARGET().shape
    saved(head, folder)
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for path in numbers(config["headstart"]["arguments"]):
        for wrong in (10**9, 10**30, -3, "many", [1, 2], {"a": 1}):
            changed = json.loads(json.dumps(config))
            place = functools.reduce(lambda d, k: d[k], path[:-1], changed["headstart"]["arguments"])
            place[path[-1]] = wrong
            (folder / "config.json").write_text(json.dumps(changed))
            error = None
            try:
                hub.load(folder, shape, CARD)
            except UserError as e:
                error = str(e)
                refused += 1
            assert error is None or (str(folder) in error and "\n" not in error)
    assert refused > 2 or not numbers(config["headstart"]["arguments"])
    for block in ({}, [], {"head": head}, {"head": [head], "arguments": {}, "target": {}}, {"head": head, "arguments": [], "target": {}}):
        (folder / "config.json").write_text(json.dumps(config | {"headstart": block}))
        with pytest.raises(UserError, match="headstart block needs"):
            hub.load(folder, shape, CARD)
    for block in ({"head": "../evil"}, {"head": "os"}, {"arguments": {"colour": 1}}, {"arguments": {"folder": "/"}}):
        (folder / "config.json").write_text(json.dumps(config | {"headstart": config["headstart"] | block}))
        with pytest.raises(UserError, match=r"no drafter is called|no setting|stands alone"):
            hub.load(folder, shape, CARD)


@pytest.mark.parametrize("head", HEADS)
def test_weights_that_are_not_finite_are_not_saved(head: str, tmp_path: Path) -> None:
    drafter = make(head, TARGET())
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            next(iter(drafter.parameters())).view(-1)[0] = value
        with pytest.raises(UserError, match="holds NaN or infinite values"):
            hub.save(drafter, tmp_path / "s", CARD, torch.float32)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["tensors", "config", "rename"])
@pytest.mark.parametrize("head", HEADS)
def test_a_full_disk_leaves_the_folder_before_it(head: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, folder = saved(head, tmp_path / "s"), tmp_path / "s"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with torch.no_grad():
        next(iter(drafter.parameters())).add_(1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.rename
    with monkeypatch.context() as patch:
        if step == "tensors":
            patch.setattr(hub, "save_file", full)
        elif step == "config":
            patch.setattr(Path, "write_text", full)
        else:
            patch.setattr(files, "_exchange", lambda a, b: False)
            patch.setattr(Path, "rename", lambda self, to: full() if to == folder and not self.name.endswith(".old") else real(self, to))
        with pytest.raises(UserError, match=r"cannot be written \(.*No space left on device"):
            hub.save(drafter, folder, CARD, torch.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    hub.save(drafter, folder, CARD, torch.float32)  # with space again it replaces
    assert {p.name: p.read_bytes() for p in folder.iterdir()} != before and [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_folder_of_an_earlier_version_loads_and_says_once_what_nobody_can_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = saved(HEADS[0], tmp_path / "s")
    edit(tmp_path / "s", lambda config: config["headstart"].pop("sha256"))
    for _ in range(2):
        loaded = hub.load(tmp_path / "s", TARGET().shape, CARD)
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert caplog.text.count("was saved by an earlier version, without digests") == 1 and "were changed since then" in caplog.text
    edit(tmp_path / "s", lambda config: config["headstart"].update(sha256={"model.safetensors": 5}))
    with pytest.raises(UserError, match=r"headstart\.sha256 must hold the digests of model\.safetensors and config"):
        hub.load(tmp_path / "s", TARGET().shape, CARD)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", "native", r"headstart\.format is 'native', the drafter's is 'eagle3'"),
        ("torch_dtype", "float16", "torch_dtype is 'float16' for engines, 'float32' by the headstart block"),
        ("hidden_size", 64, "hidden_size is 64 for engines, 32 by the headstart block"),
        ("dtype", "bfloat16", r"model\.safetensors: .* is float32, config\.json says 'bfloat16'"),
    ],
)
def test_a_folder_of_an_earlier_version_must_agree_with_itself(key: str, value: Any, said: str, tmp_path: Path) -> None:
    """No digest tells that it was changed."""
    saved("eagle", tmp_path / "s")
    edit(tmp_path / "s", lambda config: config["headstart"].pop("sha256"))
    hub.load(tmp_path / "s", TARGET().shape, CARD)
    edit(tmp_path / "s", lambda config: (config["headstart"] if key == "format" else config).update({key: value}))
    with pytest.raises(UserError, match=said):
        hub.load(tmp_path / "s", TARGET().shape, CARD)


def test_what_was_changed_since_it_was_saved_is_named(tmp_path: Path) -> None:
    """Although the folder does not contradict itself."""
    saved("eagle", tmp_path / "s")
    before = (tmp_path / "s" / "config.json").read_bytes()
    edit(tmp_path / "s", lambda config: config.update(a_key_that_nobody_reads=1))
    with pytest.raises(UserError, match=r"config\.json is not what was saved: .*\(headstart\.sha256\.config\)"):
        hub.load(tmp_path / "s", TARGET().shape, CARD)
    (tmp_path / "s" / "config.json").write_bytes(before)
    rewrite(tmp_path / "s", lambda tensors: next(iter(tensors.values())).mul_(2))
    with pytest.raises(UserError, match=r"model\.safetensors is not what was saved: .*\(headstart\.sha256\.model\.safetensors\)"):
        hub.load(tmp_path / "s", TARGET().shape, CARD)


def test_keys_that_change_nothing_may_be_changed(tmp_path: Path) -> None:
    """The name of the target, and what another engine calls the architecture."""
    saved("eagle1", tmp_path / "s")
    edit(tmp_path / "s", lambda config: config.update(architectures=["LlamaForCausalLMEagle"], base_model_name_or_path="a/b"))
    hub.load(tmp_path / "s", TARGET().shape, CARD)
    for wrong in (["LlamaForCausalLMEagle3"], [], ["LlamaForCausalLM", "LlamaForCausalLMEagle"]):
        edit(tmp_path / "s", lambda config, wrong=wrong: config.update(architectures=wrong))  # type: ignore[misc]
        with pytest.raises(UserError, match="architectures"):
            hub.load(tmp_path / "s", TARGET().shape, CARD)


def test_the_shipped_drafter_carries_its_digests() -> None:
    folder = Path(__file__).resolve().parents[2] / "assets" / "tiny_eagle"
    config = json.loads((folder / "config.json").read_text())
    assert seal.digests(config, folder / "model.safetensors") == config["headstart"]["sha256"]
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == config["headstart"]["sha256"]["model.safetensors"]


def test_a_vocabulary_has_one_digest_in_any_order() -> None:
    """And what stands beside the vocabulary in a tokenizer changes the digest of kept tokens."""

    def vocab(*tokens: tuple[str, int]) -> str:
        return seal.tokenizer_sha(SimpleNamespace(get_vocab=lambda: dict(tokens)))

    def whole(text: str, **special: str) -> str:
        return seal.tokenizer_file_sha(SimpleNamespace(special_tokens_map=special, backend_tokenizer=SimpleNamespace(to_str=lambda: text)))

    assert seal.tokenizer_sha(None) == "none"  # as folders say that have no tokenizer
    assert vocab(("a", 0), ("b", 1)) == vocab(("b", 1), ("a", 0)) != vocab(("a", 1), ("b", 0))
    assert whole("{}", eos_token="a", bos_token="b") == whole("{}", bos_token="b", eos_token="a")
    assert len({whole("{}"), whole("{ }"), whole("{}", eos_token="a"), whole("{}", eos_token="b")}) == 4


def test_the_largest_block_loads_back(tmp_path: Path) -> None:
    """Although no tensor of its folder confirms that size."""
    drafter = make("dflash", TARGET(), layers=1, block=hub.MOST)
    hub.save(drafter, tmp_path / "s", CARD, torch.float32)
    assert hub.load(tmp_path / "s", TARGET().shape, CARD).config == drafter.config


def test_a_card_that_identifies_nothing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="card lacks hidden_size"):
        hub.save(make(HEADS[0], TARGET()), tmp_path / "s", {"tokenizer": "abc"}, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_head_is_refused() -> None:
    for name in ("cerberus", "base", "layers", "../medusa", ""):
        with pytest.raises(UserError, match=r"no drafter is called .*: there are") as e:
            fresh_name(name)
        assert all(head in str(e.value) for head in HEADS)


def fresh_name(name: str) -> Drafter:
    return hub.build(name, TARGET().shape)


@pytest.mark.parametrize("head", HEADS)
def test_the_file_holds_what_its_yaml_names(head: str) -> None:
    drafter = fresh(head, TARGET().shape)
    assert type(drafter).__module__ == f"headstart.heads.{head}" and type(drafter).__name__.lower() == head.replace("_", "")
    with pytest.raises(RuntimeError, match="attach"):
        _ = drafter.ends
