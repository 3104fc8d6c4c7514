"""What is new is one file and one YAML: a drafter, its format, a source of data, a loss, a tracker and a proposer are put into a copy of
the package, where no other line is changed, and used. A target, an experiment and a suite are one YAML each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.starting import LONGEST

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("heads", "inference", "data", "trainers", "door", "conf")

NEW = {
    "heads/parrot.py": '''
"""Medusa under another name, with a format of its own."""

from headstart.heads.medusa import Medusa


class Parrot(Medusa):
    format = "feathers"
''',
    "conf/head/parrot.yaml": "# Says what was said.\nname: parrot\nguesses: 2\nlayers: 1\ndraft_vocab: null\n",
    "heads/formats/feathers.py": '''
"""Every tensor behind a prefix."""

from headstart.heads.serving import vllm


def names(drafter):
    return {name: f"feather.{name}" for name in drafter.state_dict()}


def extras(drafter):
    return {}


def config(drafter):
    shape = drafter.shape
    return {"architectures": ["Parrot"], "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "wings": len(drafter.blocks)}


def recognises(config):
    return "wings" in config


def arguments(config, tensors, shape):
    return "parrot", {"guesses": config["wings"]}


def serving(drafter, target, folder, guesses):
    return [vllm(target, folder, "parrot", guesses, "a release to come")]
''',
    "data/counting.py": '''
"""Numbers, one after the other."""

from headstart.data import plain


def texts(seed, *, upto):
    said = [plain.Text(f"from {i}", " ".join(str(n % 40) for n in range(i, i + int(upto)))) for i in range(40)]
    return said[2:], said[:2]


def open(target, *, length: int, seed: int, upto: str):
    train, held = texts(seed, upto=upto)
    return plain.source(target, train, held, length, seed, (plain.PARAGRAPHS,), {text.name: [text[:2]] for text in held})
''',
    "conf/data/counting.yaml": "# Numbers.\nname: counting\nupto: 300 # how many\n",
    "trainers/divergences/dear.py": '''
"""Cross-entropy, with a fee."""

import torch


def dear(log_q_RV, teacher, fee=100.0):
    return fee - torch.linalg.vecdot(teacher.p_CV, log_q_RV)
''',
    "conf/loss/dear.yaml": "# At a fee.\nterms: {dear: 1.0} # what is summed\n",
    "conf/target/nest.yaml": "# Where parrots live.\ndefaults: [tiny, _self_]\n\nname: nest # in reports\npath: ??? # a folder\n",
    "conf/experiment/short.yaml": "# @package _global_\n# Two steps.\ndefaults: [smoke, _self_]\n\ntrainer: {steps: 2, length: 64}\n",
    "conf/suite/riddles.yaml": "# Riddles.\ndefaults: [file, _self_]\n\nname: riddles # in results\nturns: riddle # what is asked\n",
    "trainers/sinks/paper.py": '''
"""A line of paper for each step."""


class Paper:
    def __init__(self, watched, *, ink="blue"):
        self.path, self.ink = watched.run / "paper", ink

    def _write(self, word):
        with self.path.open("a") as file:
            print(self.ink, word, file=file)

    def go_on_after(self, step):
        self._write(f"after {step}")

    def log(self, numbers, step):
        self._write(f"step {step}")

    def report(self, result):
        self._write(f"report {result.speculator.name}")

    def close(self):
        self._write("end")


open = Paper
''',
    "conf/tracker/paper.yaml": "# On paper.\npaper: true\nink: red # or blue\n",
    "inference/proposers/again.py": '''
"""The last token again and again, then what another proposer would say."""

from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.base import Lookup, Trie


class Again(Lookup):
    most = 1

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    def clear(self):
        self.text = []

    def extend(self, tokens):
        self.text += tokens

    @property
    def matched(self):
        return 1

    def guess(self, after, depth, nodes, branch, least):
        trie, node = Trie(nodes, branch), -1
        for _ in range(min(self.times, depth)):
            node = trie.add(node, [*self.text, *after][-1])
        return trie
''',
    "conf/decode/again.yaml": "# The last token.\ndefaults: [dynamic, _self_]\n\nproposer: {kind: again, times: 2} # times: how often\n",
}

OPENED = """
import json
from pathlib import Path

import torch

from headstart.data.source import open_source
from headstart.heads import hub
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.open import open_proposer
from headstart.trainers.tracker import Tracker

target = Target.load("ROOT/assets/tiny", device="cpu", dtype="float32")
source = open_source({"name": "counting", "upto": 300}, target, length=64, seed=0)
assert source.packed is not None and "1 2" in target.tokenizer.decode(source.packed.tokens_RT[0])

drafter = hub.build("parrot", target.shape, guesses=2)
hub.save(drafter, "folder", target.card, torch.float32)
ours, config = hub.load("folder", target.shape, target.card), json.loads(Path("folder/config.json").read_text())
del config["headstart"]
Path("folder/config.json").write_text(json.dumps(config))
theirs = hub.load("folder", target.shape)  # as others would have written it
assert theirs.config == ours.config == drafter.config and config["wings"] == 2
assert all((a == b).all() for a, b in zip(drafter.parameters(), theirs.parameters(), strict=True))

Path("run").mkdir()
tracker = Tracker(Path("run"), {}, paper=True, ink="red")
tracker.log({"loss": 1.0}, 3)
tracker.close()
assert Path("run/paper").read_text() == "red step 3\\nred end\\n"

prompt = source.prompts(1, 8)[0]
plain = generate(target, None, prompt, new_tokens=8).tokens
for settings in ({"kind": "again", "times": 2}, {"kind": "union", "parts": [{"kind": "again"}, {"kind": "suffix"}]}):
    assert generate(target, open_proposer(settings, target), prompt, new_tokens=8, policy=TreePolicy(depth=3, nodes=6)).tokens == plain
hybrid = open_proposer({"kind": "hybrid", "lookup": {"kind": "again"}, "otherwise": {"kind": "suffix"}, "match": 1}, target)
assert type(hybrid.lookup).__module__ == "headstart.inference.proposers.again"
"""

RUN = """
import json, sys
from pathlib import Path

from headstart.door import infer, train

small = ["target.path=ROOT/assets/tiny", "decode.new_tokens=8"]
sys.argv = ["train", "experiment=short", "head=parrot", "target=nest", "data=counting", "loss=dear", "tracker=paper", "out=run"]
sys.argv += ["decode.prompts=1", *small]
train.start()
said = json.loads(Path("run/report.json").read_text()), Path("run/speculator/README.md").read_text()
assert said[0]["lossless"] is True and "parrot" in said[1] and '"method": "parrot"' in said[1]  # the new format's own words
asked, paid = json.loads(Path("run/config.json").read_text()), [json.loads(line) for line in Path("run/metrics.jsonl").open()]
assert asked["target"]["name"] == "nest" and max(line.get("train/loss", 0) for line in paid) > 100, paid
paper = Path("run/paper").read_text().splitlines()
assert paper[0] == "red after 0" and "red step 2" in paper and paper[-2:] == ["red report speculator", "red end"]

Path("prompts.jsonl").write_text('{"id": "a", "text": "1 2 3 4 5 6"}\\n')
sys.argv = ["infer", "decode=again", "prompts=prompts.jsonl", "out=again", *small]
infer.main()
assert json.loads(Path("again/report.json").read_text())["lossless"] is True

Path("riddles.jsonl").write_text('{"id": "a", "riddle": "1 2 3 4 5 6"}\\n')
sys.argv = ["infer", "evaluate", "suite=riddles", "path=riddles.jsonl", "out=asked", "speculator=run/speculator", "new_tokens=4"]
sys.argv += ["against=[]", "temperatures=[0.0]", "decode=chain", "target=nest", small[0]]
infer.main()
assert json.loads(Path("asked/evaluate.json").read_text())["suite"] == "riddles"
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [OPENED, RUN])
def test_what_is_new_is_one_file_and_one_yaml_each(script: str, tmp_path: Path) -> None:
    package, here = tmp_path / "site" / "headstart", tmp_path / "here"
    here.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in NEW.items():
        assert not (package / name).exists()
        (package / name).write_text(text)
    command, environment = [sys.executable, "-c", script.replace("ROOT", str(ROOT))], os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
