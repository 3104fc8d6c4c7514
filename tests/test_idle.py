"""What has no effect is not taken in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headstart.door import infer
from headstart.door.idle import said_of
from headstart.door.places import check_speculator
from headstart.door.train import check_head_of_start, check_idle
from headstart.heads.errors import UserError
from tests.doors import ROOT, call


def config(plan: bool = False, **trainer: Any) -> dict[str, Any]:
    return {"plan": plan, "arms": None, "head": {"name": "eagle"}, "trainer": {"optimizer": "muon", "epochs": None} | trainer}


def test_settings_beside_which_others_count(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"trainer.steps": "5", "trainer.momentum": "0.9", "gpus": "4"}
    with pytest.raises(UserError, match=r"^gpus=4 is of a plan \(plan=true\)"):
        check_idle(config(), said)
    with pytest.raises(UserError, match=r"^trainer\.steps=5 and trainer\.epochs=0\.5 both say"):
        check_idle(config(plan=True, epochs=0.5), said)
    check_idle(config(plan=True), said)
    assert not capsys.readouterr().out
    check_idle(config(plan=True, optimizer="adamw"), said)
    assert capsys.readouterr().out == "trainer.momentum=0.9 changes nothing: it is Muon's, and the optimizer is adamw\n"
    check_idle(config(schedule="wsd"), {"trainer.floor": "0.2"})
    assert capsys.readouterr().out == "trainer.floor=0.2 changes nothing: it is the cosine's, and the schedule is wsd\n"
    check_idle(config(schedule="cosine"), {"trainer.floor": "0.2"})
    assert not capsys.readouterr().out
    arms = {"a": config(optimizer="adamw"), "b": config()}
    check_idle(config(plan=True) | {"arms": arms}, said)
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match=r"and trainer\.epochs=2 both say"):
        check_idle(config(plan=True) | {"arms": arms | {"c": config(epochs=2)}}, said)


def test_settings_of_what_is_not_there() -> None:
    whole = config() | {"head": {"name": "dflash", "window": None}, "capture": {"out": None}, "served": {"url": None}}
    for key, other, value in (("head.window_causal", "head.window", 64), ("capture.storage", "capture.out", "kept"),
                              ("served.retries", "served.url", "http://here")):  # fmt: skip
        group, name = other.split(".")
        with pytest.raises(UserError, match=rf"^{key}=x has no effect without {other}: give that too"):
            check_idle(whole, {key: "x"})
        check_idle(whole | {group: {name: value}}, {key: "x"})
        check_idle(whole | {"arms": {"a": {}, "b": {group: {name: value}}}}, {key: "x"})


def tree(kind: str, proposer: str = "drafter") -> dict[str, Any]:
    return {"decode": {"kind": kind, "proposer": {"kind": proposer}}}


def test_settings_of_other_trees(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^decode\.nodes=9 has no effect with decode=chain: leave it out$"):
        check_idle(config() | tree("chain"), {"decode": "chain", "decode.nodes": "9"})
    with pytest.raises(UserError, match=r"^decode\.nodes=9 has no effect with decode\.kind=chain: leave it out$"):
        check_idle(config() | tree("chain", "cascade"), {"decode.nodes": "9"})
    with pytest.raises(UserError, match=r"^decode\.expand=3 has no effect with decode=ngram: leave it out$"):
        check_idle(config() | tree("dynamic", "ngram"), {"decode.expand": "3"})
    check_idle(config() | tree("chain"), {"decode.depth": "3"})
    check_idle(config() | tree("chain"), {"decode": "chain", "experiment": "chat8b"})  # whose decode.nodes was not typed
    assert not capsys.readouterr().out
    check_idle(config() | tree("chain"), {"decode.nodes": "9"}, several=["decode"])
    assert capsys.readouterr().out == "decode.nodes=9 changes nothing with decode=chain\n"
    with pytest.raises(UserError, match="has no effect"):
        check_idle(config() | tree("chain"), {"decode.nodes": "9"}, several=["decode.nodes"])


def test_an_evaluation_has_the_settings_of_all_its_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"speculator={ROOT}/assets/tiny_eagle", f"path={ROOT}/LICENSE", "decode=chain", "decode.expand=3"]
    for against, says in (("[dynamic]", "LICENSE line 1"), ("[ngram,fixed]", "decode.expand=3 has no effect with decode=chain"),
                          ("[assisted]", "decode.expand=3 has no effect")):  # fmt: skip
        assert call("inference evaluate", [*asked, f"against={against}"], tmp_path, monkeypatch) == 2
        assert says in capsys.readouterr().err


def test_settings_within_a_dictionary_are_said_too() -> None:
    said = said_of(["served={retries:3}", "++decode.proposer={kind:ngram,most:5}", "trainer.lr=1"])
    assert {"served.retries": "3", "decode.proposer.most": "5", "trainer.lr": "1"}.items() <= said.items()


def test_where_the_deciding_setting_is_swept_a_line_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(infer, "advise", lambda _: None)
    for words, code, line in (
        ([f"report={ROOT}", "task=math"], 2, ""),
        (["--multirun", f"report=null,{ROOT}", "task=math"], 0, "task=math"),
    ):
        assert call("inference advise", words, tmp_path, monkeypatch) == code
        assert line in (said := capsys.readouterr()).out
        assert code == 0 or said.err.startswith("error: task=math has no effect beside report=: give one of them")


def test_the_head_of_a_trained_drafter_is_what_it_was_saved_as() -> None:
    check_head_of_start("old", "dflash", {"head": "dflash", "head.anchors": "8", "trainer.lr": "1"}, ("anchors",))
    with pytest.raises(UserError, match=r"^head\.layers=2: the drafter of trainer\.start=old .*; of dflash .* may change head\.anchors$"):
        check_head_of_start("old", "dflash", {"head.layers": "2"}, ("anchors",))


def test_the_door_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start = f"trainer.start={ROOT}/assets/tiny_eagle"
    assert call("train", [start, "head.layers=2", f"target.path={ROOT}/assets/tiny"], tmp_path, monkeypatch) == 2
    assert re.search(r"error: head\.layers=2: the drafter of trainer\.start=.*tiny_eagle is what it was saved as", capsys.readouterr().err)


def test_an_arms_own_words_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "arms={a:'head=eagle',b:'head=mtp trainer.optimizer=adamw trainer.momentum=0.9',c:'head=mtp trainer.epochs=1 trainer.steps=9'}"
    assert call("train", [arms, "plan=true"], tmp_path, monkeypatch) == 2
    said = capsys.readouterr()
    assert "trainer.momentum=0.9 changes nothing" in said.out and "error: arm c: trainer.steps=9 and trainer.epochs=1 both say" in said.err


def test_the_folder_of_a_run_is_told_from_that_of_its_drafter(tmp_path: Path) -> None:
    (tmp_path / "speculator").mkdir()
    for folder in (tmp_path, tmp_path / "speculator"):
        (folder / "config.json").write_text("{}")
    check_speculator(str(tmp_path / "speculator"))
    with pytest.raises(UserError, match=f"^speculator={tmp_path} is the folder of a run: give speculator={tmp_path}/speculator$"):
        check_speculator(str(tmp_path))
    with pytest.raises(UserError, match=r"hf download Org/Name\.eagle3 --local-dir DIR$"):
        check_speculator("Org/Name.eagle3")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("heads=medusa", "head"), ("trainer.learning_rate=1", "trainer.lr"), ("gradient_accumulation_steps=4", "trainer.accumulate"),
     ("model=x", "target"), ("output_dir=x", "out"), ("steps=40", "trainer.steps")],
)  # fmt: skip
def test_a_key_as_other_trainers_have_it_is_known(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", [typed], tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == f"error: there is no key {typed.partition('=')[0]!r} (did you mean {meant}?)\n"


@pytest.mark.parametrize("name", ["train", "inference", "data"])
def test_the_version_is_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(name, ["--version"], tmp_path, monkeypatch) == 0
    assert re.fullmatch(r"headstart \d+\.\d+.*\n", capsys.readouterr().out)
