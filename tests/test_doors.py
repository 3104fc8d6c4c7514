"""The frame of the doors: what is said first, what --help says, and command lines as people type them."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from headstart.data.capture import capture
from headstart.door import data, usage
from headstart.door.arguments import check_overrides, no_such_key
from headstart.door.data import say_next
from headstart.door.places import check_out
from headstart.door.values import CONF, choices
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.hf import speculate
from tests.data.captures import FakeTarget, rows
from tests.doors import ROOT, call
from tests.starting import LONGEST

EAGLE = ROOT / "assets" / "tiny_eagle"
OWN = {  # door -> its settings, but for those of its groups
    "config": {"out", "arms"},
    "advise": {"report", "task", "published", "sequences", "context", "gpu", "gpus"},
    "capture": {"out", "taps", "storage", "length", "batch_size", "seed"},
    "engine": {"folder", "taps", "length", "port"},
    "inference": {"speculator", "drafter_device", "prompts", "out"},
    "evaluate": {"speculator", "path", "against", "assistant", "temperatures", "sequences", "new_tokens", "count", "raw", "on_long", "out"},
    "tune": {"speculator", "prompts", "count", "new_tokens", "sequences", "out"},
}
WITHOUT_TORCH = f"""
import contextlib, io, sys
sys.modules["torch"] = None
from headstart.door import data, infer, train
doors = {{"train": train.start, "data": data.main, "inference": infer.main}}
for command in [
    ["train"], ["data"], ["data", "regenerate"], ["inference", "speculator={EAGLE}", "prompts={ROOT}/LICENSE"],
    ["inference", "tune", "speculator={EAGLE}", "prompts={ROOT}/LICENSE"], ["inference", "chat"], ["inference", "serve", "port=0"],
]:
    for more in ([], ["--help"], ["--cfg", "job"]):
        sys.argv, said = [*command, *more], io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(ImportError):
            doors[command[0]]()
            assert more, f"{{command}} did without torch"
        first = said.getvalue()
        assert len(first) > 200 if more else first.startswith("loading tiny (assets/tiny)") and first.count("\\n") == 1, (command, first)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user does."""
    own = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=own, capture_output=True, text=True, timeout=LONGEST)


# ---- what is said first ----


def test_something_is_said_before_torch_is_loaded_and_help_needs_none() -> None:
    done = run("-W", "ignore", "-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_is_one_line_to_a_user() -> None:
    done = run("train.py", "trainer.stepz=3")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""
    assert "did you mean trainer.steps?" in done.stderr


@pytest.mark.parametrize(
    "argument, said",
    [
        ("steps=40", "no key 'steps' (did you mean trainer.steps?)"),
        ("batch_size=4", "no key 'batch_size' (did you mean trainer.batch_size?)"),
        ("seed=4", "no key 'seed' (did you mean decode.seed or trainer.seed?)"),
        ("trainr.steps=4", "no key 'trainr.steps' (did you mean trainer.steps?)"),
        ("decode.temperature=1", "no key 'decode.temperature'; beside it: decode.proposer, "),  # nothing there is like it
        ("data=text", "path has no value: give path=... (FILE.txt, .md or .jsonl"),
        ("target=folder", "target.path has no value: give target.path=... (a Hugging Face folder"),
        ("target=nosuch7b", "; any other, a folder or a name on the hub: target=folder target.path=nosuch7b"),
        ("target=owner/model-1.0", "error: target=owner/model-1.0: there is no such choice, target is one of deepseek_v3, "),
        ("target=owner/model-1.0", "tiny; any other, a folder or a name on the hub: target=folder target.path=owner/model-1.0\n"),
        ("target=/tmp/folder", "target.path=/tmp/folder\n"),
        ("data=/srv/x.jsonl", "data=/srv/x.jsonl: there is no such choice, data is one of chat, "),
        ("data=/srv/x.jsonl", ": data=chat path=/srv/x.jsonl (conversations) or data=text path=/srv/x.jsonl\n"),
        ("data=tekst", "(did you mean text?)"),
        ("head=runs/a/b", "head=runs/a/b: there is no such choice, head is one of dflare, dflash, "),
        ("arms={a:head=eagle,b:head=eagel}", """on the command line: give arms="{a:'head=NAME',b:'head=NAME loss=tv'}", with both"""),
    ],
)
def test_a_mistake_is_met_with_what_was_meant(
    argument: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", [argument], tmp_path, monkeypatch) == 2
    assert said in (line := capsys.readouterr().err) and line.count("\n") == 1


def test_a_folder_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, meant in (
        (str(EAGLE), f"settings are key=value (speculator={EAGLE}?)\n"),
        ("no/folder", "settings are key=value\n"),
        ("x" * 300, "key=value\n"),
    ):
        assert call("inference", ["serve", folder], tmp_path, monkeypatch) == 2
        assert capsys.readouterr().err.endswith(meant)


def test_what_is_missing_is_said_with_its_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("inference", [f"speculator={EAGLE}"], tmp_path, monkeypatch) == 2
    assert "prompts has no value: give prompts=... (FILE.jsonl: lines with `turns`" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "3"])
def test_one_of_several_processes_does_not_say_it(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert call("train", ["head.layers=0"], tmp_path, monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: " if rank == "0" else "error (process 3): ")


@pytest.mark.parametrize("arguments", [["regenerate", "data=chat", "new_tokens=4", "limit=1"]])
def test_of_torchruns_processes_the_first_makes_the_data(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others would write the same files, and be refused their folder; where one is, torchrun ends them all."""
    texts = [
        [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": f"{i} is one more than {i - 1}"}] for i in range(9)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in texts))
    monkeypatch.setenv("WORLD_SIZE", "2")
    door = "data regenerate" if arguments[0] == "regenerate" else "data"
    for rank in "1", "0":
        monkeypatch.setenv("RANK", rank)
        assert call(door, [a for a in arguments if a != "regenerate"] + ["path=talks.jsonl", "out=made"], tmp_path, monkeypatch) == 0
        assert (tmp_path / "made").exists() == (rank == "0")
        said = capsys.readouterr().out
        assert said.splitlines()[:1] == (["one process does this: the other 1 of this run end at once"] if rank == "0" else [])


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_processes_are_counted_from_0(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is counted from 1 would capture nothing, and say that it has done its part."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("data", ["out=made"], tmp_path, monkeypatch) == 2
    assert f"RANK={rank}, WORLD_SIZE=2: processes are counted from 0" in capsys.readouterr().err


def test_two_mistakes_are_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", ["trainer.steps=0", "trainer.lr=0"], tmp_path, monkeypatch) == 2
    assert [line.split(" must")[0] for line in capsys.readouterr().err.splitlines()] == ["error: trainer.steps", "error: trainer.lr"]


# ---- help ----


def lines_of(text: str, part: str) -> list[str]:
    """Those of "Groups:" or "Settings:"."""
    return text.partition(f"\n{part}:\n")[2].partition("\n\n")[0].splitlines()


@pytest.mark.parametrize("door", sorted(p.stem for p in CONF.glob("*.yaml")))
def test_help_says_what_every_key_is_for(door: str) -> None:
    """Every setting with the comment of its YAML, its own groups and no others, each choice with the first line of its own."""
    text = usage.text(door, "", [])
    used = [group for group in usage.groups(door) if (door, group) not in (("capture", "loss"), ("engine", "loss"))]
    listed: dict[str, list[str]] = {}
    for line in lines_of(text, "Groups"):
        if line.startswith("      "):
            choice, says = line.split(maxsplit=1)
            assert says in (CONF / [*listed][-1] / f"{choice}.yaml").read_text()
            listed[[*listed][-1]].append(choice)
        else:
            listed[line.split("=")[0].strip()] = []
    assert listed == {group: choices(group) for group in used}
    settings = {line.strip().partition("=")[0]: line for line in lines_of(text, "Settings")}
    assert {key for key in settings if "." not in key} - {*used} >= OWN.get(door, set())
    assert [key for key, line in settings.items() if len(line) <= usage.WIDTH] == []


def leaves(settings: dict[str, object], prefix: str) -> Iterator[str]:
    for key, value in settings.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]


@pytest.mark.parametrize("group", ["head", "loss", "trainer", "decode", "data", "target", "launcher", "export", "tracker"])
def test_every_key_of_every_choice_has_a_comment(group: str) -> None:
    """Of its own, or of what holds it."""
    for choice in choices(group):
        path = CONF / group / f"{choice}.yaml"
        explained = usage.comments(path, group) | (usage.comments(CONF / "config.yaml", "") if group == "loss" else {})
        whole = OmegaConf.to_container(OmegaConf.load(path))
        settings = {k: v for k, v in whole.get(group, whole).items() if k != "defaults"}
        for key in leaves(settings, f"{group}."):
            assert any(f"{key}.".startswith(f"{above}.") for above in explained), f"{path.name}: {key} has no comment"


def test_the_line_on_a_choice_is_a_sentence_or_a_command() -> None:
    """--help shows the first line of a YAML alone."""
    broken = [str(path) for path in CONF.glob("*/*.yaml") if not re.search(r"([.?)]|\S=\S+|--\w+ \w+)$", usage.opening(path))]
    assert broken == []


def test_help_shows_the_settings_of_the_choice() -> None:
    text = usage.text("config", "", ["head=dflash", "data=chat", "trainer.steps=3"])
    settings = lines_of(text, "Settings")
    assert "\n  head=dflash " in text and "  data.path=???                         set by path=..." in settings
    says = "block size: the last known token plus block-1 guesses, made in one pass"
    assert [line for line in settings if line.startswith("  head.block=16 ") and says in line]


def test_help_shows_the_choice_that_was_asked_for_first() -> None:
    said = usage.text("config", "", ["loss=tv"])
    asked = said.partition("\nGroups:")[0]
    assert "loss=tv   " in asked and "Total variation" in asked and "  loss.terms={tv: 1.0}" in asked


def test_help_names_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    commands = [f"inference {command}" for command in ("tune", "diagnose", "expect", "advise", "chat", "serve")]
    for door in ("inference", "data", "train", *commands, *(f"data {command}" for command in ("regenerate", "verify", "engine"))):
        assert call(door, ["-h"], tmp_path, monkeypatch) == 0
        said[door] = capsys.readouterr().out
        assert f"\npython {'train.py' if door == 'train' else f'-m {door}'} " in said[door], "an example to start from"
    assert all(f"python -m inference {command} " in said["inference"] for command in ("tune", "chat", "serve"))
    assert "python -m data regenerate " in said["data"] and "python -m inference chat" not in said["inference tune"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_may_be_cut_short(unbuffered: str) -> None:
    cut = f"set -o pipefail; {sys.executable} train.py --help | true"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", cut], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_completes() -> None:
    """Hydra's completion, as bash asks for it."""
    line = "python train.py head=eag"
    done = run("train.py", "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), COMP_CWORD="2")
    assert set(done.stdout.split()) == {"head=eagle", "head=eagle1"} and done.returncode == 0, done.stderr


def test_cfg_job_prints_the_shapes_of_a_target_without_its_weights() -> None:
    done = run("train.py", "head=eagle", "target=llama70b", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert config.head.name == "eagle" and config.target.path == "meta-llama/Llama-3.3-70B-Instruct"
    shapes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    assert {key: config.target.config[key] for key in shapes} == shapes


# ---- the command line ----


def settings_of(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What `python train.py ARGUMENTS` would train with."""

    found: dict[str, object] = {}
    monkeypatch.setattr("headstart.trainers.run.run", lambda **config: found.update(config))
    assert call("train", arguments, folder, monkeypatch) == 0
    return found


@pytest.mark.parametrize("name", ["runs/a-lr=4e-3", "a (1)", "it's", "back\\slash", "50%", "Größe", "a b"])
def test_a_path_is_read_as_it_is_typed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of([f"out={name}"], tmp_path, monkeypatch)["out"] == name


def test_an_arm_may_start_from_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "a-lr=4e-3" / "speculator"
    start.mkdir(parents=True)
    (start / "config.json").write_text("{}")
    arms = settings_of([f"arms={{more:'head=eagle trainer.start={start}'}}"], tmp_path, monkeypatch)["arms"]
    assert isinstance(arms, dict) and arms["more"]["trainer"]["start"] == str(start)


def test_choices_that_have_nothing_in_common_may_be_taken_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trackers, say; of two that share a key hydra would lay one over the other."""
    (tmp_path / "group").mkdir()
    for name, line in (("a", "one: 1"), ("b", "two: 2"), ("c", "one: 3")):
        (tmp_path / "group" / f"{name}.yaml").write_text(f"# It.\n{line}\n")
    monkeypatch.setattr("headstart.door.values.CONF", tmp_path)
    monkeypatch.setattr(usage, "groups", lambda door: {"group": ""})
    check_overrides("any", ["group=[a,b]", "group=[b, c]"])
    for wrong in ("group=[a,c]", "group=[a]", "group=[a,b,c]"):
        with pytest.raises(UserError, match="one choice of group in a run"):
            check_overrides("any", [wrong])


def test_several_trackers_may_share_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = settings_of(["tracker=[wandb,mlflow]", "tracker.project=p"], tmp_path, monkeypatch)["tracker"]
    assert isinstance(tracker, dict) and tracker["wandb"] and tracker["mlflow"] and tracker["project"] == "p"


def test_a_wrong_choice_of_a_sweep_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", ["--multirun", "head=eagle,medusaa", "experiment=smoke"], tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err.count("head=medusaa: ") == 1


def test_options_may_stand_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("# @package _global_\n# Mine.\ntrainer: {steps: 7}\n")
    found = settings_of(["trainer.batch_size=2", f"--config-dir={tmp_path / 'own'}", "experiment=mine"], tmp_path, monkeypatch)
    trainer = found["trainer"]
    assert isinstance(trainer, dict) and (trainer["batch_size"], trainer["steps"]) == (2, 7)
    assert found["out"] == "runs/mine-eagle-tiny-stdlib-batch_size=2"


def test_an_experiment_of_ones_own_begins_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = (ROOT / "README.md").read_text().partition("becomes `experiment=mine`")[2].partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    mine, arguments = tmp_path / "own" / "experiment" / "mine.yaml", [f"--config-dir={tmp_path / 'own'}", "experiment=mine"]
    mine.write_text(example)
    trainer = settings_of(arguments, tmp_path, monkeypatch)["trainer"]
    assert isinstance(trainer, dict) and trainer["steps"] == 500
    mine.with_name("other.yaml").write_text(example.partition("\n")[2])
    assert call("train", [arguments[0], "experiment=other"], tmp_path, monkeypatch) == 2
    assert 'begin your experiment/NAME.yaml with the line "# @package _global_"' in capsys.readouterr().err


def test_a_command_that_cannot_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["tune", f"speculator={EAGLE}", f"prompts={ROOT}/LICENSE"], ["target.device=tp cannot tune", "target.device=map"]),
        (["chat"], ["target.device=tp cannot chat", "target.device=map"]),
        (["serve"], ["target.device=tp cannot serve", "target.device=map"]),
    ):
        assert call("inference", [*arguments, "target.device=tp"], tmp_path, monkeypatch) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and all(word in said for word in words)


@pytest.mark.parametrize(("device", "ends"), [("tp", [2]), ("cpu", [])])
def test_a_process_that_fails_does_not_wait_for_those_that_share_the_target(
    device: str, ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end it would wait for their process group, which waits for this process."""
    codes = list[int]()

    def failing(_: object) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(atexit, "register", lambda _, code: codes.append(code))
        raise UserError("no memory is left")

    monkeypatch.setattr("headstart.door.infer.report", failing)
    asked = [f"speculator={EAGLE}", f"prompts={ROOT}/LICENSE", f"target.device={device}"]
    assert call("inference", asked, tmp_path, monkeypatch) == 2 and codes == ends


def test_a_key_that_is_new_within_a_known_one() -> None:
    assert "++decode.proposer.small={...} adds" in no_such_key("decode.proposer.small", "inference", ["decode=cascade"])
    assert "++decode.proposer.KEY=... adds" in no_such_key("decode.proposer", "inference", ["decode=cascade"])
    assert no_such_key("speculator", "inference", ["++speculator=x"]) == "speculator is there already: give speculator=... without +"
    assert "did you mean decode.proposer.small?" in no_such_key("decode.proposer.smal", "inference", ["decode=cascade"])


def test_the_next_command_has_the_same_target_and_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["target=folder", "target.path=my model", "head=medusa", "head.layers=2", "batch_size=4", "out=shards"]
    monkeypatch.setattr("headstart.door.data.overrides", lambda: given)
    say_next(["data=shards", "path=shards"], "target", "head")
    same = "target=folder 'target.path=my model' head=medusa head.layers=2"
    assert capsys.readouterr().out == f"train with: python train.py {same} data=shards path=shards\n"


def test_of_a_served_target_only_files_are_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("headstart.door.data.capture_states", lambda config: False)
    for url, says in ((None, "loading tiny "), ("http://127.0.0.1:9/v1", "reading the files of tiny ")):
        data.capture({"out": "shards", "target": {"name": "tiny", "path": "assets/tiny"}, "served": {"url": url}})
        assert capsys.readouterr().out.startswith(says)


# ---- files and folders ----


@pytest.mark.parametrize("config", ["{", "[]"])
@pytest.mark.parametrize(
    ("door", "arguments"),
    [("inference", ["speculator=damaged", "prompts=asked.jsonl"]), ("inference tune", ["speculator=damaged", "prompts=asked.jsonl"]),
     ("inference chat", ["speculator=damaged"]), ("inference serve", ["speculator=damaged", "port=0"]),
     ("inference chat", ["decode=cascade", "++decode.proposer.folder=damaged"]), ("train", ["trainer.start=damaged"])],
)  # fmt: skip
def test_a_damaged_folder_is_told_before_a_target_is_loaded(
    door: str, arguments: list[str], config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text(config)
    (tmp_path / "asked.jsonl").write_text("")
    monkeypatch.setattr(Target, "load", None)
    assert call(door, arguments, tmp_path, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: damaged/config.json ") and said.count("\n") == 1


def test_where_nothing_can_be_written_and_where_it_can(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path in ("file", "file/below", "/dev/null/run"):
        with pytest.raises(UserError, match=rf"out=.*{path} cannot be written \(.* is a file\)"):
            check_out(str(tmp_path / path))
    with pytest.raises(UserError, match="is a folder: give a file"):
        check_out(str(tmp_path), file=True)
    check_out(str(tmp_path / "a" / "b"))
    check_out("s3://bucket/x", url=True)
    for file, what in ((False, "folder"), (True, "file")):
        with pytest.raises(UserError, match=rf"^capture\.out=s3://bucket/x: give a {what} of this machine$"):
            check_out("s3://bucket/x", "capture.out", file=file)
    check_out(str(tmp_path / "file"), file=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("what", ["a pipe", "a folder", "nothing"])
@pytest.mark.parametrize(
    ("door", "arguments"),
    [("inference", ["prompts=it"]), ("inference tune", ["prompts=it"]), ("inference", ["prompts=file", "decode=fixed", "decode.paths=it"])],
)
def test_what_is_no_file_is_not_read(
    what: str, door: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would be waited for, for ever."""
    (tmp_path / "file").touch()
    if what != "nothing":
        os.mkfifo(tmp_path / "it") if what == "a pipe" else (tmp_path / "it").mkdir()
    assert call(door, [f"speculator={EAGLE}", *arguments], tmp_path, monkeypatch) == 2
    says = {"a pipe": "is no file: give a file", "a folder": "is a folder: give a file", "nothing": ": no such file"}[what]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {arguments[-1].partition('=')[0]}=it") and lines[0].endswith(says)


def test_what_lacks_a_tap_is_captured_again_by_this_command(tmp_path: Path) -> None:
    found = capture(rows(), FakeTarget(), (0, 2), tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(UserError, match=r"tap 1 was not captured \(only \[0, 2\]\).* `python -m data \.\.\. taps=\[0,1,2\]` for both"):
        found.check_taps((1, 2))


def test_a_file_where_a_folder_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "talks.jsonl").touch()
    (tmp_path / "run" / "speculator").mkdir(parents=True)
    (tmp_path / "run" / "speculator" / "config.json").touch()
    assert call("train", ["target=folder", f"target.path={file}"], tmp_path, monkeypatch) == 2
    assert f"error: target folder {file} is a file: give its folder in target.path" in capsys.readouterr().err
    target = Target.load(str(ROOT / "assets" / "tiny"), device="cpu")
    for folder, says in (
        (file, f"{file} is a file: give its folder"),
        (tmp_path / "run", f"{tmp_path}/run is the folder of a run: give {tmp_path}/run/speculator"),
        ("none", "none: no such folder: give the exported folder of a drafter (RUN/speculator), or of a language model"),
        ("a" * 300, "cannot be read (File name too long): give another folder"),
    ):
        with pytest.raises(UserError, match=f"{re.escape(says)}$"):
            target.model.generate(torch.tensor([[1]]), max_new_tokens=1, custom_generate=speculate(folder))


def test_a_file_of_a_drafter_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inference", [f"speculator={EAGLE}/config.json", "prompts=x"], tmp_path, monkeypatch) == 2
    assert capsys.readouterr().err == f"error: speculator={EAGLE}/config.json is a file: give its folder\n"


@pytest.mark.parametrize(
    ("url", "says"), [(None, "loading tiny (assets/tiny) for a.jsonl"), ("http://there/v1", "reading the tokenizer of tiny (")]
)
def test_regenerate_says_what_it_loads(
    url: str | None, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a target that is served elsewhere it loads no weights."""
    from headstart.data import regenerate
    from headstart.door import data

    monkeypatch.setattr(regenerate, "main", lambda config: None)
    monkeypatch.setattr(data, "say_next", lambda *_: None)
    target = {"name": "tiny", "path": "assets/tiny"}
    data.regenerate({"speculator": None, "out": "a.jsonl", "url": url, "target": target})
    assert capsys.readouterr().out.startswith(says)
