"""Folders of ordinary language models: how a draft model's is written for engines, and what is refused of a user's own."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.stored import LARGEST, model_files, shards
from headstart.inference.decoding.placement import check_folder
from headstart.inference.speculator import open_speculator
from tests.heads.test_draft_lm import SMALL, fitting
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}


def with_tokens(generation: tuple[Any, ...], config: tuple[Any, ...]) -> Any:
    """A target that says its special tokens in its generation config, or in its config alone."""
    target = tiny_target()
    for where, values in ((target.model.generation_config, generation), (target.model.config, config)):
        where.bos_token_id, where.eos_token_id, where.pad_token_id = values
    return target


NOTHING = (None, None, None)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ((0, 0, None), (0, 0, None), (0, 0, None)),
        ((7, [5, 9], 3), (1, 2, 0), (7, [5, 9], 3)),
        (NOTHING, (4, 6, 8), (4, 6, 8)),
        (NOTHING, NOTHING, NOTHING),
    ],
)
@pytest.mark.parametrize("how", [{"layers": 2}, {"config": SMALL}, {"folder": ""}], ids=["layers", "config", "folder"])
def test_the_special_tokens_are_the_targets(
    generation: tuple[Any, ...], config: tuple[Any, ...], expected: tuple[Any, ...], how: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, GenerationConfig

    target = with_tokens(generation, config)
    if "folder" in how:
        tiny_target(seed=2, num_hidden_layers=1).model.save_pretrained(tmp_path / "small")
        how = {"folder": str(tmp_path / "small")}
    hub.save(fitting(target, **how), tmp_path / "s", target.card, torch.float32)
    for found in (AutoConfig.from_pretrained(tmp_path / "s"), GenerationConfig.from_pretrained(tmp_path / "s")):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == expected
    assert str(tmp_path) not in (tmp_path / "s" / "config.json").read_text()  # where it was made is nobody's business
    loaded = hub.load(tmp_path / "s", target.shape, target.card)
    hub.save(loaded, tmp_path / "again", target.card, torch.float32)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "s" / name).read_bytes()


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 123.0}, YARN], ids=["default", "yarn"])
def test_rope_is_spelled_for_old_engines_and_new_ones(rope: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    drafter: Any = fitting(TARGET(), config=SMALL | {"rope_parameters": dict(rope)})
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"] and config["rope_parameters"] == rope
    assert config["rope_scaling"] == (None if len(rope) == 2 else {k: v for k, v in rope.items() if k != "rope_theta"})
    assert AutoConfig.from_pretrained(tmp_path / "s").rope_parameters == rope
    del config["rope_parameters"]  # what an engine of 2025 reads
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(tmp_path / "s").rope_parameters == rope


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "mixtral", "gpt2", "gpt_neox"])
def test_the_written_config_is_the_models(architecture: str, tmp_path: Path) -> None:
    """Through transformers it comes back as it was, in whatever family."""
    from transformers import AutoConfig

    small = {"n_embd": 32, "n_layer": 1, "n_head": 2} if architecture == "gpt2" else SMALL | {"head_dim": 8}
    drafter: Any = fitting(TARGET(), config=small | {"model_type": architecture})
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    own = ("dtype", "transformers_version", "_name_or_path", "headstart", "torch_dtype", "architectures", "rope_theta", "rope_scaling")
    both = drafter.lm.config, AutoConfig.from_pretrained(tmp_path / "s")
    before, after = ({k: v for k, v in c.to_dict().items() if k not in own} for c in both)
    assert json.loads(json.dumps(before)) == json.loads(json.dumps(after))
    hub.load(tmp_path / "s", TARGET().shape, TARGET().card)


# ---- a user's own ----


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny_target(seed=3, num_hidden_layers=2).model.save_pretrained(folder)
    return folder


def opened(folder: Path) -> Drafter:
    assert hub.is_language_model(folder)
    return open_speculator(folder, TARGET())


def tensors(**changes: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        whole = load_file(folder / "model.safetensors")
        for end, change in changes.items():
            name = next(key for key in whole if key.endswith(end.replace("__", ".")))
            whole[name] = change(whole[name])
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def keys(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return write


def with_nan(tensor: Tensor) -> Tensor:
    return tensor.index_fill(0, torch.tensor(3), float("nan"))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (pickled, r"pytorch_model\.bin is a pickled file, which is never loaded\): save the model as safetensors"),
    (tensors(up_proj__weight=lambda t: t.long()), r"up_proj\.weight is of type I64, weights are F32, BF16, F16"),
    (tensors(up_proj__weight=lambda t: t.to(torch.float8_e4m3fn)), r"up_proj\.weight is of type F8_E4M3"),
    (tensors(norm__weight=lambda t: t > 0), r"norm\.weight is of type BOOL"),
    (tensors(up_proj__weight=with_nan), r"up_proj\.weight holds NaN or infinite values"),
    (keys(num_hidden_layers=1), r"has model\.layers\.1\.\S+ \(9 tensors\), for which its config\.json has no place"),
    (keys(tie_word_embeddings=True), "tie_word_embeddings=true, but an output head of its own"),
    (keys(rope_theta=5e5), r"rope_theta=500000\.0, rope_parameters rope_theta=10000\.0"),
    (keys(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling has .*, rope_parameters"),
    (keys(attention_bias=True), "lacks model.layers.0.self_attn"),
    (keys(intermediate_size=10**9), r"its tensors have other sizes than config\.json says"),
    (keys(layer_types=["sliding_attention"] * 2), "layer_types in its config, which no model of the kind llama has"),
    (keys(num_hidden_layers=10**9), r"num_hidden_layers=1000000000 does not fit the 21 tensors"),
    (keys(num_hidden_layers=float("inf")), r"num_hidden_layers=inf does not fit"),
    (keys(text_config={"num_hidden_layers": 10**9}), r"num_hidden_layers=1000000000 does not fit"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_sound_model_is_refused(spoil: Callable[[Path], None], message: str, plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "s")
    spoil(folder)
    with pytest.raises(UserError, match=message) as e:
        opened(folder)
    assert "\n" not in str(e.value) and str(folder) in str(e.value)


def test_tables_of_old_files_are_no_weights(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "s")
    whole = load_file(folder / "model.safetensors")
    old = {"model.layers.0.attn.bias": torch.ones(4, 4).bool(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(whole | old, folder / "model.safetensors", metadata={"format": "pt"})
    opened(folder)


def in_parts(folder: Path, names: str) -> None:
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(whole, names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("door", [opened, lambda folder: check_folder(str(folder))], ids=["draft model", "target"])
def test_an_index_does_not_leave_its_folder(door: Callable[[Path], Any], plain: Path, tmp_path: Path) -> None:
    for i, names in enumerate(("../outside/part-1.safetensors", str(tmp_path / "0" / "part-1.safetensors"), "part-1.bin", "..", 5)):
        folder = shutil.copytree(plain, tmp_path / str(i))
        (folder / "tokenizer.json").touch()
        in_parts(folder, names)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"index\.json: weight_map must name safetensors files in the same folder"):
            door(folder)
    folder = shutil.copytree(plain, tmp_path / "linked")
    (folder / "tokenizer.json").touch()
    in_parts(folder, "part-1.safetensors")
    if door is opened:
        opened(folder)
    (folder / "part-1.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "part-1.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UserError, match=r"names part-1\.safetensors, a link that leaves the folder"):
        door(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"part-1\.safetensors does not exist"):
        door(folder)


def test_the_hubs_cache_keeps_its_files_apart(plain: Path, tmp_path: Path) -> None:
    """Snapshots are folders of links into the cache of the same model: those do not leave it."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    shutil.copytree(plain, snapshot)
    blobs.mkdir()
    in_parts(snapshot, "part-1.safetensors")
    (snapshot / "part-1.safetensors").rename(blobs / "123")
    (snapshot / "part-1.safetensors").symlink_to("../../blobs/123")
    assert set(shards(snapshot / "model.safetensors.index.json").values()) == {snapshot / "part-1.safetensors"}
    opened(snapshot)


def test_a_folder_with_a_whole_file_and_an_index_is_read_as_transformers_reads_it(plain: Path, tmp_path: Path) -> None:
    """From the whole file. And an index may be longer than a config."""
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(plain, tmp_path / "s")
    in_parts(folder, "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text() + " " * (LARGEST + 1))
    assert model_files(folder) == [folder / "part-1.safetensors"]
    whole = load_file(folder / "part-1.safetensors")
    save_file({name: tensor + 1 for name, tensor in whole.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_files(folder) == [folder / "model.safetensors"]
    name, weight = next(iter(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))
    assert torch.equal(weight, whole[name] + 1)
