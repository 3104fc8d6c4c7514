"""trainer.start: a training that goes on from a trained drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.reports.measure import make_report
from headstart.inference.settings import open_decode
from headstart.inference.speculator import open_speculator
from headstart.trainers import began, checkpoint
from headstart.trainers.run import run
from headstart.trainers.start import check_start, first_drafter, open_start, trained_drafter
from tests.drafters import HEADS, arguments, fresh, make
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import equal, weights

NO_SOURCE: Any = None  # the data are asked for a trimmed vocabulary only


def test_going_on_from_a_trained_drafter(composed, overrides, target_folder, tmp_path, capsys):
    """The folder's weights and settings, not those of the command line; a run of its own otherwise."""
    target, speculator = Target.load(str(target_folder)), tmp_path / "trained"
    small = fresh("eagle", target.shape, intermediate_size=24)
    hub.save(small, speculator, target.card, torch.float32)
    more = ["trainer.lr=0", "trainer.steps=1", f"trainer.start={speculator}", "loss=tv"]
    report = run(**composed(*overrides, "head=eagle", *more))[""]
    own = small.state_dict()
    assert equal({k: own[k] for k in weights(tmp_path / "run")}, weights(tmp_path / "run")) and report["train_steps"] == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["head"]["intermediate_size"] == 24 and config["trainer"]["start"] == str(speculator)
    with pytest.raises(UserError, match=r"trainer\.start: .* holds a drafter of the kind eagle: train it with head=eagle"):
        run(**composed(*overrides, "head=medusa", *more, "trainer.resume=false"))
    shutil.rmtree(speculator)  # the checkpoint holds all weights
    capsys.readouterr()
    again = run(**composed(*overrides, "head=eagle", *more))[""]
    assert f"the report cannot compare with the drafter of trainer.start: {speculator}: no such folder" in capsys.readouterr().out
    assert "began_with" in report and "began_with" not in again
    assert again["train_steps"] == 1 and equal({k: own[k] for k in weights(tmp_path / "run")}, weights(tmp_path / "run"))
    with pytest.raises(UserError, match=r"nowhere.config\.json does not exist"):
        run(**composed(*overrides, "trainer.start=nowhere", "trainer.resume=false"))


def test_the_report_has_the_drafter_that_the_run_began_with_over_the_same_prompts(composed, overrides, target_folder, tmp_path, capsys):
    """The same figures as a report on its folder alone; and exactly its own where training changed nothing."""
    target, begun = Target.load(str(target_folder)), tmp_path / "begun"
    run(**composed(*overrides, "head=eagle", "trainer.steps=12", "trainer.lr=0.02", f"out={begun}"))
    speculator = begun / "speculator"
    more = [f"trainer.start={speculator}", "trainer.steps=1", "decode=dynamic", "decode.prompts=3", "decode.new_tokens=16"]
    arms = {"same": "head=eagle trainer.lr=0", "other": "head=eagle trainer.lr=0.1", "new": "head=eagle trainer.start=null"}
    sides = {
        name: {key: composed(*overrides, *more, *words.split())[key] for key in ("head", "loss", "trainer")} for name, words in arms.items()
    }
    capsys.readouterr()
    reports = run(**composed(*overrides, *more) | {"arms": sides})
    how = composed(*overrides, *more)["decode"]
    decoding, prompts = open_decode(how), reports["same"].asked
    alone = make_report(target, open_speculator(speculator, target), prompts, decoding.policy, decoding.sampling, new_tokens=16)
    for name in ("same", "other"):
        found = reports[name]["began_with"]
        assert found["speculator"] == str(speculator)
        for t in ("temperature_0", "temperature_1"):
            assert found[t]["accepted_length"] == pytest.approx(alone[t]["accepted_length"])
            assert found[t]["times"] == pytest.approx(reports[name][t]["accepted_length"] / alone[t]["accepted_length"])
    assert alone["temperature_0"]["accepted_length"] > 1, "else there is nothing to tell"
    assert reports["same"]["began_with"]["temperature_0"]["intervals"] == {"times": [1, 1]}
    assert "began_with" not in reports["new"], "an arm with new weights began with none"
    rows = {row["name"]: row for row in json.loads((tmp_path / "run" / "comparison.json").read_text())["arms"]}
    assert rows.keys() == {*arms, f"trainer.start={speculator}"}
    assert rows[f"trainer.start={speculator}"]["t0_tree"] == rows["same"]["t0_tree"]


@pytest.mark.slow
def test_a_start_that_is_gone_is_not_needed_where_the_checkpoints_are_on_the_other_disk(composed, overrides, target_folder, tmp_path):
    target, speculator, spare = Target.load(str(target_folder)), tmp_path / "trained", tmp_path / "spare"
    hub.save(fresh("eagle", target.shape), speculator, target.card, torch.float32)
    spare.mkdir()
    more = ["head=eagle", "trainer.steps=1", f"trainer.start={speculator}", f"out_fallback={spare}"]
    run(**composed(*overrides, *more))
    (tmp_path / "run" / "checkpoints").rename(spare / "run" / "checkpoints")
    shutil.rmtree(speculator)
    assert run(**composed(*overrides, *more))[""]["train_steps"] == 1


@pytest.mark.parametrize("head", HEADS)
def test_every_drafter_can_be_gone_on_with(head, tmp_path):
    """What trains in a fresh one trains in one that was loaded."""
    target = tiny_target()
    first = make(head, target)
    hub.save(first, tmp_path / "s", target.card, torch.bfloat16)
    again = trained_drafter(str(tmp_path / "s"), head, target)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {n for n, p in first.named_parameters() if p.requires_grad}
    assert again.training and {p.dtype for p in again.parameters()} == {torch.float32}


def test_a_target_in_half_precision_rounds_nothing(tmp_path):
    first = make(HEADS[0], tiny_target())
    half = Target(tiny_target().model.to(torch.bfloat16), name="half")
    assert half.dtype == torch.bfloat16
    hub.save(first, tmp_path / "s", half.card, torch.float32)
    again = trained_drafter(str(tmp_path / "s"), HEADS[0], half)
    assert equal(again.state_dict(), first.state_dict())


@pytest.mark.parametrize(("head", "key", "value"), [("dflash", "anchors", 5), ("peagle", "anchors", 5), ("eagle1", "noise", 0.5)])
def test_how_it_is_trained_the_command_line_says(head, key, value, tmp_path):
    target = tiny_target()
    hub.save(make(head, target), tmp_path / "s", target.card, torch.float32)
    settings = {"name": head, **arguments(head), "intermediate_size": 24}
    drafter, own = open_start(str(tmp_path / "s"), settings | {key: value}, target, NO_SOURCE, [tmp_path / "run"], True)
    assert getattr(drafter, key) == drafter.config[key] == own[key] == value and own["name"] == head
    assert own["intermediate_size"] is None  # what it is, the folder says
    with pytest.raises(UserError, match=rf"head\.{key} must be a .*number.*, found None"):
        open_start(str(tmp_path / "s"), settings | {key: None}, target, NO_SOURCE, [tmp_path / "run"], True)


@pytest.mark.parametrize(
    ("began", "resume", "read"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"start": "another"}, True, True),
        ({"start": None}, True, True),
        ({"name": "mtp"}, True, True),
    ],
)
def test_the_folder_is_read_unless_the_run_that_is_resumed_began_with_it(began, resume, read, tmp_path):
    """Else the checkpoint, which is loaded later, has the weights, and the folder may be gone."""
    target, folder = tiny_target(), str(tmp_path / "s")
    first = make("eagle", target)
    hub.save(first, folder, target.card, torch.float32)
    head = {"name": "eagle", **arguments("eagle")}
    settings = {"head": head | {"name": began.get("name", "eagle")}, "trainer": {"start": began.get("start", folder)}}
    checkpoint.save(tmp_path / "run", 1, {"drafter": {"w": torch.zeros(1)}}, {"seconds": 0.0, "tokens": 0, "settings": settings})
    if not read:
        shutil.rmtree(folder)
    drafter, _ = open_start(folder, head, target, NO_SOURCE, [tmp_path / "run"], resume)
    assert equal(drafter.state_dict(), first.state_dict()) == read


@pytest.mark.parametrize(
    ("start", "head", "says"),
    [
        ("runs/it/speculator", {}, r"trainer\.start=runs/it/speculator is what this very run writes: .*out=DIR"),
        ("there", {"lora": {"rank": 4}}, r"goes on with all weights: for LoRA take head\.folder=there head\.config=null instead"),
    ],
)
def test_starts_that_cannot_be(start, head, says):
    with pytest.raises(UserError, match=says):
        check_start(start, head, [Path("runs/it")])


def test_a_run_does_not_start_from_what_it_writes(composed, overrides, tmp_path):
    with pytest.raises(UserError, match="this very run"):
        run(**composed(*overrides, f"trainer.start={tmp_path / 'run' / 'speculator'}"))
    assert not (tmp_path / "run").exists()


def test_a_fresh_drafter_is_that_of_its_seed_and_begins_with_the_targets_head():
    """Whatever was drawn before it, and by whom; so is the random state that its training begins with."""
    target = tiny_target()

    def first(seed, **more):
        torch.rand(3)
        own = {"head": {"name": "eagle", **arguments("eagle"), **more}, "trainer": {"seed": seed, "start": None, "resume": True}}
        return first_drafter("", own, target, SimpleNamespace(counts=lambda: counts), [])

    counts = torch.ones(target.shape.vocab_size)
    counts[[7, 50, 3]] = 9.0
    (one, state), (again, same), (other, another) = first(1), first(1), first(2)
    assert equal(one.state_dict(), again.state_dict()) and equal(state, same)
    assert not equal(one.state_dict(), other.state_dict()) and not equal(state, another)
    assert torch.equal(one.lm_head.weight, target.ends.head_VD)
    (trimmed, _) = first(1, draft_vocab=3)
    assert trimmed.unembedding(1).ids_V.tolist() == [3, 7, 50], "the most frequent tokens of the data"
    assert torch.equal(trimmed.lm_head.weight, target.ends.head_VD[[3, 7, 50]])


def test_a_start_decoded_with_two_targets_has_a_row_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with two arms that train the target too: of two rows with one name, a comparison would show the last."""
    monkeypatch.setattr(began, "open_speculator", lambda folder, target: SimpleNamespace(acceptance=None))
    monkeypatch.setattr(began, "Contender", lambda drafter, policy: drafter)
    monkeypatch.setattr(began.prior, "measure", lambda *_: None)
    frozen, other, third = object(), object(), object()
    starts = {"one": "S", "two": "S", "three": "S", "four": "T", "new": None}
    targets = dict(zip(starts, (frozen, frozen, other, third, frozen), strict=True))
    both = began.Began({name: {"trainer": {"start": start}} for name, start in starts.items()}, targets)  # type: ignore[arg-type]
    rows = [[*both.of(target, None, [])] for target in (frozen, other, third)]  # type: ignore[arg-type]
    wanted = ["trainer.start=S with the target of one, two", "trainer.start=S with the target of three", "trainer.start=T"]
    assert rows == [[name] for name in wanted]
