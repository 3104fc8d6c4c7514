"""``decode=auto``: exact whatever is chosen, the same for a sequence whatever was decoded before it, and never for nothing."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.decoding import auto, decode, engine, rounds
from headstart.inference.decoding.auto import CREDIT, LEANS, LOSS, PRIOR, SURE, WEIGHT, AcceptanceByDepth, Auto, Pace, Past, known_of
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import AUTO, TreePolicy, costs_as, shapes_of
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.verify import RULES
from headstart.inference.proposers.ngram import Ngram
from tests.drafters import make, random_tokens
from tests.inference.decoding.toys import Script
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
SMALL = TreePolicy("auto", depth=2, nodes=3, branch=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], None]:
    """Costs that are given instead of measured, by the names of shapes."""

    def give(costs: dict[str, float]) -> None:
        def of(policy: TreePolicy, rule: str, heat: int) -> Auto:
            shapes = shapes_of(policy, rule, heat)
            return Auto(shapes, [costs.get(str(shape), 9.0) for shape in shapes])

        monkeypatch.setattr(decode, "auto_of", lambda policy, target, proposer, sampling, *_: of(*auto.key_of(policy, sampling)))
        monkeypatch.setattr(engine, "auto_of_rounds", lambda rounds, kind, warp: of(kind.policy, rounds.rule, warp.heat))
        monkeypatch.setattr(decode, "WORTH", 0)
        monkeypatch.setattr(engine, "WORTH", 0)

    return give


# ---- exact: every outcome of several rounds, whose shapes hang on what came before ----

V, PROMPT, NEW = 2, [0, 1, 1], 4


@functools.cache
def pair() -> tuple[Target, Drafter]:
    """Of two tokens; in fp64, so that sums of products of probabilities can be compared."""
    target = Target(tiny_target(vocab_size=V, num_hidden_layers=1).model.double())
    target.ends.head_VD.mul_(0.2)  # else all is certain
    drafter = hub.build("eagle", target.shape, taps=[0, 1], heads=1, kv_heads=1)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return target, drafter.double().eval().prepack()


class Once(Script):
    """One script for all rounds: slots are used once at a position."""

    accepts_all = False

    def _use(self, slot: int) -> None:
        super()._use((self.position, slot))  # type: ignore[arg-type]

    def flip(self, p_B: Tensor, slot: int) -> Tensor:
        return torch.ones_like(p_B, dtype=torch.bool) if self.accepts_all else super().flip(p_B, slot)

    def at(self, position: int) -> Once:
        self.position = position
        return self


def law_of(say: Callable[[], Generation], monkeypatch: pytest.MonkeyPatch, accepts_all: bool = False) -> tuple[Counter[Any], Counter[Any]]:
    """Probability of every text, and of every sequence of shapes."""
    texts, shapes, script = Counter[Any](), Counter[Any](), list[int]()
    while True:
        rng = Once(script)
        rng.accepts_all = accepts_all
        monkeypatch.setattr(decode.CounterRNG, "of", lambda seed=0, position=0, device="cpu", rng=rng: rng.at(position))
        monkeypatch.setattr(rounds, "CounterRNG", lambda seeds, positions, rng=rng: rng.at(int(positions[0])))
        made = say()
        texts[tuple(made.tokens)] += rng.weight  # type: ignore[assignment]
        shapes[tuple(map(str, made.shapes))] += rng.weight  # type: ignore[assignment]
        while script and script[-1] + 1 == rng.options[len(script) - 1]:
            script.pop()
        if not script:
            return texts, shapes
        script[-1] += 1


def true_law() -> dict[tuple[int, ...], float]:
    target, _ = pair()
    found = {}
    for text in product(range(V), repeat=NEW):
        tokens = torch.tensor([[*PROMPT, *text]])
        final = target.read(tokens, torch.arange(tokens.shape[1])[None], ())[1][0, len(PROMPT) - 1 : -1]
        found[text] = float(target.logits(final).double().softmax(-1).gather(1, torch.tensor(text)[:, None]).prod())
    return found


def alone(policy: TreePolicy) -> Generation:
    target, drafter = pair()
    return generate(target, Drafting(drafter), PROMPT, new_tokens=NEW, policy=policy, sampling=SamplingParams(1.0), stop_ids=())


def static(policy: TreePolicy) -> Generation:
    target, drafter = pair()
    made = Engine(target, drafter, sequences=1, max_length=len(PROMPT) + NEW, plans=policy)
    return made.run([PROMPT], new_tokens=NEW, sampling=[SamplingParams(1.0)], stop_ids=())[0]


def apart(say: Callable[[], Generation], monkeypatch: pytest.MonkeyPatch, accepts_all: bool = False) -> tuple[float, Counter[Any]]:
    texts, shapes = law_of(say, monkeypatch, accepts_all)
    return max(abs(texts[text] - p) for text, p in true_law().items()), shapes


@pytest.mark.parametrize("path", [alone, static])
@pytest.mark.parametrize("costs", [{"chain of 1": 1.5, "chain of 2": 2.0}, {"dynamic, 3 nodes, depth 2": 1.2, "chain of 1": 1.45}])
def test_exact_over_rounds_whose_shapes_hang_on_the_past(
    costs: dict[str, float], path: Callable[[TreePolicy], Generation], measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(costs)
    error, shapes = apart(lambda: path(SMALL), monkeypatch)
    assert error < 1e-9
    assert len(shapes) > 1 and len({first for first, *_ in shapes}) == 1, "the first choice is the same, later ones are not"


def test_a_verdict_that_accepts_all_would_be_noticed(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured({"chain of 1": 1.5, "chain of 2": 2.0})
    assert apart(lambda: alone(SMALL), monkeypatch, accepts_all=True)[0] > 1e-3


# ---- the choice ----


def test_a_sequence_says_the_same_whatever_was_decoded_before_it() -> None:
    target = TARGET()
    drafter, prompts = make("eagle", target), [random_tokens(9, seed=s) for s in range(3)]

    def say(prompt: list[int]) -> list[int]:
        return generate(target, Drafting(drafter), prompt, new_tokens=40, policy=AUTO, sampling=SamplingParams(1.0, seed=7)).tokens

    first = say(prompts[0])
    for prompt in prompts:
        say(prompt)
    assert say(prompts[0]) == first


@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_greedy_text_is_the_targets_in_both_paths(head: str) -> None:
    target, prompt = TARGET(), random_tokens(11, seed=1)
    drafter = make(head, target)
    policy = AUTO.at_most(drafter.max_depth or AUTO.depth)
    expected = generate(target, None, prompt, new_tokens=60).tokens
    made = generate(target, Drafting(drafter), prompt, new_tokens=60, policy=policy)
    assert made.tokens == expected and len(made.shapes) == len(made.emitted)
    several = Engine(target, drafter, sequences=3, max_length=80, plans=policy)
    for row in several.run([prompt] * 3, new_tokens=60, sampling=[SamplingParams()] * 3):
        assert row.tokens == expected and len(row.shapes) == len(row.emitted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_paths_learn_the_same_from_trees(temperature: float, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains too, by the first children: the choices that follow are the same."""
    target, prompt, pasts = TARGET(), random_tokens(9, seed=1), list[Past]()
    tree = TreePolicy("auto", depth=4, nodes=8, branch=3)
    measured({str(shape): 1.1 for shape in shapes_of(tree, "auto", 2 * int(temperature)) if shape.kind != "chain" and shape.depth == 4})
    monkeypatch.setattr(decode, "Past", lambda: pasts.append(Past()) or pasts[-1])
    how = dict(new_tokens=31, sampling=SamplingParams(temperature, seed=3), stop_ids=())
    drafter = make("eagle", target)
    alone = generate(target, Drafting(drafter), prompt, policy=tree, **how)
    own = Engine(target, drafter, sequences=1, max_length=64, plans=tree)
    row = own.add_request(prompt, **how)
    while not row.done:
        own.step()
    assert row.tokens == alone.tokens and row.shapes == alone.shapes and {s.kind for s in row.shapes if s} <= {"dynamic", "fixed"}
    assert row.past == pasts[0] and sum(row.past.chain.seen) > 0 and sum(row.past.tree.right) > 0


def test_a_tree_tells_what_its_first_children_would_have_got() -> None:
    """0, 2 and then 5, the second child of 2, were right. Place 6 is empty."""
    past, parents, tokens = Past(), [-1, -1, 0, 0, 2, 2, -2], [7, 8, 9, 6, 5, 4, 0]
    past.see(TreePolicy(depth=4, nodes=7), 3, tokens, parents, [7, 9, 4])
    assert past.tree == AcceptanceByDepth([1, 1, 1, 0], [1, 1, 1, 1]) and past.chain == AcceptanceByDepth([1, 1, 0], [1, 1, 1])
    past.see(None, 0, [], [], [])
    assert past.chain.seen == [auto.FADE] * 3 and past.tree.seen == [auto.FADE] * 4


@pytest.mark.parametrize(("prior", "known", "weight"), [((), PRIOR * 3, WEIGHT), ((0.9, 0.6), [0.9, 0.6, 0.6], SURE)])
def test_expected_tokens_by_hand(prior: tuple[float, ...], known: list[float], weight: float) -> None:
    """Where the drafter's acceptance was measured, and where it was not. Trees are guessed from chains until some were seen."""
    seen = AcceptanceByDepth()
    seen.learn(3, 3)
    seen.learn(3, 1)
    fade = auto.FADE
    right, asked = [1 + fade, fade, 1], [1 + fade, 1 + fade, 1]  # the third once: the other round ended before it
    mean = sum(known) / 3
    of_all = (sum(right) + weight * mean) / (sum(asked) + weight)
    scaled = [1 - (1 - p) * (1 - of_all) / (1 - mean) for p in known]
    rates = [(r + LEANS * p) / (n + LEANS) for r, n, p in zip(right, asked, scaled, strict=True)]
    past = Past(chain=seen)
    for kind, (first, second, third) in (("chain", rates), ("dynamic", [1 - auto.BRANCHES * (1 - x) for x in rates])):
        expected = [1 + first, 1 + first + first * second, 1 + first + first * second + first * second * third]
        assert past.taus([TreePolicy(kind, depth=d) for d in (1, 2, 3)], prior) == pytest.approx(expected)


def test_shares_beyond_what_a_drafter_can_do_are_not_expected() -> None:
    """Of a drafter whose guesses were always right; and of one whose deeper guesses were often wrong, and now the first ones are."""
    shapes, past = [TreePolicy("chain", depth=d) for d in (1, 2, 3)], Past()
    assert past.taus(shapes, [1.0]) == [2.0, 3.0, 4.0]
    for _ in range(200):
        past.learn(True, 3, 0)
    taus = past.taus(shapes, [0.99, 0.1])
    assert 1 < taus[0] <= taus[1] <= taus[2]


def test_chains_that_were_not_measured_lie_on_lines() -> None:
    shapes = shapes_of(TreePolicy("auto", depth=8, nodes=1), "auto", 0)
    blocks = []

    def block(shape: TreePolicy | None) -> float:
        blocks.append(shape)
        return 2.0 if shape is None else 2.0 + shape.depth**2

    costs = dict(zip((shape.depth for shape in shapes), auto._over_plain(shapes, block), strict=True))
    assert [costs[d] for d in (1, 4, 8)] == [1.5, 9.0, 33.0] and len(blocks) == auto.TURNS * 4
    assert costs[2] == pytest.approx(1.5 + 7.5 / 3) and costs[6] == pytest.approx(21.0)


@pytest.mark.parametrize(("first", "turns"), [(9.0, 2), (8.0, 5)])
def test_shapes_that_cannot_gain_are_measured_twice(first: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 8 that costs 9 rounds yields 9 tokens at most. One that is in doubt in any turn is measured as often as every other."""
    monkeypatch.setattr(auto, "TURNS", 5)
    shapes, longest = shapes_of(TreePolicy("auto", depth=8, nodes=1), "auto", 0), iter([first, 9.0, 9.0, 9.0, 9.0])
    asked = []

    def block(shape: TreePolicy | None) -> float:
        asked.append(shape)
        return 1.0 if shape is None else next(longest) if shape.depth == 8 else 2.0 + shape.depth

    costs = dict(zip((shape.depth for shape in shapes), auto._over_plain(shapes, block), strict=True))
    assert len(asked) == turns * 4 and (costs[1], costs[4], costs[8]) == (3.0, 6.0, 9.0)


def test_putting_sequences_back_is_no_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def run(kind: Any, warp: Any) -> None:
        clock[0] += 1.0 if kind.policy is None else 1.0 + kind.policy.depth

    def put_back() -> None:
        clock[0] += 1000.0

    target = tiny_target()
    device, drafter = torch.device("cpu"), make("eagle", target)
    held = SimpleNamespace(target=target, drafter=drafter, rule="auto", device=device, snapshot=lambda: put_back, run=run)
    monkeypatch.setattr(auto, "clock_of", lambda target: lambda: clock[0])
    kind = rounds.Kind(1, 64, TreePolicy("auto", depth=4, nodes=1), tap=True, likely=0, hold=False)
    drafter.acceptance = {False: [0.9, 0.8], True: [0.5]}
    found = auto.auto_of_rounds(held, kind, LogitsWarper.of([SamplingParams()]))
    assert found.prior == [0.9, 0.8]
    assert dict(zip((shape.depth for shape in found.shapes), found.costs, strict=True)) == {d: 1.0 + d for d in (1, 2, 3, 4)}


def test_where_nothing_gains_it_is_tried_ever_more_rarely() -> None:
    shapes, cost = [TreePolicy("chain", depth=1)], 3.0
    pace, past, tries, rounds = Pace(), Past(), [], 5000
    for i in range(rounds):
        if pace.choose(Auto(shapes, [cost]), [past]) is not None:
            tries.append(i)
            past.learn(True, 1, 0)
    gaps = [b - a for a, b in zip(tries, tries[1:], strict=False)]
    assert len(tries) > 5 and all(b >= a - 1 for a, b in zip(gaps, gaps[1:], strict=False)), "ever worse"
    assert len(tries) * (cost - 1) <= (CREDIT + LOSS * rounds) * 1.05


def test_a_machine_that_slows_down_meanwhile_does_not_change_what_rounds_cost() -> None:
    shapes, speed = shapes_of(TreePolicy("auto", depth=2, nodes=1), "auto", 0), [1.0]

    def block(shape: TreePolicy | None) -> float:
        if shape is None:
            speed[0] *= 3
        return speed[0] * (1.0 if shape is None else 1.5)

    assert auto._over_plain(shapes, block) == [1.5, 1.5]


def test_what_others_run_beside_it_does_not_change_what_rounds_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the first rounds of a turn, which are slow. The very first one tells what it costs the drafter to read a prompt."""

    class Clocks:
        thread_time, perf_counter = (staticmethod(lambda name=name: seconds[name]) for name in ("ran", "passed"))

    def generate(target: Any, proposer: Any, prompt: Any, *, on_tokens: Callable[[list[int]], None], **how: Any) -> None:
        for i in range(12):
            took = (2.0 if proposer is None else 4.0) * (3 if i < 6 else 1)
            if i == 1 and proposer is not None:
                took = 4.0 + 6.0 * len(prompt)
            seconds["ran"] += took
            seconds["passed"] += took + (0.0 if proposer is None else 20.0)  # a longer round has to leave its core to others
            on_tokens([1])

    seconds = {"ran": 0.0, "passed": 0.0}
    for name, value in (("time", Clocks), ("ROUNDS", 10), ("LONG", torch.inf)):
        monkeypatch.setattr(auto, name, value)
    found = auto.auto_of(TreePolicy("auto", depth=2, nodes=1), tiny_target(), Ngram(), SamplingParams(), generate)
    assert found.costs == [2.0, 2.0] and found.reading == pytest.approx(3.0)


def test_trees_are_measured_at_their_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a text without meaning a drafter is unsure, and ``least`` ends trees early there: rounds would look cheaper than they are."""
    target, shapes = TARGET(), list[TreePolicy | None]()

    def watched(*args: Any, **how: Any) -> None:
        shapes.append(how["policy"])
        generate(*args, **how)

    monkeypatch.setattr(auto, "TURNS", 1)
    asked = TreePolicy("auto", depth=4, nodes=15, branch=4, expand=2, least=0.9)
    found = auto.auto_of(asked, target, Drafting(make("eagle", target)), SamplingParams(), watched)
    trees = [shape for shape in shapes if shape is not None and shape.kind == "dynamic"]
    assert [(tree.depth, tree.least) for tree in trees] == [(3, 0.0), (4, 0.0)]
    assert {shape.least for shape in found.shapes if shape.kind == "dynamic"} == {0.9}, "what decodes is as it was asked for"


def test_where_nothing_gains_no_prompt_is_read_for_a_try() -> None:
    shapes = [TreePolicy("chain", depth=1)]
    bad, good = Auto(shapes, [1.6], [0.5], reading=0.02), Auto(shapes, [1.2], [0.9], reading=0.02)
    assert Pace().choose(bad, [Past()], waiting=1) is not None, "a try that costs little"
    assert Pace().choose(bad, [Past()], waiting=100) is None
    assert Pace().choose(good, [Past()], waiting=100) is not None, "what was read soon pays"
    assert (
        Pace().choose(Auto(shapes, [1.45], [0.5]), [Past()]) is not None
        and Pace(credit=0.0).choose(Auto(shapes, [1.45], [0.5]), [Past()]) is None
    ), "a gain within the noise is none"


def test_less_is_risked_for_a_drafter_that_was_measured() -> None:
    shapes = [TreePolicy("chain", depth=1)]  # a try costs 2.5 plain rounds and yields 1.65 tokens
    assert Pace().choose(Auto(shapes, [2.5]), [Past()]) is not None
    assert Pace().choose(Auto(shapes, [2.5], PRIOR), [Past()]) is None


@pytest.mark.parametrize(("kind", "soon"), [(None, False), (True, True), (False, True)])
def test_the_choice_comes_again_soon_where_guesses_were_seen(kind: bool | None, soon: bool) -> None:
    """They fade, so that the next choice may be another one. Where none was seen, only the credit changes."""
    pace, past = Pace(credit=0.0), Past()
    if kind is not None:
        past.learn(kind, 1, 0)
    assert pace.choose(Auto([TreePolicy("chain", depth=1)], [9.0]), [Past(), past]) is None
    assert pace.resting == (auto.PATIENCE - 1 if soon else auto.MOST) and (pace.closed > auto.MOST) != soon


@pytest.mark.parametrize("new_tokens", [20, 60, 100, 140])
@pytest.mark.parametrize("cost", [1.5, 3.6, 9.0])  # a try at once, after some forty rounds, never
def test_what_will_never_draft_stops_keeping_states(
    cost: float, new_tokens: int, measured: Callable[[dict[str, float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounds as if it had kept them to the end; and it keeps them as long as a guess may come."""
    target, prompt, taps = TARGET(), random_tokens(5, seed=2), list[int]()
    measured({f"chain of {d}": cost for d in range(1, 9)})
    drafter, read = make("eagle", target), target.read_rows

    def watched(*given: Any) -> Any:
        taps.append(len(given[-1]))
        return read(*given)

    monkeypatch.setattr(target, "read_rows", watched)
    how: dict[str, Any] = dict(new_tokens=new_tokens, policy=SMALL, stop_ids=())
    found = generate(target, Drafting(drafter), prompt, **how)
    kept, taps[:] = list(taps), []
    with monkeypatch.context() as m:
        m.setattr(Pace, "closed", property(lambda _: 0, lambda *_: None), raising=False)
        whole = generate(target, Drafting(drafter), prompt, **how)
    assert (found.tokens, found.shapes, found.asked) == (whole.tokens, whole.shapes, whole.asked)
    assert set(taps) == {len(drafter.taps)}, "never given up"
    last = max((i for i, asked in enumerate(found.asked, start=1) if asked), default=0)  # pass 0 reads the prompt
    assert all(kept[: last + 1]) and sorted(kept, reverse=True) == kept
    assert any(found.asked) == (cost == 1.5 or (cost == 3.6 and new_tokens > 50))
    if not any(found.asked):
        assert kept[1:] == [0] * (len(kept) - 1), "the first choice says so"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cost", [1.5, 3.6, 9.0])
def test_an_engine_that_will_never_draft_stops_keeping_states(
    cost: float, late: bool, measured: Callable[[dict[str, float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody comes for whom it may. Sequences of any length come at any time, and get the same guesses as if it had kept them."""
    target, taps, choose = TARGET(), list[int](), Engine._choose
    measured({f"chain of {d}": cost for d in range(1, 9)})
    drafter, read = make("eagle", target), target.read_rows
    come = [
        (at, most, SamplingParams(0.9 * (i % 2), seed=i)) for i, (at, most) in enumerate([(0, 50), (3, 20), (30, 100), (60, 5), (80, 60)])
    ]

    def decoded() -> list[Row]:
        own, rows, taps[:] = Engine(target, drafter, sequences=3, max_length=128, plans=SMALL), list[Row](), []
        own.late = late
        for step in range(200):
            for i, (at, most, how) in enumerate(come):
                if at == step:
                    rows.append(own.add_request(random_tokens(5 + i, seed=i), new_tokens=most, sampling=how, stop_ids=()))
            own.step()
        return rows

    def watched(*given: Any) -> Any:
        taps.append(len(given[-1]))
        return read(*given)

    monkeypatch.setattr(target, "read_rows", watched)
    found, kept = decoded(), list(taps)
    monkeypatch.setattr(Engine, "_choose", lambda *given: choose(*given)._replace(tap=True))
    for row, whole in zip(found, decoded(), strict=True):
        assert row.ended == "length" and (row.tokens, row.shapes, row.guesses) == (whole.tokens, whole.shapes, whole.guesses)
    assert all(taps) and len(taps) == len(kept)
    assert any(shape for row in found for shape in row.shapes) == (cost < 9)
    without = len(kept) - len(come)  # all passes but those over prompts
    assert kept.count(0) == without if cost == 9 else 0 < kept.count(0) < without


def test_a_gain_is_taken_and_given_up_with_the_acceptance() -> None:
    shapes = shapes_of(TreePolicy("auto", depth=4, nodes=1), "auto", 0)
    own, pace = Auto(shapes, [1.2, 1.4, 1.6, 1.8]), Pace(credit=0.0)
    good, bad = Past(), Past()
    for _ in range(20):
        good.learn(True, 4, 4)
        bad.learn(True, 4, 0)
    assert pace.choose(own, [good]) == shapes[-1] and pace.choose(own, [bad]) is None
    assert Pace(credit=0.0).choose(own, [good] * 9 + [bad]) == shapes[-1], "what gains over all of them"


@pytest.mark.parametrize("rule", ["auto", "top_plus_one"])
def test_trees_are_of_the_rule_that_verifies_them(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both paths, measurements included. The sequences of an engine may leave the rule to it."""
    monkeypatch.setattr(auto, "KNOWN", WeakKeyDictionary())
    monkeypatch.setattr(auto, "_over_plain", lambda shapes, block: [9.0 if shape.kind == "chain" else 1.01 for shape in shapes])
    target, prompt, warm = TARGET(), random_tokens(5, seed=2), {"auto": "fixed", "top_plus_one": "dynamic"}[rule]
    drafter, how = make("eagle", target), SamplingParams(1.0, rule=rule)
    alone = generate(target, Drafting(drafter), prompt, new_tokens=auto.WORTH, policy=AUTO, sampling=how, stop_ids=())
    own = Engine(target, drafter, sequences=1, max_length=64, plans=AUTO, rule=rule)
    rows = [own.run([prompt], new_tokens=auto.WORTH + 8, sampling=[each], stop_ids=())[0] for each in (how, SamplingParams(1.0))]
    for made in (alone, *rows):
        assert {shape.kind for shape in made.shapes if shape is not None} == {warm}
    measured = AUTO, rule, {"auto": 2, "top_plus_one": 1}[rule]  # once for all temperatures whose shapes are the same
    assert known_of(target, drafter).keys() == {measured, (*measured, 1)}
    assert auto.found_of(target, drafter, AUTO, how) is known_of(target, drafter)[measured]
    assert (auto.found_of(target, drafter, AUTO, replace(how, temperature=0.1)) is None) == (rule == "auto")
    assert auto.found_of(target, drafter, AUTO, SamplingParams(1.0, rule="block")) is None


@pytest.mark.parametrize("rule", ["auto", *RULES])
def test_one_measurement_is_for_all_temperatures_of_the_same_shapes(rule: str) -> None:
    for a, b in product(range(3), repeat=2):
        alike = shapes_of(AUTO, rule, a) == shapes_of(AUTO, rule, b) and (a > 0) == (b > 0)  # guesses are drawn at both, or at neither
        assert (costs_as(rule, a) == costs_as(rule, b)) == alike


def test_nothing_is_measured_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(auto, "_over_plain", measure)
    target, prompt = TARGET(), random_tokens(5, seed=2)
    drafter = make("eagle", target, noise=0.2)
    made = generate(target, Drafting(drafter), prompt, new_tokens=auto.WORTH - 1, policy=AUTO)
    assert made.shapes and set(made.shapes) == {None} and not known_of(target, drafter)
    Engine(target, drafter, sequences=2, max_length=64, plans=AUTO).run(
        [prompt] * 2, new_tokens=auto.WORTH - 1, sampling=[SamplingParams()] * 2
    )
    with pytest.raises(AssertionError, match="measured"):
        generate(target, Drafting(drafter), prompt, new_tokens=auto.WORTH, policy=AUTO)


def test_processes_that_share_a_target_measure_by_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "sharded", True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda seconds, source: seconds.fill_(9.0 if source == 0 else 0.0))
    assert auto.clock_of(TARGET())() == 9.0


def test_the_settings_say_what_the_code_takes_where_nobody_asks() -> None:
    settings: Any = OmegaConf.load(Path(__file__).parents[3] / "conf/decode/auto.yaml")
    assert TreePolicy(**{k: settings[k] for k in ("kind", "depth", "nodes", "branch", "expand", "least")}) == AUTO


def test_rows_come_and_go_while_little_is_drafted(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the drafter is absorbed for those who are there; what ended waits no more. Dear guesses make many wait."""
    measured({})
    target = TARGET()
    own = Engine(target, make("eagle", target), sequences=4, max_length=96, plans=SMALL)
    prompts, dice, live = [random_tokens(4 + s, seed=s) for s in range(12)], random.Random(0), []
    for step in range(150):
        while own.free and dice.random() < 0.4:
            live.append(own.add_request(dice.choice(prompts), new_tokens=dice.randint(1, 40), stop_ids=()))
        if live and dice.random() < 0.1:
            own.drop(live.pop(dice.randrange(len(live))))
        own.step()
        unused = [i for i, row in enumerate(own.places) if row is None]
        assert not own.rounds.waiting_B[unused].any(), step
    for row in (row for row in live if row.ended == "length"):
        assert row.tokens == generate(target, None, row.prompt, new_tokens=row.most, stop_ids=()).tokens


def test_a_server_measures_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs too: whoever comes and goes, greedy or sampled, nobody waits for another's measurement."""
    monkeypatch.setattr(auto, "KNOWN", WeakKeyDictionary())
    monkeypatch.setattr(auto, "ROUNDS", 2)
    target = TARGET()
    drafter = make("eagle", target)
    own = Engine(target, drafter, sequences=3, max_length=96, plans=SMALL)
    own.warm_up()
    measured = {(SMALL, "auto", heat, n) for n in (1, 2, 3) for heat in (0, 1, 2)}
    assert own.rounds.graphs is None and known_of(target, drafter).keys() == measured
    each = [SamplingParams((0, 1, 0.3)[i % 3], top_k=5 * (i > 2)) for i in range(6)]
    own.run([random_tokens(4 + s, seed=s) for s in range(6)], new_tokens=auto.WORTH + 6, sampling=each)
    assert known_of(target, drafter).keys() == measured and own.preparations == 0
