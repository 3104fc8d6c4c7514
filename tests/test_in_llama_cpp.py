"""benchmarks/in_llama_cpp.py without llama.cpp: what it asks of programs that stand in for it, and what it makes of the answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import in_llama_cpp, llama_cpp_side
from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.serving import serving
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.reports.figures import rounds_of
from headstart.inference.settings import open_target
from headstart.inference.speculator import open_speculator
from tests.drafters import make
from tests.trainers.conftest import ROOT, small_run
from tests.trainers.conftest import composed as composed
from tests.trainers.conftest import conversations as conversations
from tests.trainers.conftest import target_folder as target_folder

OLD = dict(fc_norm=False, norm_output=False)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # run -> head, its settings
    "eagle": ("eagle", dict(taps=[1, 2, 3], draft_vocab=list(range(40)), **OLD)),
    "norms": ("eagle", dict(taps=[1, 2, 3], norm_before_fc=True, **OLD)),
    "dspark": ("dspark", dict(layers=1, block=3, mask_token=5)),
    "eagle_3_1": ("eagle", dict(taps=[1, 2, 3])),
}


@pytest.fixture(scope="module")
def runs(composed: Any, target_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs, but for the training."""
    folder = tmp_path_factory.mktemp("runs")
    settings = composed(*small_run(target_folder, conversations, folder), "decode.prompts=2")
    target = open_target(settings["target"])
    for run, (head, changes) in RUNS.items():
        hub.save(make(head, target, **changes), folder / run / "speculator", target.card, torch.float32)
        (folder / run / "config.json").write_text(json.dumps(settings))
    return {run: folder / run for run in RUNS}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a llama.cpp would say that is right. That of the run ``norms`` guesses another token in the first round."""
    target = open_target({"name": "x", "path": request["target"], "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None})
    drafter, chain = open_speculator(request["folder"], target), TreePolicy("chain", depth=request["guesses"])
    made = [generate(target, Drafting(drafter), p, new_tokens=request["new_tokens"], policy=chain) for p in request["prompts"]]
    guesses = [[list(r.guesses) for r in rounds_of(g)] for g in made]
    guesses[0][0][-1] += "norms" in request["folder"]
    tokens = [g.tokens for g in made]
    return {"tokens": tokens, "plain": tokens, "guesses": guesses, "drafted": 9, "accepted": 3, "version": "0"}


@pytest.mark.slow
def test_each_head_is_asked_as_its_card_says(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    requests: list[dict[str, Any]] = []

    def ask(source: Path, program: Path, request: dict[str, Any]) -> dict[str, Any]:
        assert (source, program) == (Path("SOURCE"), Path("SERVER"))
        requests.append(json.loads(json.dumps(request)))
        return answer(request)

    monkeypatch.setattr(in_llama_cpp, "ask", ask)
    out = tmp_path / "in_llama_cpp.json"
    out.write_text('{"dflash": {"kept": 1}}')
    words = [*map(str, runs.values()), "--source", "SOURCE", "--server", "SERVER", "--out", str(out), "--new-tokens", "12"]
    monkeypatch.setattr(sys, "argv", ["in_llama_cpp.py", *words])
    with pytest.raises(SystemExit, match=r"^failed, or other tokens, passes or guesses: norms, eagle_3_1$"):
        in_llama_cpp.main()
    assert "llama.cpp does not load this folder" in " ".join(capsys.readouterr().out.split())
    assert [(r["type"], r["guesses"], r["new_tokens"]) for r in requests] == [("draft-eagle3", 2, 12)] * 2 + [("draft-dspark", 3, 12)]
    found = json.loads(out.read_text())
    assert found.keys() == {"dflash", "eagle_vocabulary_40", "eagle_norm_before_fc", "dspark"}
    for name, entry in found.items():
        if name != "dflash":
            assert entry["prompts_with_the_same_tokens"] == 2 and entry["commit"]
            assert entry["target_passes_in_llama_cpp"] == entry["target_passes_here"]
            assert entry["guesses_that_differ"] == (name == "eagle_norm_before_fc") and entry["guesses_compared"] > 12


@pytest.mark.parametrize(
    ("tokens", "guessed", "expected"),
    [
        ([1, 2, 3, 4, 5], [[2, 3, 9], [5]], 2),  # two accepted and one more; one accepted
        ([1, 2, 3, 4, 5], [[7, 8, 9], [3, 9], [5]], 3),
        ([1, 2, 3, 4], [[2, 9, 9]], 2),  # the last token came from a pass without guesses
        ([1], [], 0),
    ],
)
def test_passes(tokens: list[int], guessed: list[list[int]], expected: int) -> None:
    assert in_llama_cpp.passes(tokens, guessed) == expected


def test_the_difference_of_one_answer_is_seen() -> None:
    entry = {"prompts": 2, "prompts_with_the_same_tokens": 2, "prompts_with_the_tokens_of_plain_llama_cpp": 2, "guesses_that_differ": 0}
    entry |= {"target_passes_in_llama_cpp": 5, "target_passes_here": 5}
    assert in_llama_cpp.same(entry)
    for key in entry:
        assert not in_llama_cpp.same(entry | {key: entry[key] + 1})


CONVERTER = """
import sys
from conversion.base import TextModel
from sentencepiece import SentencePieceProcessor
print(TextModel().get_vocab_base_pre("known"), TextModel().get_vocab_base_pre("other"), sys.argv[1:])
open(sys.argv[3], "w").write("GGUF") if "refused" not in sys.argv[1] else sys.exit("ValueError: no such tensor")
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer != "known":
            raise NotImplementedError("which?")
        return "known"
"""
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("version: 11434 (abc)"))
assert os.environ["LLAMA_BATCH_DEBUG"] == "1" and words[words.index("--temp") + 1] == "0" and words.count("f32") == 4
if "broken" in words[1]:
    sys.exit("cannot load it")

class Handler(BaseHTTPRequestHandler):
    def answer(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and not asked["cache_prompt"] and asked["n_predict"] == 3
        if "-md" in words:
            print("slot: generate_draft: id=7, #tokens=4, #draft=2, pos_next=4", flush=True)
            for row in ("0: id =      7 (  a), pos", "1: id =      8 (\\n), pos", "2: id =      9 (  c), pos", "0: id =      7 (  a), pos"):
                print(f"ubatch_print:     {row}", flush=True)
        print("slot release: id 0 | stop processing: n_tokens = 4", flush=True)
        self.answer({"tokens": [7, 8, 5], "timings": {"draft_n": 2, "draft_n_accepted": 1} if "-md" in words else {}})

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> tuple[Path, Path]:
    """A source folder and a server that stand in for llama.cpp's."""
    source, program = tmp_path / "source", tmp_path / "llama-server"
    (source / "conversion").mkdir(parents=True)
    (source / "conversion" / "base.py").write_text(BASE)
    (source / "convert_hf_to_gguf.py").write_text(CONVERTER)
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    return source, program


def test_programs_that_stand_in(llama_cpp: tuple[Path, Path]) -> None:
    asked = {"target": "t", "folder": "d", "type": "draft-dflash", "guesses": 2, "new_tokens": 3, "prompts": [[1, 2], [3]], "longest": 64}
    made = in_llama_cpp.ask(*llama_cpp, asked)
    assert made["tokens"] == made["plain"] == [[7, 8, 5]] * 2 and made["guesses"] == [[[8, 9]]] * 2
    assert (made["drafted"], made["accepted"], made["version"]) == (4, 2, "11434 (abc)")


def test_what_is_refused_is_told(llama_cpp: tuple[Path, Path], tmp_path: Path) -> None:
    source, program = llama_cpp
    with pytest.raises(RuntimeError, match=r"^llama\.cpp's converter refuses the folder: ValueError: no such tensor$"):
        llama_cpp_side.convert(source, Path("refused"), tmp_path / "x.gguf", Path("t"))
    with pytest.raises(RuntimeError, match=r"(?s)^llama-server does not start:.*cannot load it"):
        llama_cpp_side.Server(program, Path("broken"), 64, []).__enter__()


def test_a_batch_of_something_else_is_not_taken_for_guesses() -> None:
    log = "generate_draft: id=7, #tokens=4, #draft=1, pos_next=4\nubatch_print:     0: id =      8 (  a), pos"
    with pytest.raises(RuntimeError, match="unexpected batch"):
        llama_cpp_side.guesses(log)


def test_the_experiment_is_of_drafters_that_llama_cpp_loads(composed: Any) -> None:
    """And the token of its masks is one that no text has."""
    from transformers import AutoConfig, AutoTokenizer

    shape = TargetShape.of(AutoConfig.from_pretrained(ROOT / "assets" / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "tiny")
    types = {}
    for name, words in composed("experiment=in_llama_cpp")["arms"].items():
        head = composed("experiment=in_llama_cpp", *words.split())["head"]
        if isinstance(head.get("draft_vocab"), int):  # the data say which
            head["draft_vocab"] = list(range(head["draft_vocab"]))
        with torch.device("meta"):
            drafter = hub.build(head.pop("name"), shape, **head)
        command = next(c for c in serving(drafter, "TARGET", "DIR", 6).commands if c.engine == "llama.cpp")
        types[name] = in_llama_cpp.setting(command, "--spec-type")
        if head.get("mask_token") is not None:  # bytes from 161 on stand for themselves in a byte-level vocabulary; UTF-8 has no 0xC0
            assert tokenizer.convert_ids_to_tokens(head["mask_token"]) == chr(0xC0)
    assert set(types.values()) == {"draft-eagle3", "draft-dflash", "draft-dspark", "draft-simple"} and len(types) == 9
