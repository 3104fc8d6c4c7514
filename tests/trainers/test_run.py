"""Whole runs, from composed settings to a report: resumed, killed, interrupted, from captured shards."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headstart.door import infer
from headstart.door.data import capture_states
from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports import prior
from headstart.trainers import checkpoint
from headstart.trainers import run as run_module
from headstart.trainers.interrupt import AFTER
from headstart.trainers.metrics import read_metrics
from headstart.trainers.run import run
from tests.starting import LONGEST
from tests.trainers.conftest import ROOT, check_trained_alike, equal, weights

FIGURES = {"accepted_length", "acceptance_by_depth", "expected_length", "tokens_per_second", "plain_tokens_per_second", "speedup",
           "target_passes", "new_tokens"}  # fmt: skip
ALWAYS = {"head", "target", "temperature_0", "temperature_1", "hf_generate_tokens_per_second", "lossless", "prompts", "tree", "proposer",
          "dtype", "device", "versions", "commit"}  # fmt: skip
AFTER_TRAINING = {"train_seconds", "train_tokens"}


def check_report(folder: Path, keys: set[str]) -> None:
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG") and (folder / "report.md").read_text().startswith("# ")
    report = json.loads((folder / "report.json").read_text())
    assert report.keys() >= keys
    for temperature in ("temperature_0", "temperature_1"):
        assert report[temperature].keys() >= FIGURES
        assert len(report[temperature]["acceptance_by_depth"]) == report["tree"]["depth"]
    assert report["tree"].keys() == {field.name for field in fields(TreePolicy)} and report["lossless"] is True
    assert report["temperature_1"].keys() >= {field.name for field in fields(SamplingParams)} - {"temperature"}


def test_a_run_and_the_same_again(composed, overrides, tmp_path, monkeypatch, capsys):
    """What a run leaves; then a finished run reports again without training, and refuses other settings by name."""
    out = tmp_path / "run"
    report = run(**composed(*overrides))[""]
    check_report(out, ALWAYS | AFTER_TRAINING)
    said, card = capsys.readouterr().out, (out / "speculator" / "README.md").read_text()
    commands = [c["text"] for c in report["serving"] if c["language"] == "bash"]
    assert any(text.startswith("vllm serve ") for text in commands)
    for text in commands:  # one table: what is printed, the report and the card
        assert text in said and text in card and text in (out / "report.md").read_text()
    assert "4 steps" in card and "held-out text of chat" in card and "lr 0.008" in card
    assert report["train_tokens"] == 4 * 2 * 64 and report["train_steps"] == 4
    kept = {"config.json", "checkpoints", "speculator", "metrics.jsonl", "rounds.jsonl"}
    kept |= {f"report.{kind}" for kind in ("json", "md", "png", "html")}
    assert {p.name for p in out.iterdir()} == kept
    config = json.loads((out / "config.json").read_text())
    assert config["trainer"]["steps"] == 4 and config["provenance"].keys() >= {"versions", "commit"}
    drafter = hub.load(out / "speculator", Target.load(config["target"]["path"]).shape)
    trained = weights(out)
    assert equal({k: v for k, v in drafter.state_dict().items() if k in trained}, trained)

    capsys.readouterr()
    (out / "report.json").unlink()
    again = run(**composed(*overrides))[""]
    said = capsys.readouterr().out
    assert "resuming after step 4" in said and "held-out loss" not in said
    check_report(out, ALWAYS | AFTER_TRAINING)
    assert again["train_seconds"] == report["train_seconds"]
    assert again["temperature_0"]["accepted_length"] == report["temperature_0"]["accepted_length"]
    assert equal(weights(out), trained)

    for change, key in (
        (["trainer.lr=0.5"], r"trainer\.lr=0\.008, now it is 0\.5"),
        (["head.intermediate_size=24"], r"head\.intermediate_size=None, now it is 24"),
        (["trainer.optimizer=adamw"], r"trainer\.optimizer=muon, now it is adamw"),
        (["data.on_bad=skip"], r"data\.on_bad=error, now it is skip"),
        (["loss=tv"], r"loss\.terms\.kl=1\.0, now it is None"),
    ):
        with pytest.raises(UserError, match=f"holds a run with {key}"):
            run(**composed(*overrides, *change))
    assert json.loads((out / "config.json").read_text()) == config  # a refused run changes nothing
    state = json.loads((checkpoint.folders(out)[-1] / "state.json").read_text())
    assert state["config"]["trainer"]["lr"] == 0.008 and state["provenance"].keys() >= {"versions", "commit"}
    run(**composed(*overrides, "decode.nodes=4", "trainer.keep=1", "export.dtype=bfloat16"))  # these may change
    run(**composed(*overrides, "trainer.resume=false", "trainer.lr=0.5", "trainer.steps=2", "trainer.precision=bf16"))
    assert [p.name for p in checkpoint.folders(out)] == ["step-00000002"]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    earlier = (out / "speculator" / "model.safetensors").read_bytes()
    monkeypatch.setattr(hub, "save_file", full)
    with pytest.raises(UserError, match=r"speculator cannot be written .*No space left.*untouched"):
        run(**composed(*overrides, "trainer.lr=0.5", "trainer.steps=2"))
    assert (out / "speculator" / "model.safetensors").read_bytes() == earlier
    assert sorted(p.name for p in (out / "speculator").iterdir()) == ["README.md", "acceptance.json", "config.json", "model.safetensors"]


def test_weights_are_stored_in_the_targets_dtype(composed, overrides, tmp_path):
    small = ["target.dtype=bfloat16", "trainer.steps=1", "trainer.warmup=1", "decode.new_tokens=2"]
    run(**composed(*overrides, *small))
    config = json.loads((tmp_path / "run" / "speculator" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_the_acceptance_that_a_folder_states_is_of_questions_asked_in_full(composed, overrides, conversations, monkeypatch):
    """Of prompts where the assistant is about to answer, like the report's but others; not of the first tokens of a row, in the middle of
    a question.
    """
    config, asked, reported = composed(*overrides), [], []

    def watched(where, name, prompts):
        real = getattr(where, name)

        def call(target, guesser, given, *rest, **more):
            prompts.extend(given)
            return real(target, guesser, given, *rest, **more)

        monkeypatch.setattr(where, name, call)

    watched(prior, "measure", asked)
    watched(run_module, "make_reports", reported)
    run(**config)
    tokenizer = AutoTokenizer.from_pretrained(config["target"]["path"])
    questions = {line["messages"][0]["content"] for line in map(json.loads, conversations.read_text().splitlines())}
    texts = [[{"role": "user", "content": each}] for each in questions]
    rendered = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"] for text in texts]
    assert asked and all(prompt in rendered and prompt not in reported for prompt in asked)


SLOW_FROM_STEP_45 = """
import runpy, time
from headstart.trainers import checkpoint
from headstart.trainers.metrics import read_metrics

def slowly(run, step, *rest, save=checkpoint.save):
    if step > 45:
        time.sleep(3)
    return save(run, step, *rest)

checkpoint.save = slowly
runpy.run_path("train.py", run_name="__main__")
"""


def start(*arguments: str, script: Sequence[str] = ("train.py",)) -> subprocess.Popen[str]:
    # gloo warns of a host whose name does not resolve, unless it is told where to listen
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *script, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(process: subprocess.Popen[str], out: Path, after: int) -> None:
    """Until a checkpoint beyond this step is there."""
    end = time.monotonic() + 120
    while not any(int(p.name[5:]) > after for p in checkpoint.folders(out)):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_and_interrupted_and_the_same_in_the_end(composed, overrides, tmp_path, capsys):
    """kill -9, then Ctrl-C, then the rest: the weights of a run that nothing disturbed."""
    out, more = tmp_path / "run", ["trainer.steps=60", "trainer.save_every=3", "trainer.eval_every=100"]
    script = ("-c", SLOW_FROM_STEP_45)  # it waits for the signal, however fast it is
    process = start(*overrides, *more, script=script)
    wait_for_steps(process, out, 0)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    killed_at = int(checkpoint.folders(out)[-1].name[5:])
    assert 3 <= killed_at < 60

    process = start(*overrides, *more, script=script)
    wait_for_steps(process, out, killed_at)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    stopped_at = int(checkpoint.folders(out)[-1].name[5:])
    assert killed_at < stopped_at < 60
    flat = " ".join(said.split())
    assert f"resuming after step {killed_at}" in flat and AFTER in flat
    assert f"stopped after step {stopped_at}; the same command resumes from {out}/checkpoints" in flat
    assert "Traceback" not in said and not (out / "speculator").exists()

    run(**composed(*overrides, *more))
    assert f"resuming after step {stopped_at}" in " ".join(capsys.readouterr().out.split())
    undisturbed = tmp_path / "undisturbed"
    run(**composed(*overrides, *more, f"out={undisturbed}"))
    assert equal(weights(out), weights(undisturbed))
    steps = [line["step"] for line in read_metrics(out) if "train/loss" in line]
    assert steps == [1, 10, 20, 30, 40, 50, 60]


@pytest.mark.slow
def test_captured_shards_train_without_the_target(composed, overrides, target_folder, tmp_path, monkeypatch):
    """`python -m data`, a training without a pass of the target, and `python -m inference` on what it exports."""

    where, shards = overrides[:6], tmp_path / "shards"
    assert where[5].startswith("path=")
    capture_states(composed(*where, f"out={shards}", "length=64", door="capture"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "count from 1"}\n{"text": "4 5 6 7"}\n')
    live = run(**composed(*overrides))[""]

    passes = []
    read, fit = Target.read, run_module.fit
    monkeypatch.setattr(Target, "read", lambda self, *a: passes.append(1) or read(self, *a))

    def watched(*arguments, **keywords):
        before = len(passes)
        interrupted = fit(*arguments, **keywords)
        assert len(passes) == before
        return interrupted

    monkeypatch.setattr(run_module, "fit", watched)
    captured = [o for o in overrides if not o.startswith(("data=", "path=", "out="))]
    captured += ["data=shards", f"path={shards}", f"data.prompts_file={prompts}", f"out={tmp_path / 'captured'}"]
    with pytest.raises(UserError, match=r"rows of 64 tokens, trainer\.length is 128"):
        run(**composed(*captured, "trainer.length=128"))
    report = run(**composed(*captured))[""]
    check_report(tmp_path / "captured", ALWAYS | AFTER_TRAINING)
    assert report["train_tokens"] == live["train_tokens"]

    settings = {"speculator": f"{tmp_path}/run/speculator", "prompts": str(prompts), "out": None}
    decoding = [o for o in overrides if o.startswith(("target", "decode"))]
    monkeypatch.setattr(infer, "overrides", lambda: decoding)
    infer.report(composed(*decoding, door="inference") | settings)
    check_report(tmp_path / "run" / "report-prompts", ALWAYS)
    card = (tmp_path / "run" / "speculator" / "README.md").read_text()  # the figures on other prompts stand beside those of the run
    assert "## What it gains: held-out text of chat" in card and "## What it gains: prompts" in card and "4 steps" in card
    assert (tmp_path / "run" / "report-prompts" / "report.md").read_text().startswith("# eagle for ")

    made = ["decode.min_p=0.1", "decode.repetition_penalty=1.2", "decode.seed=7"]
    union = composed(*decoding, *made, "decode=union", door="inference") | settings | {"out": str(tmp_path / "union")}
    infer.report(union)
    report = json.loads((tmp_path / "union" / "report.json").read_text())
    assert report["head"] == "union" and report["proposer"] == {"kind": "union", "parts": [{"kind": "suffix"}, {"kind": "drafter"}]}
    assert [report["temperature_1"][key] for key in ("min_p", "repetition_penalty", "seed")] == [0.1, 1.2, 7]
    elsewhere = {"drafter_device": "cpu", "out": str(tmp_path / "elsewhere")}
    infer.report(composed(*decoding, door="inference") | settings | elsewhere)
    report = json.loads((tmp_path / "elsewhere" / "report.json").read_text())
    assert report["head"] == "eagle" and report["proposer"] == {"kind": "drafter"}


@pytest.mark.slow
def test_processes_of_one_machine(composed, overrides, tmp_path):
    """launcher=processes: two of them with half the rows each end where one ends with all rows."""
    overrides = [*overrides, "trainer.optimizer=adamw"]  # Muon's rounding to bf16 would enlarge what rounding differs
    process = start(*overrides, "launcher=processes", "trainer.batch_size=1", f"out={tmp_path / 'two'}")
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert "Warning" not in said and "Traceback" not in said, said
    check_report(tmp_path / "two", ALWAYS | AFTER_TRAINING)
    run(**composed(*overrides))
    check_trained_alike(weights(tmp_path / "two"), weights(tmp_path / "run"), lr=0.008, steps=4)


def test_ctrl_c_in_the_report_says_what_is_there(composed, overrides, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(**composed(*overrides))
    said = f"the training is complete and exported in {tmp_path / 'run'}; the same command makes the report"
    assert said in capsys.readouterr().out and (tmp_path / "run" / "speculator" / "config.json").is_file()


def test_ctrl_c_before_or_after_the_training_is_one_line_too(monkeypatch, capsys):
    from headstart import door

    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the door sets it: undone afterwards
    with pytest.raises(SystemExit) as ended:
        door.enter("config", interrupted)
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


INTERRUPTED = """
import os, signal, sys, time

class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "headstart.heads.orders":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            except KeyboardInterrupt:
                raise ImportError("half of it is there") from None

sys.meta_path.insert(0, Interrupted())
import runpy
runpy.run_module("headstart.door.DOOR", run_name="__main__")
"""


@pytest.mark.parametrize("door", ["train", "data", "infer"])
def test_ctrl_c_while_torch_is_imported_is_one_line_too(door, tmp_path):
    """A library may make an error of its own of it."""
    said = {"infer": [f"speculator={ROOT / 'assets' / 'tiny_eagle'}", f"prompts={tmp_path / 'prompts.jsonl'}"]}.get(door, [])
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    code = INTERRUPTED.replace("DOOR", door)
    command = [sys.executable, "-c", code, *said, f"out={tmp_path / 'run'}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert ended.returncode == 130 and ended.stderr == "interrupted\n", ended.stderr


@pytest.mark.slow
def test_the_shipped_target_learns_from_the_standard_library(composed, tmp_path):
    """The defaults, shortened: `python train.py experiment=smoke`."""
    if not (ROOT / "assets" / "tiny" / "model.safetensors").is_file():
        pytest.skip("assets/tiny is not there (assets/train_tiny.py makes it)")
    run(**composed("experiment=smoke", f"out={tmp_path / 'run'}"))
    check_report(tmp_path / "run", ALWAYS | AFTER_TRAINING)
