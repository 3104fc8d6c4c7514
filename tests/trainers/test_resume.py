"""What a run goes on from: the same settings and the same rows, and a number of steps that its schedule allows."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.reports.compare import flat
from headstart.trainers import checkpoint, resume
from headstart.trainers import prepare as preparing
from headstart.trainers.optimizer import before_the_fall, learning_rate
from headstart.trainers.resume import Batch, _same_settings, lasting
from headstart.trainers.run import fit, prepare
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import Composed, small_run
from tests.trainers.small import LOOP, quiet, train


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def trained(target: Target, run: Path, steps: int, *, base_until: float = 0.0, stop: int | None = None, **changes: Any) -> dict[str, Any]:
    """Weights after ``steps``, or after the failure of step ``stop``; the settings are those that a run compares."""
    loop = LOOP | {"schedule": "wsd", "save_every": 5, "keep": 1} | changes
    own = {"steps": steps, "lora": None} | {k: loop[k] for k in ("warmup", "schedule")}
    drafter = quiet("medusa", target)
    more: dict[str, Any] = {} if stop is None else {"each": lambda i: 1 // (stop - start - i)}
    start = checkpoint.step_of(checkpoint.folders(run)[-1]) if stop is not None and checkpoint.folders(run) else 0
    try:
        train(drafter, target, run, settings={"trainer": own, "loss": {"base_until": base_until}}, **loop | {"steps": steps}, **more)
    except ZeroDivisionError:
        assert stop is not None
    return drafter.state_dict()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def steps(run: Path) -> list[int]:
    return [checkpoint.step_of(folder) for folder in checkpoint.folders(run)]


@pytest.mark.parametrize("steps", [1, 4, 7, 8, 10, 60, 350, 1000])
@pytest.mark.parametrize("warmup", [0, 2, 20])
def test_what_is_kept_for_a_longer_run_is_the_last_that_knows_nothing_of_the_end(steps: int, warmup: int) -> None:
    kept = before_the_fall(steps, warmup, "wsd")
    assert kept is not None and kept <= steps
    rates = [[learning_rate(t, n, warmup, "wsd") for t in range(min(kept + 1, steps))] for n in (steps, 2 * steps, 9 * steps)]
    assert rates[0][:kept] == rates[1][:kept] == rates[2][:kept]
    assert kept == steps or rates[0][kept] < rates[1][kept]
    assert before_the_fall(steps, warmup, "cosine") is None


@pytest.fixture(scope="module")
def twenty(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(target, tmp_path_factory.mktemp("twenty"), 20)


def test_a_finished_run_can_be_prolonged(
    target: Target, twenty: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the bit what it would have been: from where the rate had not begun to fall, through a kill on the way."""
    ten = trained(target, tmp_path, 10)
    assert steps(tmp_path) == [9, 10]
    assert same(trained(target, tmp_path, 10), ten)  # the same again trains nothing
    capsys.readouterr()
    trained(target, tmp_path, 20, stop=7 + 10)
    said = " ".join(capsys.readouterr().out.split())
    assert f"resuming after step 9 ({tmp_path}/checkpoints/step-00000009), now to step 20 instead of 10" in said
    assert "those after step 9 led to another number of steps, 1 earlier checkpoint removed" in said
    assert steps(tmp_path) == [15]
    assert same(trained(target, tmp_path, 20), twenty)
    assert steps(tmp_path) == [17, 20]
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 10, 20]


def test_a_run_that_stands_before_the_fall_becomes_longer_or_shorter(target: Target, twenty: dict[str, Any], tmp_path: Path) -> None:
    eight = trained(target, tmp_path / "eight", 8)
    trained(target, tmp_path / "run", 10, stop=6)
    assert steps(tmp_path / "run") == [5]
    assert same(trained(target, tmp_path / "run", 8), eight)
    trained(target, tmp_path / "more", 10, stop=6)
    assert same(trained(target, tmp_path / "more", 20), twenty)
    with pytest.raises(UserError, match=r"holds a run of trainer\.steps=20 at step 20, which cannot become one of 4: it is beyond them"):
        trained(target, tmp_path / "more", 4)


@pytest.mark.parametrize(("changes", "why"), [
    ({"schedule": "cosine"}, r"trainer\.schedule=cosine has fallen on its way to 6"),
    ({"base_until": 0.5}, r"trainer\.warmup below 1, loss\.base_until and trainer\.lora\.start are shares of the steps"),
    ({"warmup": 0.5}, r"trainer\.warmup below 1, loss\.base_until and trainer\.lora\.start are shares of the steps"),
])  # fmt: skip
def test_a_run_that_cannot_be_prolonged_says_what_can_be_done(changes: dict[str, Any], why: str, target: Target, tmp_path: Path) -> None:
    trained(target, tmp_path, 6, **changes)
    before = sorted(tmp_path.rglob("*"))
    says = rf"^{tmp_path} holds a run of trainer\.steps=6 at step 6, which cannot become one of 9: {why}\. Either "
    start = rf"go on from its weights in a folder of its own \(trainer\.start={tmp_path}/speculator out=DIR\), or start over with trainer"
    with pytest.raises(UserError, match=rf"{says}finish it \(trainer\.steps=6\) and {start}\.resume=false$"):
        trained(target, tmp_path, 9, **changes)
    (tmp_path / "speculator").mkdir()
    with pytest.raises(UserError, match=says + start):
        trained(target, tmp_path, 9, **changes)
    assert set(tmp_path.rglob("*")) - set(before) == {tmp_path / "speculator"}  # and nothing is gone
    assert set(before) <= set(tmp_path.rglob("*"))


def test_a_cosine_is_prolonged_within_its_warm_up(target: Target, tmp_path: Path) -> None:
    at_once = trained(target, tmp_path / "a", 9, schedule="cosine", warmup=6)
    trained(target, tmp_path / "b", 7, schedule="cosine", warmup=6, stop=6)
    assert same(trained(target, tmp_path / "b", 9, schedule="cosine", warmup=6), at_once)


# ---- whole runs ----


def only_trained(config: dict[str, Any]) -> None:
    with prepare(**config) as job:
        fit(job)


def test_changed_data_are_not_gone_on_with(composed: Composed, target_folder: Path, conversations: Path, tmp_path: Path) -> None:
    """The same file, other words in it; and another row held out is another row trained on."""
    mine, out = tmp_path / "mine.jsonl", tmp_path / "run"
    lines = conversations.read_text().splitlines()
    mine.write_text("\n".join(lines))
    config = composed(*small_run(target_folder, mine, out))
    only_trained(config)
    held = json.loads((checkpoint.folders(out)[-1] / "state.json").read_text())["settings"]["rows"]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for changed in ([*lines[:-1], lines[-1].replace("1", "2")], lines[:-3], [*lines, lines[0]]):
        mine.write_text("\n".join(changed))
        says = rf"{out} holds a run that was trained on other rows: the data have changed since, .*SHA-256 {held[:12]}, now .*out=DIR\), or"
        with pytest.raises(UserError, match=says):
            prepare(**config)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    mine.write_text("\n".join(lines))
    only_trained(config)


def test_what_is_there_is_compared_before_the_target_is_loaded(
    composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_trained(composed(*overrides))

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("headstart.trainers.prepare.open_target", loaded)
    for change, says in (("trainer.lr=0.5", r"trainer\.lr=0\.008, now it is 0\.5"), ("head=medusa", "holds a run with head"),
                         ("loss=tv", r"loss\.terms")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            prepare(**composed(*overrides, change))
    weights = checkpoint.folders(tmp_path / "run")[-1] / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"drafter\.safetensors is damaged"):
        prepare(**composed(*overrides))


def test_a_clock_that_jumps_changes_nothing(
    target: Target, twenty: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days, back and forth, while it trains and where it goes on; the newest checkpoint is the oldest file."""
    now, days = time.time(), cycle((0, 5, -3, 1, -9))
    monkeypatch.setattr(time, "time", lambda: now + 86400 * next(days))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))
    trained(target, tmp_path, 20, keep=3, stop=17)
    assert len(steps(tmp_path)) > 2
    for folder in checkpoint.folders(tmp_path):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (now - 86400 * checkpoint.step_of(folder),) * 2)
    newest = steps(tmp_path)[-1]
    before = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert same(trained(target, tmp_path, 20, keep=3), twenty)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert before and all(line["step"] > newest for line in lines[before:])
    speeds = [line[key] for line in lines for key in line if key.startswith("speed/")]
    assert speeds and all(0 <= speed < float("inf") for speed in speeds)


def test_two_runs_do_not_write_into_one_folder(composed: Composed, overrides: list[str], tmp_path: Path) -> None:
    """Nor an arm of several and a run of its own in the folder of that arm; the same again is free once the first has ended."""
    base = composed(*overrides)
    arms = {name: {k: base[k] for k in ("head", "loss", "trainer")} for name in ("a", "b")}
    says = r"^out={} is being written by process \d+ on .*: wait for it, end it, or choose another folder$"
    with prepare(**base), pytest.raises(UserError, match=says.format(tmp_path / "run")):
        prepare(**base)
    with prepare(**base | {"arms": arms}):
        for taken in ("run", "run/a"):
            with pytest.raises(UserError, match=says.format(tmp_path / taken)):
                prepare(**base | {"out": str(tmp_path / taken)})
    lora = {"rank": 4, "alpha": 8, "names": ["nope"], "lr": 1e-2, "start": 0.5, "weight": 2.0}
    with pytest.raises(UserError, match=r"trainer\.lora"):
        prepare(**base | {"trainer": base["trainer"] | {"lora": lora}})
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == ["a", "b", "config.json", "config.json", "config.json"]
    prepare(**base).held.close()


@pytest.mark.parametrize(("change", "says"), [
    ({"out_fallback": "/nowhere/at/all"}, r"out_fallback must be null or a folder that is there"),
    ({"out_fallback": "runs/.."}, r"out_fallback=runs/\.\. is where out=elsewhere is"),
])  # fmt: skip
def test_places_that_cannot_be(
    change: dict[str, Any], says: str, composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=says):
        prepare(**composed(*overrides) | {"out": "elsewhere"} | change)
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_of_another_drafter_the_name_is_said_first(tmp_path: Path) -> None:
    saved, now = ({"head": {"name": name, key: 1}, "rows": name} for name, key in (("a", "deep"), ("b", "wide")))
    with pytest.raises(UserError, match=r"holds a run with head\.name=.?a.?, now it is .?b"):
        _same_settings(saved, now, tmp_path / "checkpoints" / "step")


@pytest.mark.parametrize(
    ("key", "then", "other", "more"), [("norm_before_fc", False, True, {"norm_before_residual": False}), ("markov", "vanilla", "rnn", {})]
)
def test_a_run_of_before_a_setting_was_there_did_what_it_stands_for_now(
    key: str, then: Any, other: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    before: dict[str, Any] = {"head": {"name": "eagle", "layers": 1}}
    for value, fits in ((then, True), (other, False)):
        now = {"head": before["head"] | more | {key: value}}
        with nullcontext() if fits else pytest.raises(UserError, match=rf"head\.{key}={then}, now it is {other}"):
            _same_settings(before, now, tmp_path / "run" / "checkpoints" / "step-1")


def test_what_changes_weights_is_compared_and_what_does_not_is_not(composed: Composed) -> None:
    settings = composed("target=tiny", "data=stdlib")
    own = {k: settings[k] for k in ("head", "loss", "trainer")}

    def compared(part: str, key: str) -> bool:
        changed = own | {part: own[part] | {key: "another"}}
        return lasting(changed, settings["data"], Batch(2, 1, 1)) != lasting(own, settings["data"], Batch(2, 1, 1))

    weights = {"trainer": ("optimizer", "lr", "betas", "weight_decay", "muon_lr", "momentum", "ns_steps", "warmup", "schedule", "floor",
                           "clip", "seed", "length", "steps"),
               "loss": ("terms", "decay", "depth", "weighting", "base_until", "constants", "on_policy", "detach")}  # fmt: skip
    assert [(part, key) for part, keys in weights.items() for key in keys if not compared(part, key)] == []
    assert [key for key in ("save_every", "keep", "eval_every", "log_every", "patience", "precision") if compared("trainer", key)] == []
    assert [key for key in ("kernel", "chunk") if compared("loss", key)] == []


@pytest.mark.parametrize(("warmup", "lora", "base_until", "shares"), [
    (0, None, 0.0, False), (1, None, 0.0, False), (0.05, None, 0.0, True), (0, {"start": 0.5}, 0.0, True), (0, None, 0.5, True),
])  # fmt: skip
def test_which_settings_are_shares_of_the_steps(warmup: float, lora: Any, base_until: float, shares: bool) -> None:
    assert resume.counts_in_shares(warmup, lora, base_until) == shares


def test_processes_that_differ_do_not_train_together(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads its own files. What the second process has stands here for what it would send."""
    own = {"rows": "ab12", "trainer": {"steps": 4}, "target": {"sha256": "cd34"}}
    run = dict(settings=own, steps=1, resume=False)
    for step, other, says in (
        (0, own | {"rows": "98fe", "trainer": {"steps": 54}}, r"differ in rows, trainer\.steps: .*the same files of the target and of the"),
        (0, own | {"target": {"sha256": "00"}}, r"differ in target\.sha256: start all of them with the same"),
        (3, own, r"out must be a folder that all machines share: in .* finds a checkpoint of step 3, another stands at 0"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=says):
            patch.setattr(resume, "gather_object", lambda here, step=step, other=other: [*here, (step, flat(other))])
            train(quiet("medusa", target), target, tmp_path / "run", **run)
    monkeypatch.setattr(resume, "gather_object", lambda here: here * 2)
    train(quiet("medusa", target), target, tmp_path / "run", **run)


def test_processes_that_share_the_target_compare_their_rows_before_they_read_together(
    composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their passes would have different sizes, which gloo and NCCL do not say in words that help."""
    read = list[object]()
    monkeypatch.setattr(preparing, "is_sharded", lambda device: device == "cpu", raising=False)
    monkeypatch.setattr(preparing, "_held_out", lambda job: read.append(job) or [])

    def with_another(here: list[Any]) -> list[Any]:
        return [*here, (here[0][0], here[0][1] | {"rows": "others"})]

    monkeypatch.setattr(resume, "gather_object", with_another)
    settings = composed(*overrides, "target.device=cpu", "report=none")
    with pytest.raises(UserError, match="the processes of this run differ in rows: start all of them"), preparing.prepare(**settings):
        pass
    assert read == []
    monkeypatch.setattr(resume, "gather_object", lambda here: here * 2)
    with preparing.prepare(**settings) as job:
        assert read == [job]
