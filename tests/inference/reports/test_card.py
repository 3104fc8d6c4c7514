"""The model card of an exported folder: what it says, what it keeps of its owner's, and commands that run as they stand."""

from __future__ import annotations

import json
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from headstart.heads import hub
from headstart.heads.serving import asking_an_engine
from headstart.inference.decoding.policy import AUTO
from headstart.inference.decoding.target import Target
from headstart.inference.reports.card import digest, hub_id, kept_card, serving_keys, write_card
from headstart.inference.reports.render import markdown, show_serving
from headstart.inference.reports.report_page import served as on_page
from tests.doors import call
from tests.drafters import make
from tests.reports import a_report
from tests.trainers.conftest import save_target

SETTINGS = {
    "head": {"name": "eagle", "layers": 1, "draft_vocab": list(range(40))},
    "loss": {"terms": {"kl": 1.0, "tv": 0.5}, "depth": 3, "decay": 0.8, "weighting": "decay", "base_until": 0.0, "on_policy": None},
    "trainer": {"optimizer": "muon", "lr": 0.008, "schedule": "wsd", "batch_size": 4, "length": 512, "start": None},
    "data": {"name": "chat", "path": "/data/somebody/talks.jsonl"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(str(save_target(tmp_path_factory.mktemp("t") / "small")), dtype="float32", device="cpu")


def export(target: Target, folder: Path, head: str = "eagle", noise: float = 0.1, **changes: Any) -> dict[str, Any]:
    """Saved, and a report that nobody measured with the commands of this folder."""
    drafter = make(head, target, noise, **changes)
    with kept_card(folder):
        hub.save(drafter, folder, target.card, torch.float32, target.tokenizer if head == "draft_lm" else None)
    return a_report(head, **serving_keys(drafter, target, folder, AUTO))


def parts(folder: Path) -> tuple[dict[str, Any], str]:
    front, body = (folder / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
    return yaml.safe_load(front), body


def test_what_a_card_says(target: Target, tmp_path: Path) -> None:
    report = export(target, tmp_path / "s")
    assert write_card(tmp_path / "s", report, target, SETTINGS) == f"card: {tmp_path / 's' / 'README.md'}"
    front, body = parts(tmp_path / "s")
    assert front == {"base_model": "tiny", "library_name": "headstart", "pipeline_tag": "text-generation",
                     "tags": ["speculative-decoding", "headstart", "eagle"]}  # fmt: skip
    text = (tmp_path / "s" / "README.md").read_text()
    assert "# license: yours to choose" in text and "somebody" not in text
    for said in ("# eagle for tiny", "1,234 weights", "draft_vocab 40 tokens", "`chat`; path `talks.jsonl`",
                 "`kl + 0.5 tv`; depth 3, decay 0.8", "7 steps, 700 tokens", "lr 0.008", "| 3.20 | 2.10 |", "| 1.60 | 0.90 |",
                 "a chain of 6: acceptance by depth", "float32 on a CPU", "4 prompts of up to 16 new tokens", "commit abc",
                 "shape: dynamic, 15 nodes, depth 6"):  # fmt: skip
        assert said in body, said
    commands = [c["text"] for c in report["serving"]]
    assert len(commands) > 3 and all(text in body and text in markdown(report) for text in commands)
    assert hub.load(tmp_path / "s", target.shape, target.card).config["head"] == "eagle"  # a card is in nobody's way


def test_a_card_says_what_one_more_engine_would_load(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says it too, and so do the last lines of a run."""
    said = "llama.cpp loads such a drafter if it was trained with head.fc_norm=false head.norm_output=false"
    changes: dict[str, Any]
    for changes in ({"taps": [1, 2, 3]}, {"taps": [1, 2, 3], "fc_norm": False, "norm_output": False}):
        report = export(target, tmp_path / "s", **changes)
        write_card(tmp_path / "s", report, target, SETTINGS)
        show_serving(report)
        for text in (parts(tmp_path / "s")[1], markdown(report), str(on_page(report)), capsys.readouterr().out):
            assert (said in text) == ("fc_norm" not in changes) and ("convert_hf_to_gguf.py" in text) == ("fc_norm" in changes)


@pytest.mark.parametrize("asked, said", [("auto", False), ("bfloat16", False), ("float32", True)])
def test_commands_read_the_weights_that_were_measured(asked: str, said: bool, tmp_path: Path) -> None:
    """Else they would decode other weights than were measured: without a word each of these reads the weights as they are stored."""
    path = save_target(tmp_path / "small")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    made = Target.load(str(path), dtype=asked, device="cpu")
    kinds = ["eagle", "eagle1", "draft_lm"]
    commands = [c for kind in kinds for c in export(made, tmp_path / kind, kind)["serving"] if c["engine"] != "TensorRT-LLM"]
    assert {c["engine"] for c in commands} == {"vLLM", "SGLang", "llama.cpp", "Headstart", "transformers"}
    (converted,) = (c["text"] for c in commands if c["engine"] == "llama.cpp")
    assert converted.count("convert_hf_to_gguf.py") == 2 and converted.count(" --outtype f32 ") == 2 * said
    ends = {
        "Headstart": " target.dtype=float32",
        "transformers": ', dtype="float32")',
        "vLLM": " --dtype float32",
        "SGLang": " --dtype float32",
    }
    for c in commands:
        if c["engine"] == "llama.cpp":
            continue
        first = next(line for line in c["text"].splitlines() if line.startswith("model =") or c["language"] == "bash")
        assert first.endswith(ends[c["engine"]]) == said and c["text"].count("float32") == said, c
        assert said or "dtype" not in c["text"]


def test_a_folder_that_no_engine_loads_says_so(target: Target, tmp_path: Path) -> None:
    report = export(target, tmp_path / "s", "hydra")
    write_card(tmp_path / "s", report, target, SETTINGS)
    assert "No serving engine loads this folder: none has this kind of drafter." in parts(tmp_path / "s")[1]
    assert [c["engine"] for c in report["serving"]] == ["Headstart", "transformers"]
    assert asking_an_engine(report) == "" and "diagnose" not in parts(tmp_path / "s")[1]


def test_a_card_says_how_to_ask_the_engine(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is what the door takes: settings that are wrong would be told before the missing file."""
    report = export(target, tmp_path / "s")
    write_card(tmp_path / "s", report, target, SETTINGS)
    command = asking_an_engine(report)
    assert f"```bash\n{command}\n```" in parts(tmp_path / "s")[1] and f"speculator={tmp_path}/s target=folder target.path=" in command
    assert command in unescape("".join(on_page(report)))
    show_serving(report)
    assert f"accepts as many guesses as it should:\n  {command}\n" in capsys.readouterr().out
    assert call("inference", shlex.split(command)[2:], tmp_path, monkeypatch) == 2
    assert "prompts=FILE.jsonl" in capsys.readouterr().err


def test_its_owners_words_stay(target: Target, tmp_path: Path) -> None:
    """Through a new report, a new export of the same drafter, and figures on other prompts beside it."""
    folder = tmp_path / "s"
    write_card(folder, export(target, folder), target, SETTINGS)
    path = folder / "README.md"
    edited = path.read_text().replace("# license: yours to choose", "# mine too\nlicense: mit\nbase_model_relation: finetune #")
    path.write_text(edited.replace("base_model: tiny", "base_model: me/tiny") + "\nMy own words.\n")
    report = export(target, folder) | {"temperature_0": a_report()["temperature_0"] | {"accepted_length": 4.44}}
    assert path.is_file()
    write_card(folder, report, target, SETTINGS)
    assert "license: mit" in path.read_text().splitlines() and "# mine too" in path.read_text(), "as it was written, with its comments"
    front, body = parts(folder)
    assert (front["license"], front["base_model_relation"], front["base_model"]) == ("mit", "finetune", "me/tiny")
    assert "My own words." in body and "| 4.44 | 2.10 |" in body and "| 3.20 |" not in body and body.count("## What it gains") == 1
    write_card(folder, report | {"prompts_from": "gsm8k -->"}, target)  # of another door, which knows nothing of the training
    body = parts(folder)[1]
    assert body.count("## What it gains") == 2 and "7 steps" in body and body.index("gsm8k") < body.index("## How it is served")
    write_card(folder, report | {"prompts_from": "gsm8k -->"}, target)
    assert parts(folder)[1] == body  # as often as one likes


def test_figures_go_with_the_weights(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write_card(folder, export(target, folder) | {"prompts_from": "gsm8k"}, target, SETTINGS)
    first = digest(folder)
    write_card(folder, export(target, folder, noise=0.2), target, SETTINGS)
    body = parts(folder)[1]
    assert digest(folder) != first and "gsm8k" not in body and first not in body and digest(folder) in body
    write_card(folder, export(target, folder, "mtp"), target, SETTINGS)  # another drafter in its place: another card
    front, body = parts(folder)
    assert front["tags"][-1] == "mtp" and "# mtp for tiny" in body and "eagle" not in front["tags"]


def test_what_is_not_ours_is_left_alone(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    report = export(target, folder)
    (folder / "README.md").write_text("# Mine\n")
    assert "left as it is" in write_card(folder, report, target) and (folder / "README.md").read_text() == "# Mine\n"
    (folder / "README.md").write_text("---\na: [\n---\n<!-- headstart: serving -->\n<!-- headstart: end -->\n")
    before = (folder / "README.md").read_text()
    assert "its front matter is no YAML" in write_card(folder, report, target) and (folder / "README.md").read_text() == before
    config = json.loads((folder / "config.json").read_text())
    del config["headstart"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").unlink()
    assert write_card(folder, report, target) == "" and not (folder / "README.md").exists()
    assert serving_keys(make("eagle", target), target, folder, AUTO) == {}  # a foreign one may be written otherwise


def test_a_readme_of_ones_own_stays_through_an_export(target: Target, tmp_path: Path) -> None:
    export(target, tmp_path / "s")
    for mine in (b"# Mine\n", b"# M\xfcnchen\n"):
        (tmp_path / "s" / "README.md").write_bytes(mine)
        said = write_card(tmp_path / "s", export(target, tmp_path / "s", "mtp"), target)
        assert (tmp_path / "s" / "README.md").read_bytes() == mine and ("left as it is" in said or "cannot be written" in said)


def test_a_full_disk_costs_a_line(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    report = export(target, tmp_path / "s")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headstart.inference.reports.card.put_text", full)
    assert "cannot be written" in write_card(tmp_path / "s", report, target)


@pytest.mark.parametrize("head", ["eagle", "draft_lm"])
def test_python_runs_as_it_stands(head: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through our ``speculate``, and an ordinary model through transformers alone: the text is the target's own."""
    report = export(target, tmp_path / "s", head)
    code = [c["text"] for c in report["serving"] if c["language"] == "python"]
    assert len(code) == (2 if head == "draft_lm" else 1)
    ids = AutoTokenizer.from_pretrained(target.name)("def main(", return_tensors="pt")
    plain = target.tokenizer.decode(target.model.generate(**ids, max_new_tokens=64, do_sample=False)[0])
    for text in code:
        exec(compile(text, "card", "exec"), {})
        assert capsys.readouterr().out == plain + "\n"
    words = shlex.split(next(c["text"] for c in report["serving"] if c["engine"] == "vLLM"))
    assert words[2] == target.name and Path(words[2]).is_dir()


@pytest.mark.parametrize(("name", "found"), [
    ("org/Model-1B", "org/Model-1B"),
    ("/data/cache/huggingface/hub/models--org--Model-1B/snapshots/0a1b/", "org/Model-1B"),
    ("/data/models/own", None),
    ("small", None),
])  # fmt: skip
def test_the_hubs_name_of_a_target(name: str, found: str | None) -> None:
    assert hub_id(name) == found


def test_a_folder_of_two_words_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "Model-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("org/Model-1B") is None
