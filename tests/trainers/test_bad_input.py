"""What a user can get wrong with files: each is one line that names the file or key and says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.data.source import open_source
from headstart.door import infer
from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding import placement
from headstart.inference.decoding.target import Target
from headstart.inference.settings import open_target
from headstart.inference.speculator import open_speculator
from headstart.trainers.run import run
from tests.doors import call
from tests.drafters import HEADS, fresh
from tests.reports import a_report
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import ROOT, save_target

CONF = ROOT / "conf"


@pytest.fixture
def broken(target_folder, tmp_path):
    """A copy of the target's folder to break."""
    return Path(shutil.copytree(target_folder, tmp_path / "broken"))


def settings(path: object, **changes: object) -> dict[str, object]:
    return {"name": "any", "path": str(path), "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None, **changes}


# ---- the target ----


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        (["config.json"], r"has no config\.json"),
        (["tokenizer.json"], r"has no tokenizer: expected tokenizer\.json"),
        (["model.safetensors"], r"has no model\.safetensors or model\.safetensors\.index\.json"),
    ],
)
def test_a_target_folder_without_something(remove, says, broken):
    for name in remove:
        (broken / name).unlink()
    with pytest.raises(UserError, match=says):
        open_target(settings(broken))


def test_no_target_folder_at_all(tmp_path):
    with pytest.raises(UserError, match=r"target folder .*nowhere does not exist: set target\.path"):
        open_target(settings(tmp_path / "nowhere"))


def test_weights_that_are_damaged(broken):
    path = broken / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"broken: its weights are damaged or truncated .*download them again"):
        open_target(settings(broken))
    path.write_bytes(whole)
    tensors = load_file(path)
    lost = next(k for k in tensors if "layers.2" in k)
    save_file({k: v for k, v in tensors.items() if k != lost}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its weights lack model\.layers\.2"):  # never random numbers in its place
        open_target(settings(broken))
    save_file({**tensors, lost: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="cannot be loaded"):
        open_target(settings(broken))
    path.unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors"):
        open_target(settings(broken))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_that_is_damaged(name, broken):
    (broken / name).write_text((broken / name).read_text()[:100])
    with pytest.raises(UserError, match=r"target .*broken cannot be loaded: .+"):
        open_target(settings(broken))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "fp16"}, r"target\.dtype must be auto, float32, .*found 'fp16'"),
        ({"device": "tpu"}, r"target\.device=tpu is not usable here"),
        ({"attention": "fast"}, r"cannot be loaded: .*fast"),
    ],
)
def test_settings_of_the_target(change, says, target_folder):
    with pytest.raises(UserError, match=says):
        open_target(settings(target_folder, **change))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"target\.device=cuda:0 is not usable here"):
            open_target(settings(target_folder, device="cuda:0"))


@pytest.mark.parametrize("choice", ["llama8b", "llama70b"])
@pytest.mark.parametrize("network", ["off by setting", "missing"])
def test_a_target_whose_weights_are_elsewhere(choice, network, composed, tmp_path, monkeypatch):
    """It says what would be needed, from the config stored with it, and does not wait for a hub that is not there."""
    import huggingface_hub

    placement.hub_answers.cache_clear()  # of the other network
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", network == "off by setting")
    if network == "missing":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    overrides = [f"target={choice}", f"out={tmp_path / 'run'}", "target.device=cpu"]
    config = composed(*overrides)
    target = config["target"]
    with pytest.raises(UserError) as caught:
        run(**config)
    said, stored = str(caught.value), target["config"]
    assert said.startswith(f"target {choice} ({stored['num_hidden_layers']} layers, hidden size {stored['hidden_size']}, vocabulary 128256")
    gigabytes = int(said.partition(" billion weights: ")[2].partition(" GB in bfloat16)")[0])
    comment = (CONF / "target" / f"{choice}.yaml").read_text().partition("dtype: bfloat16 # ")[2]
    assert gigabytes == int(comment.split(" GB")[0])  # as the YAML tells its reader
    files = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"]
    assert [w for w in [target["path"], "hf auth login", "licence", "target.path=DIR", *files] if w not in said] == []
    assert "\n" not in said and not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=rf"target {choice} .*target folder .*nowhere does not exist.*target\.path=DIR"):
        open_target({**target, "path": str(tmp_path / "nowhere")})


def test_the_door_says_it_in_one_line(tmp_path, monkeypatch, capfd):
    """As a user sees it: nothing but the line, exit code 2."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert call("train", ["target=llama8b", f"out={tmp_path / 'run'}"], tmp_path, monkeypatch) == 2
    said = capfd.readouterr()
    assert said.err.startswith("error: target ") and said.err.count("\n") == 1
    assert said.out.startswith("loading llama8b ") and said.out.count("\n") == 1


# ---- the data ----


def test_a_line_that_is_not_a_conversation(composed, overrides, conversations, tmp_path, caplog):
    lines = conversations.read_text().splitlines()
    lines[6] = '{"text": "not a conversation"}'
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"bad\.jsonl line 7: not a conversation.*on_bad=skip"):
        run(**composed(*overrides, f"path={bad}"))
    assert not (tmp_path / "run").exists()
    assert run(**composed(*overrides, f"path={bad}", "data.on_bad=skip"))
    assert "dropped 1 of 60 rows" in caplog.text


def test_rows_longer_than_the_context(composed, overrides):
    with pytest.raises(UserError, match="rows of 1024 tokens are longer than the target's context of 512"):
        run(**composed(*overrides, "trainer.length=1024"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["loss.terms={kll: 1.0}", "loss.depth=2"], r"loss\.terms has no 'kll'"),
        (["decode.new_tokens=600"], r"there are no prompts to decode: .*lower decode\.new_tokens"),
        (["decode.sequences=[2]"], r"decode\.sequences: 2 at once take as many prompts, there are 1: raise decode\.prompts"),
        (["decode.prompts=999", "decode.sequences=[500]"], r"decode\.sequences: 500 at once take as many prompts, there are \d\d?:"),
        (["out=/dev/null/run"], r"the folder out='/dev/null/run' cannot be written"),
        (["head=eagle", "head.heads=abc"], r"head\.heads must be a whole number of at least 1 or null, found 'abc'"),
        (["head=eagle", "head.heads=0"], r"head\.heads must be a whole number of at least 1 or null, found 0"),
        (["head=eagle", "head.taps=5"], r"head\.taps must be a list of whole numbers or null, found 5"),
        (["head=eagle", "head.taps=[a]"], r"head\.taps must be a list of whole numbers or null, found \['a'\]"),
        (["head=eagle", "head.draft_vocab=abc"], r"head\.draft_vocab must be a list of whole numbers or null, found 'abc'"),
        (["head=medusa", "head.layers=null"], r"head\.layers must be a whole number of at least 1, found None"),
        (["head=draft_lm", "head.folder=7"], r"head\.folder must be a word or null, found 7"),
    ],
)
def test_settings_that_cannot_be(change, says, composed, overrides):
    config = composed(*overrides, *(c for c in change if not c.startswith("loss.terms")))
    if change[0].startswith("loss.terms"):
        config["loss"]["terms"] = {"kll": 1.0}
    with pytest.raises(UserError, match=says):
        run(**config)


@pytest.fixture
def captured(composed, overrides, tmp_path):
    """Shards of the conversations, and the settings of a training from them."""
    from headstart.door import data

    data.capture_states(composed(*overrides[:6], f"out={tmp_path / 'shards'}", "length=64", door="capture"))
    rest = [o for o in overrides if not o.startswith(("data=", "path="))]
    return tmp_path / "shards", [*rest, "data=shards", f"path={tmp_path / 'shards'}"]


def test_a_capture_of_nothing(composed, overrides, tmp_path):
    from headstart.door import data

    with pytest.raises(UserError, match="rows of 1 tokens are too short"):
        data.capture_states(composed(*overrides[:6], f"out={tmp_path / 'shards'}", "length=1", door="capture"))
    assert not (tmp_path / "shards").exists()


def test_what_cannot_be_captured_is_said_before_the_target_is_loaded(captured, composed, overrides, tmp_path, monkeypatch):
    from headstart.door import data

    def load(*_, **__):
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Target, "load", load)
    given = [each for each in overrides[:6] if not each.startswith(("data=", "path="))]
    for more, says in (
        (["data=shards", f"path={captured[0]}"], "^data=shards is captured already: take data=text or chat$"),
        ([*overrides[4:6], "data.stream=true"], r"^data\.stream has no end that could be captured: leave it out$"),
    ):
        with pytest.raises(UserError, match=says):
            data.capture_states(composed(*given, *more, "length=32", f"out={tmp_path / 'again'}", door="capture"))
    assert not (tmp_path / "again").exists()


def test_a_target_that_processes_share_is_not_captured(monkeypatch):
    monkeypatch.setattr(Target, "sharded", True)
    with pytest.raises(UserError, match=r"a target that processes share is for training and decoding; in capturing"):
        open_source({"name": "stdlib"}, tiny_target(), length=64, seed=0)


def test_shards_that_are_damaged_or_another_targets(captured, composed, tmp_path):
    folder, overrides = captured
    path = folder / "shard-00000.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: the checksum differs"):
        run(**composed(*overrides))
    path.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: the shard has \d+ bytes"):
        run(**composed(*overrides))
    path.unlink()
    with pytest.raises(UserError, match=r"shard-00000\.safetensors: the shard is missing"):
        run(**composed(*overrides))
    path.write_bytes(whole)
    other = save_target(tmp_path / "other", seed=3)
    with pytest.raises(UserError, match=r"target\.weights differs"):
        run(**composed(*overrides, f"target.path={other}"))
    with pytest.raises(UserError, match=r"nothing-here/index\.json does not exist: no target outputs"):
        run(**composed(*overrides, f"path={folder}/nothing-here"))


# ---- the speculator and its prompts ----


@pytest.fixture(scope="module")
def speculator(target_folder, tmp_path_factory):
    target = open_target(settings(target_folder))
    folder = tmp_path_factory.mktemp("trained") / "speculator"
    hub.save(fresh(HEADS[0], target.shape), folder, target.card, torch.float32, target.tokenizer)
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 48}, "hidden_size is 48 here, 32 in training"),
        ({"vocab_size": 321}, "vocab_size is 321 here, 320 in training"),
        ({"num_hidden_layers": 3}, "layers is 3 here, 4 in training"),
        ({"architecture": "qwen3"}, "model_type is qwen3 here, llama in training"),
    ],
)
def test_a_speculator_of_another_target(changes, says, speculator, tmp_path):
    other = open_target(settings(save_target(tmp_path / "other", **changes)))
    with pytest.raises(UserError, match=f"speculator was trained for another target: .*{says}"):
        open_speculator(speculator, other)


def test_a_speculator_of_another_tokenizer(speculator, broken):
    path = broken / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    a, b = [w for w in words if len(w) == 1][:2]
    words[a], words[b] = words[b], words[a]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="speculator was trained for another target: tokenizer is"):
        open_speculator(speculator, open_target(settings(broken)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_speculator_with_a_damaged_file(name, speculator, target_folder, tmp_path):
    folder, target = Path(shutil.copytree(speculator, tmp_path / "copy")), Target.load(str(target_folder))
    path = folder / name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=f"copy/{name}"):
        open_speculator(folder, target)
    path.unlink()
    with pytest.raises(UserError, match=f"copy/{name} does not exist"):
        open_speculator(folder, target)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"id": "long", "text": "1 " * 600}, r"prompt long \(\d+ tokens\) does not fit the target's context of 512 .*, or on_long=skip$"),
        ({"text": "1 " * 600}, r"prompt 2 \(\d+ tokens\) does not fit"),
        ({"question": "?"}, r"prompts\.jsonl line 2: not a prompt"),
        (["no object"], r"prompts\.jsonl line 2: not an object but list"),
        ({"prompt": " "}, r"prompts\.jsonl line 2: the prompt is empty"),
    ],
)
def test_prompts_that_cannot_be_decoded(line, says, composed, overrides, speculator, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "1 2 3"}\n' + json.dumps(line))
    decoding = [o for o in overrides if o.startswith(("target", "decode"))] + ["decode.prompts=4"]
    config = composed(*decoding, door="inference") | {"speculator": str(speculator), "prompts": str(path), "out": str(tmp_path / "report")}
    monkeypatch.setattr(infer, "overrides", lambda: decoding)
    with pytest.raises(UserError, match=says):
        infer.report(config)
    assert not (tmp_path / "report").exists()


def test_a_report_that_cannot_be_written_is_shown(composed, overrides, tmp_path, monkeypatch, capsys):
    """Its figures took minutes: on a full disk they are on the terminal at least."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headstart.inference.reports.measure.make_report", lambda *_, **__: a_report())
    monkeypatch.setattr("headstart.inference.reports.render.write_report", full)
    monkeypatch.setattr(infer, "overrides", list)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "1 2 3"}\n')
    decoding = [o for o in overrides if o.startswith(("target", "decode"))]
    asked = composed(*decoding, "decode=ngram", door="inference") | {"prompts": str(prompts), "out": str(tmp_path / "report")}
    with pytest.raises(UserError, match=r"^the report cannot be written into .*report \(No space left on device\): give another out=DIR$"):
        infer.report(asked)
    assert "3.20" in capsys.readouterr().out
