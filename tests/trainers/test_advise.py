"""Advice beside what can be computed by hand: tokens a round, seconds of a pass, the best number of guesses, and what is said."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from headstart.heads.errors import UserError
from headstart.heads.seal import CARD
from headstart.inference.reports.report import Report
from headstart.trainers import advise
from headstart.trainers.advise import Model, rate_of, tokens_per_round
from headstart.trainers.gpus import Gpu
from tests.composed import composed
from tests.doors import call
from tests.reports import a_report, figures

CONF = composed("target=llama8b", door="advise")


@pytest.mark.parametrize("rate", [0.2, 0.7, 0.95])
@pytest.mark.parametrize("guesses", [1, 3, 7])
def test_tokens_of_a_round(rate: float, guesses: int) -> None:
    """Of equal rates (1 - a^(K+1)) / (1 - a), and back; of different ones by enumerating which guess fails first."""
    tau = tokens_per_round([rate], guesses)
    assert tau == pytest.approx((1 - rate ** (guesses + 1)) / (1 - rate))
    assert rate_of(tau, guesses) == pytest.approx(rate)
    rates = torch.rand(guesses, dtype=torch.float64).tolist()
    expected = 0.0
    for passed in itertools.product([True, False], repeat=guesses):
        weight = 1.0
        for rate_of_depth, yes in zip(rates, passed, strict=True):
            weight *= rate_of_depth if yes else 1 - rate_of_depth
        expected += weight * (1 + next((i for i, yes in enumerate(passed) if not yes), guesses))
    assert tokens_per_round(rates, guesses) == pytest.approx(expected)


def test_seconds_of_a_pass() -> None:
    """Llama 8B on an H100 by hand: its weights without the embedding are read, or computed with."""
    shape, target = advise.target_of(CONF["target"])
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    weights = 32 * layer + 4096 + 128256 * 4096
    assert target.dense == 2 * weights and target.active == weights and target.experts == 0
    assert target.cache == 2 * 32 * 8 * 128 * 2
    gpu = Gpu(80e9, 989e12, 3.35e12)
    assert target.seconds(gpu, 1, 1, 1, 2048) == pytest.approx((2 * weights + 2048 * target.cache) / 3.35e12)
    assert target.seconds(gpu, 2, 512, 8, 0) == pytest.approx(2 * weights * 4096 / 989e12 / 2)
    assert shape.layers == 32


@pytest.mark.parametrize(
    "name, full, windowed, window",
    [
        ("deepseek_v3", 61 * (512 + 64) * 2, 0, 0),  # one latent vector, and the part that is rotated
        ("gemma3_27b", 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 1024),
        ("gpt_oss_20b", 12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2, 128),
        ("llama4_scout", 12 * 2 * 8 * 128 * 2, 36 * 2 * 8 * 128 * 2, 8192),
        ("qwen3_5_35b_a3b", 10 * 2 * 2 * 256 * 2, 0, 0),  # every fourth layer; the others have a state of fixed size
    ],
)
def test_what_the_cache_of_other_attention_takes(name: str, full: int, windowed: int, window: int) -> None:
    """By hand, from the published configs."""
    _, target = advise.target_of(composed(f"target={name}", door="advise")["target"])
    for context in (100, 32768):
        assert target.held(context) == full * context + windowed * min(window, context)
    gpu = Gpu(80e9, 1e30, 3.35e12)  # which computes in no time: the caches of four sequences more are read
    more = target.seconds(gpu, 1, 12, 0, 32768) - target.seconds(gpu, 1, 8, 0, 32768)
    assert more == pytest.approx(4 * target.held(32768) / 3.35e12)


def test_experts_that_a_pass_reads() -> None:
    """Each token passes 2 of 4 experts, all pairs alike: the mean over all choices of three tokens."""
    pairs = list(itertools.combinations(range(4), 2))
    read = [len(set().union(*chosen)) / 4 for chosen in itertools.product(pairs, repeat=3)]
    model = Model(dense=0.0, experts=1.0, chosen=0.5, active=0.0, cache=0.0)
    assert model.seconds(Gpu(1.0, 1.0, 1.0), 1, 3, 1, 0) == pytest.approx(sum(read) / len(read))


def test_the_number_of_guesses_is_the_best_one() -> None:
    shape, target = advise.target_of(CONF["target"])
    drafter, own = advise.drafter_of("eagle", shape)
    gpu, rates = Gpu(80e9, 989e12, 3.35e12), [0.73, 0.71, 0.67]
    for sequences in (1, 64, 512):
        found = advise.choose("eagle", drafter, own, target, rates, (gpu, 1, sequences, 2048))
        plain = target.seconds(gpu, 1, sequences, 1, 2048)
        best = 0.0
        for guesses in range(1, advise.MOST + 1):
            seconds = target.seconds(gpu, 1, sequences, guesses + 1, 2048) + guesses * own.seconds(gpu, 1, sequences, 1, 2048)
            best = max(best, tokens_per_round(rates, guesses) / (seconds / plain + advise.OVERHEAD[0]))
        assert found.speedup[1] == pytest.approx(best, rel=0.02)  # the middle of the range is what is chosen by


def test_blocks_are_taken_whole() -> None:
    """One pass over all slots, of which DFlash's first holds the last known token, and DSpark's guesses too."""
    shape, target = advise.target_of(CONF["target"])
    for head, slots, guesses in (("dflash", 16, 15), ("dspark", 7, 7)):
        drafter, own = advise.drafter_of(head, shape)
        load = (Gpu(80e9, 989e12, 3.35e12), 1, 64, 2048)
        found = advise.choose(head, drafter, own, target, [0.7], load)
        plain = target.seconds(load[0], 1, 64, 1, 2048)
        assert found.guesses == guesses and found.draft == own.seconds(load[0], 1, 64, slots, 2048) / plain


def test_no_more_guesses_than_were_measured(tmp_path: Path) -> None:
    """A rate of 0.99 behind depth 3 would have it guess on for ever."""
    rates = {"conditional_acceptance_by_depth": [0.9, 0.9, 0.99]}
    Report.of(a_report("eagle", chain_temperature_1=figures(3.0, 1.5) | rates)).write(tmp_path)
    found = advise.advise(CONF | {"report": str(tmp_path)})
    assert {choice.guesses for choice in found} == {3}


def test_guesses_of_a_block_that_were_not_measured_are_not_accepted(tmp_path: Path) -> None:
    """A block is drafted and verified whole, but only three depths of its 15 were measured."""
    rates = {"conditional_acceptance_by_depth": [0.8, 0.7, 0.6]}
    Report.of(a_report("dflash", chain_temperature_1=figures(3.0, 1.5) | rates)).write(tmp_path)
    for found in advise.advise(CONF | {"report": str(tmp_path)}):
        assert found.guesses == 15 and found.tau == pytest.approx(1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6)


@pytest.mark.parametrize("beside", ["", ".."])
def test_the_costs_are_those_of_the_reported_drafter(beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of four is verified as four tokens, wherever a run or `python -m inference` has put the report."""
    (folder := tmp_path / "report-x").mkdir()
    Report.of(a_report("dflash")).write(folder)
    config = CONF | {"report": str(folder), "sequences": [1]}
    assert advise.advise(config)[0].guesses == 15 and "the costs are those of dflash with its default settings" in capsys.readouterr().out
    (there := folder / beside / "speculator").mkdir()
    block = {"head": "dflash", "arguments": {"block": 4}, "target": dict.fromkeys(CARD, 0)}
    (there / "config.json").write_text(json.dumps({"headstart": block}))
    assert advise.advise(config)[0].guesses == 3 and "default settings" not in capsys.readouterr().out
    block["head"] = "eagle"  # that of another drafter
    (there / "config.json").write_text(json.dumps({"headstart": block}))
    assert advise.advise(config)[0].guesses == 15
    block |= {"head": "dflash", "arguments": {"block": 1}}
    (there / "config.json").write_text(json.dumps({"headstart": block}))
    with pytest.raises(UserError, match=r"what dflash costs cannot be told: .* reported one .*block must be at least 2"):
        advise.advise(config)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    advise.advise(composed("target=llama70b", door="advise"))
    said = capsys.readouterr().out
    assert "first: the weights do not fit into 1 x h100: give gpus=N" in said and "take 141 of 80 GB" in said
    advise.advise(CONF | {"sequences": [1, 512]})
    assert "but memory has room for about" in (said := capsys.readouterr().out) and "not for 512" in said
    advise.advise(CONF | {"sequences": [2], "context": 400_000})
    assert capsys.readouterr().out.count("room for about 1 sequence of 400,000 tokens") == 2


def test_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    small = advise.advise(CONF | {"sequences": [1]})
    assert small[0].speedup[0] > 1.5 and "advice: speculate at 1 sequence," in capsys.readouterr().out
    large = advise.advise(CONF | {"sequences": [4096], "context": 1})
    said = capsys.readouterr().out
    assert large[0].speedup[1] < 1.1 and "do not speculate here" in said and "the GPU is busy computing" in said
    for check in ("baseline first", "acceptance of the first guess", "guesses by task", "batch:", "memory:", "published"):
        assert check in said
    assert f"{large[0].verify:.2f} at 4096 ({large[0].head}) plain passes" in said  # of the drafter that gains most there


def test_acceptance_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Report.of(a_report("eagle"))
    made.write(tmp_path)
    found, source = advise.acceptances(str(tmp_path), CONF["published"], "chat")
    assert found == {"eagle": a_report("eagle")["chain_temperature_1"]["conditional_acceptance_by_depth"]} and "measured" in source
    advise.advise(CONF | {"report": str(tmp_path), "sequences": [1]})
    assert "published" not in capsys.readouterr().out


def test_where_the_acceptance_was_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target, the temperature and the prompts, also in the check on your own prompts; and that another target was meant."""
    measured = "measured for tiny at temperature 1, 4 prompts of held-out text of chat"
    Report.of(a_report("eagle")).write(tmp_path)
    advise.advise(composed("target=tiny", door="advise") | {"report": str(tmp_path)})
    assert measured in (said := capsys.readouterr().out) and "not for" not in said
    assert f"report on your own prompts (here: {measured})" in said
    advise.advise(CONF | {"report": str(tmp_path)})
    assert "was measured for tiny, not for llama8b, which accepts other guesses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rate", "speedup", "says"),
    [
        (0.7, (1.2, 1.5), ["advice: speculate at 1 sequence, with eagle: 1 guess at 1"]),
        (0.7, (0.84, 1.1), ["advice: speculation may pay, if your engine's overhead is small, at 1 sequence, with eagle: 1 guess at 1"]),
        (0.5, (1.2, 1.5), ["advice: train eagle further first: too few of the first guesses are accepted"]),
    ],
)
def test_no_more_is_advised_than_was_computed(rate: float, speedup: tuple[float, float], says: list[str]) -> None:
    assert [*advise.advice([advise.Choice("eagle", 1, 1, 2.0, 1.0, 0.1, speedup)], {"eagle": [rate]})] == says


def test_several_loads_are_advised_apart() -> None:
    choices = [advise.Choice("eagle", load, 3, 2.0, 1.0, 0.1, gain) for load, gain in ((1, (1.5, 2.0)), (8, (1.1, 1.4)), (32, (0.9, 1.2)))]
    sure, perhaps = advise.advice(choices, {"eagle": [0.7]})
    assert sure == "advice: speculate at 1, 8 sequences, with eagle: 3 guesses at 1, 3 guesses at 8"
    assert perhaps.endswith("small, at 32 sequences, with eagle: 3 guesses at 32")


def test_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inference advise", ["target=llama8b", "sequences=[1,32]", "task=code"], tmp_path, monkeypatch) == 0
    assert "dspark" in capsys.readouterr().out
    assert call("inference advise", ["gpu=h1000"], tmp_path, monkeypatch) == 2
    assert "gpu must be one of h100" in capsys.readouterr().err
    assert call("inference advise", ["report=nowhere"], tmp_path, monkeypatch) == 2
    with pytest.raises(UserError, match="gpu must be one of"):
        advise.advise(CONF | {"gpu": "none"})


@pytest.mark.parametrize(
    "name, chosen", [("qwen3_30b_a3b", 8 / 128), ("mixtral_8x7b", 2 / 8), ("gpt_oss_20b", 4 / 32), ("deepseek_v3", 8 / 256)]
)
def test_the_share_of_experts_that_a_token_uses(name: str, chosen: float) -> None:
    """From the published configs."""
    _, target = advise.target_of(composed(f"target={name}", door="advise")["target"])
    assert target.chosen == pytest.approx(chosen, rel=1e-6)
    assert target.active == pytest.approx((target.dense + chosen * target.experts) / advise.BF16)


def test_a_table_that_is_embedding_and_head_is_read_as_the_head() -> None:
    """SmolLM2 has 134.5 million weights, all of which every pass reads."""
    _, target = advise.target_of(composed("target=smollm2_135m", door="advise")["target"])
    assert target.dense == 2 * target.active == pytest.approx(2 * 134.5e6, rel=1e-3) and target.table == 0


@pytest.mark.parametrize(("head", "layers", "own"), [("eagle", 1, True), ("mtp", 1, False), ("dflash", 5, False), ("medusa", 0, True)])
def test_what_a_drafter_reads(head: str, layers: int, own: bool) -> None:
    """All its weights, the target's output head where it has none of its own, and a KV cache of its layers."""
    shape, _ = advise.target_of(CONF["target"])
    drafter, model = advise.drafter_of(head, shape)
    weights = sum(p.numel() for p in drafter.parameters()) + (0 if own else 128256 * 4096)
    assert (model.dense, model.active) == (2 * weights, weights)
    assert model.held(100) == 100 * layers * 2 * 8 * 128 * 2


def test_a_drafter_with_experts_reads_those_that_it_uses() -> None:
    shape, _ = advise.target_of(CONF["target"])
    more = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=1, head_dim=128, hidden_size=4096)
    config = dict(model_type="qwen3_moe", vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, **more)
    drafter, model = advise.drafter_of("own_mtp", shape, config=config)
    experts, router = 8 * 3 * 4096 * 16, 8 * 4096
    others = 2 * 4096 * 4096 + 4096 * (2 * 32 + 2 * 8) * 128 + router + 2 * 128 + 5 * 4096  # fc, attention, router, norms
    assert model.experts == 2 * experts and model.chosen == 0.25 and model.dense == 2 * (others + 128256 * 4096)
    assert model.active == others + 128256 * 4096 + experts // 4
    with pytest.raises(UserError, match="what own_mtp costs cannot be told: it is made of a target; give the report of a run"):
        advise.drafter_of("own_mtp", shape)


def test_a_drafter_runs_on_one_gpu_however_many_the_target_has() -> None:
    """Of twice as many GPUs a plain pass takes half the time, so that drafting costs twice as many of them."""
    shape, target = advise.target_of(CONF["target"])
    drafter, own = advise.drafter_of("dflash", shape)
    gpu = Gpu(80e9, 989e12, 3.35e12)
    one, two = (advise.choose("dflash", drafter, own, target, [0.7], (gpu, gpus, 1, 2048)) for gpus in (1, 2))
    assert two.draft == pytest.approx(2 * one.draft) and two.verify == pytest.approx(one.verify)
    for found in (one, two):
        round_ = found.verify + found.draft
        assert found.speedup == pytest.approx((found.tau / (round_ + 0.4), found.tau / (round_ + 0.05))), "the slower engine first"


def test_the_drafter_that_gains_most_is_advised_at_each_load(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONF | {"sequences": [1, 16], "gpus": 2}
    known, _ = advise.acceptances(None, config["published"], config["task"])
    shape, target = advise.target_of(config["target"])
    made = {head: advise.drafter_of(head, shape) for head in known}
    for best in advise.advise(config):
        load = (advise.gpu_of(config["gpu"]), 2, best.sequences, config["context"])
        each = [advise.choose(head, *made[head], target, rates, load) for head, rates in known.items()]
        assert best == max(each, key=lambda choice: sum(choice.speedup)) and len(each) > 2
    assert "take 16 of 160 GB: room for about" in capsys.readouterr().out
