"""Choosing by hand-made tables; measuring by a clock that counts rows instead of seconds; what is written is read again."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.plans import ALONE, MANY, NAME, by_load, load_plans, summary, write
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.reports import timing
from headstart.inference.reports import tune as tuner
from headstart.inference.reports.figures import rounds_of
from headstart.inference.reports.timing import Round, surface
from headstart.inference.reports.tune import Run, best, candidates, choose, cost, fixed, in_the_running, rank_shares, tau, tune
from tests.drafters import FEW_HEADS, HEADS, learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

NEW, PROMPTS = 16, [random_tokens(9, seed=n) for n in range(3)]
TARGET = functools.cache(tiny_target)
SHORT, LONG = TreePolicy("chain", depth=1), TreePolicy("chain", depth=4)
WIDE = TreePolicy(depth=4, nodes=8, branch=4, expand=2)


@functools.cache
def trained() -> Any:
    target = TARGET()
    texts = [p + generate(target, None, p, new_tokens=NEW).tokens for p in PROMPTS]
    return learn_by_heart(make("eagle", target), target, texts, depth=3, steps=15)


# ---- choosing ----


def test_the_largest_gain_is_chosen_and_never_one_below_plain_decoding() -> None:
    taus = {SHORT: 1.8, LONG: 3.0, WIDE: 4.0}
    assert choose(taus, {SHORT: 1.2, LONG: 1.5, WIDE: 2.5}) == LONG
    assert choose(taus, {SHORT: 1.2, LONG: 2.9, WIDE: 4.1}) == SHORT
    assert choose(taus, {SHORT: 1.8, LONG: 3.1, WIDE: 5.0}) is None
    assert choose(taus, {SHORT: 1.79, LONG: 3.1, WIDE: 5.0}) is None  # a gain within the noise is none
    assert choose(taus, {}) is None
    assert best(taus, {SHORT: 1.2, LONG: 1.5, WIDE: 2.5}, 2) == [LONG, WIDE]


def test_what_may_still_win_with_more_sequences_stays() -> None:
    narrow = TreePolicy(depth=4, nodes=8, branch=4, expand=1)
    costs = {SHORT: 1.9, LONG: 1.5, WIDE: 2.9, narrow: 2.9}
    taus = {SHORT: 1.8, LONG: 3.0, WIDE: 4.0, narrow: 4.0}
    assert in_the_running(taus, costs) == [SHORT, LONG, narrow]  # smaller; the best; of its nodes the cheapest to draft
    assert in_the_running(taus, costs | {WIDE: 2.4}) == [SHORT, LONG, WIDE, narrow]  # near the best
    nothing_pays = dict.fromkeys(costs, 9.0)
    assert in_the_running(taus, nothing_pays) == [SHORT, LONG, narrow]  # one for each number of nodes: the surface


@pytest.mark.parametrize("head", HEADS)
def test_candidates_are_no_deeper_than_the_drafter_can_guess(head: str) -> None:
    drafter = make(head, TARGET())
    trees = candidates(drafter)
    assert len(set(trees)) == len(trees) and {"chain", "dynamic", "best_first"} == {tree.kind for tree in trees}
    assert max(tree.depth for tree in trees) == min(drafter.max_depth or 10, 10)


def test_fixed_trees_are_of_the_paths_most_often_right() -> None:
    shares = [[0.6, 0.2, 0.05, *[0.0] * 5], [0.5, 0.3, *[0.0] * 6]]
    assert fixed(shares, 5).paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))  # 0.6, 0.2, 0.3, 0.18 and 0.1; (2,) has 0.05
    assert fixed(shares, 1).paths == ((0,),)
    assert fixed([[0.5] * 8], 16).nodes == 8 and fixed([[1.0] + [0.0] * 7] * 7, 8).depth == 7


@pytest.mark.parametrize("head", FEW_HEADS)
def test_ranks_are_those_that_decoding_finds(head: str) -> None:
    target, drafter = TARGET(), make(head, TARGET())
    shares = rank_shares(target, drafter, PROMPTS[:2], NEW)
    assert len(shares) == min(7, drafter.max_depth or 7) and all(len(row) == 8 and sum(row) <= 1 + 1e-6 for row in shares)
    tree, right = TreePolicy("fixed", paths=((0,), (1,), (2,))), 0
    for prompt in PROMPTS[:2]:
        said = generate(target, None, prompt, new_tokens=NEW).tokens
        for i in range(NEW - 1):  # from every root a round of depth 1
            made = generate(target, Drafting(drafter), prompt + said[:i], new_tokens=3, policy=tree, stop_ids=())
            right += made.emitted[0] == 2
    assert sum(shares[0][:3]) == pytest.approx(right / (2 * (NEW - 1)))


def test_what_was_learnt_is_of_the_first_rank() -> None:
    assert min(row[0] for row in rank_shares(TARGET(), trained(), PROMPTS, NEW)[:3]) > 0.6


def test_one_disturbed_prompt_does_not_decide() -> None:
    runs = [Run(33, 32, 8, s, 32, 3.2) for s in (1.6, 1.6, 16.0)]
    assert tau(runs) == 4.0
    assert cost(runs) == pytest.approx(2.0)  # 0.2 s a round over 0.1 s


def test_the_surface_adds_up_to_the_round() -> None:
    times = {None: Round(0.0, 2.0), SHORT: Round(0.7, 2.4), LONG: Round(1.9, 3.0), WIDE: Round(3.0, 4.0)}
    found = surface(8, times)
    assert found["sequences"] == 8 and found["plain_round_milliseconds"] == 2000
    assert found["verify_over_plain_by_nodes"] == {"1": 1.2, "4": 1.5, "8": 2.0}
    assert found["chain_level_over_plain"] == pytest.approx(0.2)
    whole = found["verify_over_plain_by_nodes"]["4"] + 4 * found["chain_level_over_plain"] + found["rest_over_plain"]
    assert whole == pytest.approx((1.9 + 3.0) / 2.0)


# ---- measuring ----


@contextmanager
def counting(target: Any, drafter: Any, a_pass: float, a_row: float, a_level: float) -> Iterator[None]:
    """Time is what the target's passes and the drafter's levels cost."""
    time = [0.0]

    def step(*args: Any, **kwargs: Any) -> Any:
        time[0] += a_level
        return type(drafter).step(drafter, *args, **kwargs)

    def read(module: Any, args: Any, kwargs: Any) -> None:
        time[0] += a_pass + a_row * kwargs["input_ids"].numel()

    hook = target.body.register_forward_pre_hook(read, with_kwargs=True)
    drafter.step = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "now", lambda: time[0])
        patch.setattr(timing, "now", lambda: time[0])
        patch.setattr(tuner, "CHAINS", (1, 3))
        patch.setattr(tuner, "DEPTHS", (3,))
        patch.setattr(tuner, "NODES", {4: (2,)})
        try:
            yield
        finally:
            hook.remove()
            del drafter.step


def test_the_clock_decides_and_the_figures_are_those_of_decoding() -> None:
    target, drafter = TARGET(), trained()
    with counting(target, drafter, a_pass=1.0, a_row=0.05, a_level=0.1):
        tuned = tune(target, drafter, PROMPTS, sequences=8, new_tokens=NEW)
    plans = tuned["plans"]
    assert list(plans) == ["alone", "1", "2", "4", "8"] and [s["sequences"] for s in tuned["surface"]] == [1, 2, 4, 8]
    for name, found in plans.items():
        if found["tree"] is None:
            continue
        tree, B = TreePolicy(**found["tree"]), 1 if name == "alone" else int(name)
        # not alone: there the last tree of a text is cut to what is left of it
        made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=tree)
        assert found["accepted_length"] == pytest.approx(sum(sum(g.emitted) for g in made) / sum(len(g.emitted) for g in made))
        rounds = [r for g in made for r in rounds_of(g)]
        shares = [sum(len(r.accepted) >= d for r in rounds) / len(rounds) for d in range(1, tree.depth + 1)]
        assert found["acceptance_by_depth"] == pytest.approx(shares)
        own = sum(len(r.tokens) > len(r.accepted) for r in rounds) / len(rounds)  # a round that was cut has no token of the target's own
        assert own + sum(shares) == pytest.approx(found["accepted_length"])
        if name != "alone":
            rounds = 1 + 0.05 * B * (1 + tree.nodes) + 0.1 * (tree.depth - 1)
            assert found["round_over_plain"] == pytest.approx(rounds / (1 + 0.05 * B))
        assert found["predicted_speedup"] == pytest.approx(found["accepted_length"] / found["round_over_plain"])
        assert found["predicted_speedup"] > 1.03
    assert plans["alone"]["measured_speedup"] > 1.2
    for s in tuned["surface"]:
        B = s["sequences"]
        assert s["plain_round_milliseconds"] == pytest.approx(1e3 * (1 + 0.05 * B))
        for n, v in s["verify_over_plain_by_nodes"].items():
            assert v == pytest.approx((1 + 0.05 * B * (1 + int(n))) / (1 + 0.05 * B))
        assert s["chain_level_over_plain"] == pytest.approx(0.1 / (1 + 0.05 * B))
        assert s["rest_over_plain"] == pytest.approx(-0.1 / (1 + 0.05 * B))  # here the first level is free


@pytest.mark.slow
def test_where_nodes_are_dear_drafting_is_switched_off() -> None:
    target, drafter = TARGET(), trained()
    with counting(target, drafter, a_pass=1.0, a_row=1.0, a_level=0.1):
        plans = tune(target, drafter, PROMPTS, sequences=8, new_tokens=NEW)["plans"]
    assert plans["8"] == {"tree": None}  # a row more costs 8/9 of a plain round, and brings less than one token
    with counting(target, drafter, a_pass=1.0, a_row=0.0, a_level=5.0):
        plans = tune(target, drafter, PROMPTS, sequences=2, new_tokens=NEW)["plans"]
    assert {(p["tree"] or {"depth": 0})["depth"] for p in plans.values()} <= {0, 1}  # levels are dear, the first is free


def test_rounds_of_a_single_shape_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.TIMED, "cpu", (2, 0.0, 1))
    times = timing.time_rounds(TARGET(), trained(), [SHORT, SHORT], PROMPTS, 1, NEW)
    assert set(times) == {None, SHORT} and times[SHORT].draft > 0 and times[SHORT].verify > 0


def test_what_cannot_be_tuned_is_said() -> None:
    target, drafter = TARGET(), trained()
    for prompts, sequences, new, word in (([], 4, 16, "prompts"), (PROMPTS, 0, 16, "sequences"), (PROMPTS, 4, 2, "new_tokens")):
        with pytest.raises(UserError, match=word):
            tune(target, drafter, prompts, sequences=sequences, new_tokens=new)
    with pytest.raises(UserError, match="context"):
        tune(target, drafter, [random_tokens(250, seed=1)], sequences=1, new_tokens=16)


# ---- written and read ----

FIGURES = {"accepted_length": 3.0, "acceptance_by_depth": [0.9, 0.6, 0.4, 0.1], "round_over_plain": 1.5, "predicted_speedup": 2.0}


def tuned(**plans: TreePolicy | None) -> dict[str, Any]:
    from dataclasses import asdict

    from headstart.inference.provenance import machine

    def entry(tree: TreePolicy | None) -> dict[str, Any]:
        return {"tree": None} if tree is None else {"tree": asdict(tree), **FIGURES}

    times = {None: Round(0.0, 2.0), SHORT: Round(0.7, 2.4), LONG: Round(1.9, 3.0)}
    return {
        "drafter": "some",
        "target": "tiny",
        "device": machine(TARGET().device),
        "dtype": "float32",
        "plans": {name.removeprefix("at_"): entry(tree) for name, tree in plans.items()},
        "surface": [surface(1, times), surface(2, times)],
    }


def test_what_is_written_is_read_and_decodes_as_plain_decoding_does(tmp_path: Path) -> None:
    target, drafter = TARGET(), trained()
    fixed = TreePolicy("fixed", paths=((0,), (1,), (0, 0)))
    write(tuned(alone=WIDE, at_1=fixed, at_2=LONG, at_4=None), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [NAME, "decode.png"]
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
    plans = load_plans(tmp_path, target, drafter)
    assert plans == {ALONE: WIDE, 1: fixed, 2: LONG, 4: None, MANY: None} and next(iter(plans)) == ALONE
    for rows, depths in ((2, {4, 2}), (3, {0})):  # the last of three prompts is decoded alone; none for three at once
        made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=plans, sequences=rows)
        assert [g.tokens for g in made] == [generate(target, None, p, new_tokens=NEW).tokens for p in PROMPTS]
        assert {depth for g in made for depth in g.asked} == depths


def test_beyond_what_was_tuned_the_last_plan_holds(tmp_path: Path) -> None:
    target, drafter = TARGET(), trained()
    write(tuned(alone=WIDE, at_1=WIDE, at_2=LONG), tmp_path)
    plans = load_plans(tmp_path, target, drafter)
    assert plans == {ALONE: WIDE, 1: WIDE, 2: LONG, MANY: LONG}
    found = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(found | {"plans": dict(reversed(found["plans"].items()))}))
    assert [*load_plans(tmp_path, target, drafter).items()] == [*plans.items()]  # ascending, in whatever order the file has them
    made = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=plans, sequences=3)
    assert {depth for g in made for depth in g.asked} == {4}
    assert by_load(plans) == ["up to 1 at once: dynamic, 8 nodes, depth 4", "more at once: chain of 4"]
    assert by_load({1: LONG, 2: LONG, 4: None, MANY: None}) == ["up to 2 at once: chain of 4", "more at once: no drafting"]
    assert by_load({MANY: SHORT}) == ["any number at once: chain of 1"]


def test_without_a_file_or_from_another_machine_there_is_no_plan(tmp_path: Path) -> None:
    target, drafter = TARGET(), trained()
    with pytest.raises(UserError, match=r"has no decode\.json: run `python -m inference tune` for it, or take decode=auto"):
        load_plans(tmp_path, target, drafter)
    for change in ({"device": "another"}, {"dtype": "bfloat16"}):
        write(tuned(at_1=LONG) | change, tmp_path)
        with pytest.raises(UserError, match=f"was measured on .*{next(iter(change.values()))}.*, and this is"):
            load_plans(tmp_path, target, drafter)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("", "{", "cannot be read"),
        ("", "[]", "not what the tuner writes"),
        ("device", 3, "device"),
        ("dtype", None, "dtype"),
        ("plans", {}, "plans"),
        ("plans", [LONG.depth], "plans"),
        ("plans.0", {"tree": None}, "plans.0"),
        ("plans.1", None, "plans.1"),
        ("plans.1", {}, "plans.1.*tree"),
        ("plans.1.tree", "chain", "plans.1.*tree"),
        ("plans.1.tree.kind", "bush", "plans.1.*kind"),
        ("plans.1.tree.depth", "4", "plans.1.*depth"),
        ("plans.1.tree.depth", 100_000, "plans.1"),
        ("plans.1.tree.least", "much", "plans.1"),
        ("plans.1.tree.paths", 7, "plans.1"),
        ("plans.1.tree.more", 7, "plans.1.*keys"),
        ("plans.2.tree.nodes", 100_000, "plans.2.*512"),
        ("plans.2.tree.branch", 100_000, "plans.2"),
    ],
)
def test_a_damaged_file_is_named_with_its_key(tmp_path: Path, key: str, value: Any, words: str) -> None:
    found = tuned(at_1=LONG, at_2=WIDE)
    *above, last = key.split(".")
    if last:
        functools.reduce(lambda x, k: x[k], above, found)[last] = value
    (tmp_path / NAME).write_text(json.dumps(found) if last else value)
    with pytest.raises(UserError, match=f"(?s){NAME}.*{words}") as raised:
        load_plans(tmp_path, TARGET(), trained())
    assert "\n" not in str(raised.value) and "tune" in str(raised.value)


def test_a_tree_deeper_than_the_drafter_is_refused(tmp_path: Path) -> None:
    drafter = make("medusa", TARGET())
    write(tuned(at_1=TreePolicy("chain", depth=(drafter.max_depth or 0) + 1)), tmp_path)
    with pytest.raises(UserError, match=r"plans\.1.*depth"):
        load_plans(tmp_path, TARGET(), drafter)


def test_people_are_told_from_where_on_it_does_not_pay() -> None:
    told = summary(tuned(alone=WIDE, at_1=LONG, at_2=None, at_4=LONG, at_8=None, at_16=None))
    assert len(told) == 5 and told[0].startswith("one sequence alone: dynamic, 8 nodes, depth 4: 3.00 tokens a round, 2.00x")
    assert told[0].endswith("accepted by depth 90% 60% 40% 10%")
    assert told[2:] == ["2 at once: off", told[3], "at 8 sequences or more: off"] and told[3].startswith("4 at once: chain")
    assert summary(tuned(alone=None, at_1=None, at_2=None)) == ["one sequence alone: off", "at 1 sequences or more: off"]
    assert summary(tuned(alone=None, at_1=LONG))[0] == "one sequence alone: off"
