"""The benchmarks: every script starts; what they count and compare is right; an engine beside us is a process with a stand-in for vLLM."""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import alternatives, decode, drafters, exactness, frame, growth, planted, step_memory, tiny, train_gpu, versus
from benchmarks import rows as gpu_rows
from benchmarks.gpu import Bench, accepting
from benchmarks.vllm_side import Vllm
from headstart.inference.decoding import auto
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

SCRIPTS = sorted(Path(decode.__file__).parent.glob("*.py"))
TARGET = functools.cache(tiny_target)


@functools.cache
def trained() -> Any:
    target = TARGET()
    texts = [p + generate(target, None, p, new_tokens=16).tokens for p in (random_tokens(9, seed=n) for n in range(3))]
    return learn_by_heart(make("eagle", target), target, texts, depth=3, steps=15)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_is_imported_and_takes_arguments(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module, text = importlib.import_module(f"benchmarks.{path.stem}"), path.read_text()
    if not hasattr(module, "main"):
        return
    ours = re.search(r"^(from|import) (benchmarks|heads|inference|data|trainers)\b", text, re.MULTILINE)
    assert 0 < text.find("sys.path.insert(0") < (len(text) if ours is None else ours.start()), "it is started by its path"
    for argument, status in (("--help", 0), ("--no-such-argument", 2)):
        monkeypatch.setattr(sys, "argv", [path.name, argument])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == status
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: {path.name}") and shown.err.startswith(f"usage: {path.name}")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_files_that_a_script_reads_are_there(path: Path) -> None:
    for named in re.findall(r"""\bROOT((?: / ["'][^"'{]+["'])+)""", path.read_text()):
        parts = re.findall(r"""["'](.+?)["']""", named)
        assert frame.ROOT.joinpath(*parts).exists() or {"results", "runs"} & {*parts}, named


# ---- comparing ----


def test_ratios_are_of_what_was_measured_side_by_side() -> None:
    """A machine that drifts by a factor of four, and one measurement that was disturbed, change nothing."""
    calls: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def run(prompt: int) -> Generation:
            calls.append(name)
            drift = 1.5 ** ((len(calls) - 1) // 3 % 4)  # from one repeat to the next
            disturbed = 50.0 if len(calls) == 8 else 1.0
            return Generation([0] * 10, seconds=seconds * prompt * drift * disturbed)

        return run

    made = alternatives.turns({"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 0.5)}, [1, 3], "", repeats=5)
    assert calls[:9] == [*"abc", *"acb", *"cab"] and calls[15:18] == [*"acb"]  # rotated, every other time from the end
    assert [len(runs) for runs in made["a"]] == [5, 5]
    assert alternatives.over(made["b"], made["a"]) == pytest.approx(0.5) and alternatives.over(made["c"], made["b"]) == pytest.approx(4)


STAND_IN = """
from types import SimpleNamespace as made
__version__ = "0.0"
print("vLLM says many things")

class SamplingParams:
    def __init__(self, **how):
        assert how["temperature"] == 0.0
        self.most = how["max_tokens"]

class LLM:
    def __init__(self, model, **settings):
        assert settings["skip_tokenizer_init"]
        if model == "broken":
            raise ValueError("there is no such model")
        self.statistics = not settings.get("disable_log_stats", True)

    def generate(self, prompt, asked, use_tqdm):
        if self.statistics:
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            for guesses in ([[7, 8]], [[9, len(prompt["prompt_token_ids"])]], [[]]):
                GPUModelRunner().propose_draft_token_ids(guesses)
        return [made(outputs=[made(token_ids=prompt["prompt_token_ids"][::-1][: asked.most])])]

    def get_metrics(self):
        assert self.statistics
        counted = {"drafts": made(value=7), "accepted_tokens": made(value=9), "accepted_tokens_per_pos": made(values=[6, 3])}
        return [made(name="vllm:spec_decode_num_" + name, **vars(value)) for name, value in counted.items()]
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with something in the place of vLLM."""
    (worker := tmp_path / "vllm" / "v1" / "worker").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    runner = "class GPUModelRunner:\n    def propose_draft_token_ids(self, made):\n        return made\n"
    (worker / "gpu_model_runner.py").write_text(runner)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


def test_an_engine_answers_one_request_after_the_other(stand_in: str) -> None:
    with Vllm(stand_in, {"model": "m", "disable_log_stats": False}) as engine:
        assert engine.version == "0.0"
        for prompts in ([[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]):
            answer = engine.ask({"prompts": prompts, "new_tokens": 2, "stop": []})
            assert answer["tokens"] == [p[::-1][:2] for p in prompts] and answer["seconds"] >= 0
            assert answer["guesses"] == [[[7, 8], [9, len(prompt)]] for prompt in prompts]
        assert (answer["drafts"], answer["accepted"], answer["accepted_by_depth"]) == (7, 9, [6, 3])
    assert engine.process.returncode == 0


def test_an_engine_that_fails_is_named_and_the_others_are_compared_with(stand_in: str, capsys: Any) -> None:
    def ours(prompt: Sequence[int]) -> Generation:
        return Generation(list(prompt)[::-1][:2], seconds=1e-9)  # faster than anything

    asked = versus.Asked([[1, 2, 3], [4, 5, 6]], 2, (), 3)
    theirs: versus.Engines = {"vLLM: good": {"model": "m"}, "vLLM: bad": {"model": "broken"}}
    entry = versus.compare("both", {"ours": ours}, asked, theirs, stand_in, 1)
    assert entry["vllm"] == {"vLLM: good": "0.0"} and entry["failed"] == ["vLLM: bad"]
    assert "vLLM: bad fails: ValueError: there is no such model" in " ".join(capsys.readouterr().out.split())
    assert entry["prompts_with_the_tokens_of_the_first"] == {"ours": 2, "vLLM: good": 2}
    assert versus.over_vllm(entry) == entry["over"]["ours"]["vLLM: good"] > 1
    alone = versus.compare("alone", {"ours": ours}, asked, theirs, None, 1)
    assert versus.over_vllm(alone) is None and [*alone["tokens_per_second"]] == ["ours"]


def test_all_settings_of_vllm_are_compared_with() -> None:
    plain, drafted = (
        dict(versus.engines({"model": "m"}, None, [False, True])),
        dict(versus.engines({"model": "m"}, {"method": "x"}, [True])),
    )
    assert len(plain) == 4 and len(drafted) == 6
    guesses = [given["speculative_config"]["num_speculative_tokens"] for given in drafted.values()]
    assert guesses == [3, 3, 5, 5, 7, 7] and [given["enforce_eager"] for given in drafted.values()] == [True, False] * 3
    assert not any("speculative_config" in given for given in plain.values())


def test_some_parts_again_leave_the_others_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "decode.json"
    out.write_text(json.dumps({"efficiency": 0.9, "choices_8_over_generate": 7.0, "parts": {"planted": {"commit": "before"}}}))
    monkeypatch.setattr(decode, "of_many", lambda args: iter([{"prefill_64x8_over_generate": 2.0}]))
    monkeypatch.setattr(sys, "argv", ["decode.py", "--only", "many", "tiny", "--out", str(out), "--threads", "1"])
    monkeypatch.setattr(decode, "missing", lambda args: {"tiny": "no drafter"})
    decode.main()
    found = json.loads(out.read_text())
    assert (found["efficiency"], found["prefill_64x8_over_generate"], found["choices_8_over_generate"]) == (0.9, 2.0, None)
    assert found["parts"]["planted"] == {"commit": "before"} and found["parts"]["many"]["machine"].endswith("1 thread")
    assert (
        found["command"] == "python benchmarks/decode.py --only many tiny" and "tiny: not measured. no drafter" in capsys.readouterr().out
    )


def test_the_arm_that_gains_least_is_named() -> None:
    found = drafters.worst({"a": {"t0": 1.2, "t1": 0.9}, "b": {"t0": 0.8, "t1": 1.4}})
    assert (found["worst_speedup_t0"], found["worst_speedup_t1"], found["worst_arms"]) == (0.8, 0.9, {"t0": "b", "t1": "a"})


# ---- counting ----


def test_rounds_and_their_costs_are_counted_whatever_reads_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}
    monkeypatch.setattr(planted, "SHAPE", small)
    (stock, _), (target, drafter) = planted.open_pair()
    assert target.reader.lean is not None and stock.reader.lean is None
    watch, chain, prompt = planted.Watch(target, drafter), TreePolicy("chain", depth=3), planted.random_prompts(1)[0]
    made = watch.over(Drafting(drafter), prompt, 20, chain)
    rounds = watch.rounds()
    assert [r.emitted for r in rounds] == made.emitted[1:]
    assert [(r.nodes, r.levels) for r in rounds] == [(asked, asked) for asked in made.asked[1:]]
    assert made.tokens == generate(stock, None, prompt, new_tokens=20).tokens
    costs = planted.Costs(target, drafter, TreePolicy(depth=3, nodes=8, branch=3, expand=2))
    costs.measure([*prompt, *made.tokens], repeats=1)
    assert costs.v().keys() == {0, *planted.NODES} and costs.v()[0] == 1 and costs.c() > 0


def test_verdicts_that_are_asked_for_are_given_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tree = Bench(smoke=True), TreePolicy(depth=3, nodes=6, branch=2, expand=2)
    drafter = bench.drafter()
    monkeypatch.setattr("headstart.inference.decoding.rounds.choose", accepting([1.0, 1.0, 0.0], bench.device))
    engine = bench.engine(drafter, 2, [tree])
    assert bench.timed(engine, 2, repeats=1)["accepted_length"] == 3.0
    assert min(bench.parts(engine, tree, 2)) > 0 and engine.free == 2


@pytest.mark.slow
def test_training_is_measured_to_the_end_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "train_gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["train_gpu.py", "--smoke", "--part", "training", "--out", str(out)])
    monkeypatch.setattr(train_gpu, "STEPS", 10)
    train_gpu.main()
    text = out.read_text()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == text.splitlines()
    rows = {row.pop("row"): row for row in map(json.loads, text.splitlines())}
    assert not [row["error"] for row in rows.values() if "error" in row]
    steps = [f"{what} {n}" for what in ("in process", "from captured states") for n in (1, 4)]
    assert {"matmul", "prefill 1", "prefill 4", *steps, "in process 4, parts", "capture", "target let go"} < rows.keys()
    assert all(rows[name]["tokens_per_second"] > 0 and rows[name]["peak_gib"] is None and rows[name]["mfu"] is None for name in steps)
    shares = rows["in process 4, parts"]["shares"]
    assert sum(shares.values()) == pytest.approx(1) and {"target", "unroll", "loss", "backward", "optimizer"} < shares.keys()
    assert min(shares.values()) > 0 and rows["in process 4"]["target_share"] > rows["from captured states 4"]["target_share"]
    D, width, kv, T = 64, 128, 16, 32  # of the toy: what its eight layers multiply for a token, attention counted or not
    layers = 8 * (2 * D * D + 2 * D * kv + 3 * D * width)
    prefill = rows["prefill 4"]["teraflops"] * 1e12 / rows["prefill 4"]["tokens_per_second"]
    assert 2 * layers <= prefill <= 1.01 * (2 * layers + 8 * 4 * T * D)


def test_what_fails_or_takes_too_long_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"

    def rows(bench: Any) -> Any:
        yield "good", lambda: {"x": 1}
        yield "bad", lambda: 1 // 0
        yield "after it", lambda: {"x": 2}

    gpu_rows.run_part("some", rows, True, out)
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("x", row.get("error")) for row in made[1:]] == [1, "ZeroDivisionError: integer division or modulo by zero", 2]
    script = tmp_path / "slow.py"
    script.write_text("import sys, time\nif sys.argv[2] == 'slow': time.sleep(60)\nsys.exit(3)")
    monkeypatch.setattr(sys, "argv", ["slow.py", "--smoke", "--out", str(out)])
    gpu_rows.measure(str(script), "", {"slow": (1, rows), "dies": (100, rows)}, total=200)
    made = [json.loads(line) for line in out.read_text().splitlines()][-2:]
    assert made == [{"row": "slow: out of time", "error": "stopped after 1 seconds"}, {"row": "dies: ended", "error": "exit code 3"}]


def test_batches_are_those_of_transformers() -> None:
    target, prompts = TARGET(), [random_tokens(n, seed=n) for n in (5, 9, 7)]
    a = tiny.batched(target, None, new_tokens=6)(prompts)
    b = tiny.transformers_batched(target, max_new_tokens=6, do_sample=False)(prompts)
    assert a.tokens == b.tokens and len(a.tokens) == 18
    likeliest = {"do_sample": True, "top_k": 1}  # of one choice
    choices = tiny.transformers_batched(target, max_new_tokens=6, **likeliest)(prompts[:1] * 3)
    assert choices.tokens == a.tokens[:6] * 3 == tiny.batched(target, None, new_tokens=6)(prompts[:1] * 3).tokens
    assert tiny.differing({"ours": [[a]], "theirs": [[b]]}, 6) == 0
    b.tokens[7] += 1
    assert tiny.differing({"ours": [[a]], "theirs": [[b]]}, 6) == 1


# ---- exactness ----


@pytest.mark.slow
def test_what_is_drawn_is_compared_with_what_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Target = tiny_target(seed=3)
    prompt = random_tokens(12, seed=1)
    outcomes = exactness.exactly(target, prompt)
    assert len(outcomes) == 81 and sum(outcomes.values()) == pytest.approx(1)
    (likeliest, p), product = max(outcomes.items(), key=lambda item: item[1]), 1.0
    for i, token in enumerate(likeliest):
        logits_V = target.model(torch.tensor([[*prompt, *likeliest[:i]]])).logits[0, -1]
        top = logits_V.topk(exactness.TOP_K)
        product *= float(top.values.softmax(-1)[top.indices.tolist().index(token)])
    assert product == pytest.approx(p, rel=1e-4)
    drafter, ticks = make("eagle", target), count()
    monkeypatch.setattr(auto, "clock_of", lambda target: lambda: next(ticks) / 1000)  # else the machine's speed would choose other samples
    found = exactness.sampled(target, drafter, [prompt], 100)
    assert found["samples_that_differ_when_repeated"] == 0 and min(found["p_value"]["alone"] + found["p_value"]["batched"]) > 0.01
    monkeypatch.setattr(exactness, "SamplingParams", lambda temperature, **how: SamplingParams(temperature=0.2, **how))
    wrong = exactness.sampled(target, drafter, [prompt], 100)
    assert max(wrong["p_value"]["alone"] + wrong["p_value"]["batched"]) < 0.01


@pytest.mark.slow
def test_the_ways_to_read_a_prompt_say_what_plain_decoding_says() -> None:
    target, prompts = TARGET(), [random_tokens(n, seed=n) for n in (20, 33, 17)]
    found = dict(exactness.compare(target, trained(), prompts, 8, "tiny"))
    assert {
        "static plain, in pieces",
        "auto, in pieces",
        "static auto, begun alike",
        "trained, auto",
        "static trained, auto",
    } < found.keys()
    assert all(case["differing"] == 0 and case["compared"] == 24 for case in found.values())
    assert not any("tuned" in name for name in found)


def test_attention_as_it_was_before_says_the_same() -> None:
    """What the figures of memory compare with: the same gradients, of repeated keys."""
    found = []
    for before in (False, True):
        step, leaves = step_memory.attention_part(24, 3, torch.float64)
        with step_memory.as_before() if before else nullcontext():
            step()
        found.append([leaf.grad for leaf in leaves])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# ---- the fastest ----


def test_calls_take_turns_and_the_fastest_behind_the_first_counts() -> None:
    ran, now, took = list[str](), [0.0], {"a": iter([1.0, 5.0, 3.0, 4.0]), "b": iter([9.0, 7.0, 8.0, 6.0])}

    def call(name: str) -> None:
        ran.append(name)
        now[0] += next(took[name])

    calls = {name: functools.partial(call, name) for name in took}
    assert alternatives.fastest(calls, 3, lambda: now[0]) == {"a": 3.0, "b": 6.0}
    assert "".join(ran) == "baabbaab"


# ---- growth ----


def test_what_grows_with_the_square_is_told_apart_and_several_arms_from_a_line() -> None:
    made = growth.by_length({t: 0.1 + 0.002 * t + 1e-6 * t * t for t in (512, 1024, 2048, 4096, 8192)})
    assert made["attention_share"] == pytest.approx(1e-6 * 8192**2 / made["lengths"][-1]["seconds"])
    assert [row["less_attention"] for row in made["lengths"]] == pytest.approx([0.1 / row["tokens"] + 0.002 for row in made["lengths"]])
    straight, bent = (growth.by_arms({1: 2.0, 2: 3.0, 4: four, 8: 9.0}, 512) for four in (5.0, 6.0))
    assert straight["off_line"] == pytest.approx(0) and bent["off_line"] == pytest.approx(0.2)
    assert [row["seconds_per_token"] for row in bent["arms"]] == [s / 512 for s in (2.0, 3.0, 6.0, 9.0)]
    growth.picture(made | bent).savefig(io.BytesIO())
