"""For W&B: a sweep file that its own code reads, whose runs our door accepts, and a board whose charts are of numbers that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headstart.door import board, sweep_file
from headstart.heads.errors import UserError
from tests.composed import composed
from tests.starting import LONGEST
from tests.trainers.test_tracker import CURVES, FINAL

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["head=eagle,mtp", "trainer.lr=1e-3,4e-3", "trainer.steps=20", "loss.terms={kl:1.0}"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(*words: str) -> Any:
    return yaml.safe_load(sweep_file.main(words).read_text())


def commands(made: Any, chosen: dict[str, Any]) -> list[str]:
    """What an agent of W&B would start for these values, by W&B's own code."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    args = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    words: list[str] = []
    for word in utils.create_sweep_command(list(made["command"])):
        words += args["args_no_hyphens"] if word == "${args_no_hyphens}" else [word]
    return words


def test_a_sweep_file_is_what_wandb_reads_and_its_runs_are_ours() -> None:
    made = written(*WORDS, "name=lr")
    assert made["parameters"] == {"head": {"values": ["eagle", "mtp"]}, "trainer.lr": {"values": [1e-3, 4e-3]}}
    assert (made["method"], made["name"], made["program"]) == ("grid", "lr", "train.py")
    assert made["metric"] == {"name": "decode/T0/accepted_length", "goal": "maximize"}
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    assert utils.load_sweep_config("sweep.yaml") == made
    words = commands(made, {"head": "mtp", "trainer.lr": 4e-3})
    assert words[:4] == ["${env}", "${interpreter}", "-m", "headstart.door.train"]
    settings = composed(*words[4:])
    assert settings["head"]["name"] == "mtp" and settings["trainer"]["lr"] == 4e-3 and settings["trainer"]["steps"] == 20
    assert settings["tracker"]["wandb"] and settings["loss"]["terms"]["kl"] == 1.0


def test_wandbs_own_schema_accepts_it() -> None:
    sweeps = pytest.importorskip("sweeps")  # pip install wandb[sweeps]
    for words in (WORDS, ["trainer.lr=tag(log,interval(1e-3,1e-1))", "trainer.warmup=interval(1,9)"], ["loss.decay=interval(0.5,1.0)"]):
        assert sweeps.schema_violations_from_proposed_config(written(*words)) == []
    assert sweeps.schema_violations_from_proposed_config(written(*WORDS) | {"method": "gird"})


def test_intervals_are_searched() -> None:
    made = written("trainer.lr=tag(log,interval(1e-3,1e-1))", "trainer.warmup=interval(1,9)", "metric=heldout/loss")
    assert made["parameters"]["trainer.lr"] == {"distribution": "log_uniform_values", "min": 1e-3, "max": 1e-1}
    assert made["parameters"]["trainer.warmup"] == {"distribution": "int_uniform", "min": 1, "max": 9}
    assert made["method"] == "bayes" and made["metric"] == {"name": "heldout/loss", "goal": "minimize"}
    shares = written("trainer.warmup=interval(0.01,0.1)")["parameters"]["trainer.warmup"]
    assert shares == {"distribution": "uniform", "min": 0.01, "max": 0.1}
    sizes = written("trainer.batch_size=tag(log,interval(1,64))")["parameters"]["trainer.batch_size"]  # fractions would be refused
    assert sizes == {"distribution": "q_log_uniform_values", "min": 1, "max": 64, "q": 1}
    for head in ("head=medusa", "head=medusa,hydra"):  # whose keys the default head does not have
        made = written(head, "head.guesses=interval(2,6)")["parameters"]
        assert made["head.guesses"] == {"distribution": "int_uniform", "min": 2, "max": 6}
    assert written("trainer.warmup=range(1,9,4)", "file=other.yaml")["parameters"]["trainer.warmup"] == {"values": [1, 5]}
    assert Path("other.yaml").is_file()


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["trainer.lr=1e-3"], "nothing to try several values of"), (["trainer.lr=1e-3,-1"], "trainer.lr"),
        (["trainer.speed=1,2"], "there is no key"), (["head=eagle,owl"], "owl"), (["out=runs/x", "trainer.lr=1,2"], "its own folder"),
        (["arms={a:'head=mtp'}", "trainer.lr=1,2"], "head=a,b"), (["trainer.save_every=1,2"], "how a run is watched"),
        (["trainer.lr=interval(1e-3,1e-1)", "method=grid"], "method=grid"), (["trainer.lr=1,2", "method=luck"], "grid, random, bayes"),
        (["trainer.lr=1,2", "file=/nowhere/at/all.yaml"], "cannot be written"),
        (["trainer.lr=1,2", "file="], r"^file=: give file="), (["trainer.lr=1,2", "file"], r"^file: give file="),
        (["trainer.lr=1,2", "metric="], r"^metric=: give metric="), (["trainer.lr=1,2", "file=."], r"^file=\. cannot be written"),
    ],
)  # fmt: skip
def test_what_no_sweep_could_do_is_refused(words: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        sweep_file.main(words)


def test_the_charts_of_a_board_are_of_numbers_that_there_are() -> None:
    known = CURVES | FINAL | {f"{name}.max" for name in FINAL} | {"decode/examples"}
    known |= {"heldout/depth/3/acceptance", "system/gpu_memory_gib", "decode/T0/expected_length", "decode/T1/expected_length"}
    shown = {metric for panels in board.BOARD.values() for _, _, metrics in panels for metric in metrics}
    assert shown <= known, shown - known


def test_a_board_is_what_wandbs_own_library_makes_of_it() -> None:
    pytest.importorskip("wandb_workspaces")  # pip install wandb-workspaces
    made = board.workspace("Drafters", "me", "headstart")
    spec = made._to_model().model_dump_json(by_alias=True)
    assert [section.name for section in made.sections] == list(board.BOARD)
    for metric in (metric for panels in board.BOARD.values() for _, _, metrics in panels for metric in metrics):
        assert metric in spec, metric


def test_what_a_board_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"^a board needs `pip install wandb-workspaces`"):
        board.main([])
    with pytest.raises(UserError, match=r"^colour=red: give project=, entity= or name=$"):
        board.main(["colour=red"])


@pytest.mark.parametrize("word", ["board", "sweep", "compare"])
def test_the_words_of_trainers_have_help(word: str) -> None:
    done = subprocess.run([sys.executable, "-m", "trainers", word, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0 and f"python -m trainers {word}" in done.stdout and done.stderr == ""
