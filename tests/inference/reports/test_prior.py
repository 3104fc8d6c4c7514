"""acceptance.json: what a folder says of its own weights, and what decode=auto makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import Auto, Pace, Past, auto_of, known_of
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import AUTO, TreePolicy, shapes_of
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports import prior
from headstart.inference.reports.walk import Walk
from headstart.inference.speculator import open_speculator
from tests.drafters import make, random_tokens
from tests.tiny_targets import tiny_target

ASSETS = Path(__file__).parents[3] / "assets"
SHARES = {False: [0.9, 0.8], True: [0.5, 0.4]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tiny_target()
    hub.save(make("eagle", target), tmp_path / "speculator", target.card, torch.float32)
    return tmp_path / "speculator"


def test_what_was_written_is_read_and_belongs_to_the_weights(folder: Path) -> None:
    assert prior.read(folder) == {}
    prior.write(folder, SHARES)
    assert prior.read(folder) == SHARES and open_speculator(folder, tiny_target()).acceptance == SHARES
    target = tiny_target()
    hub.save(make("eagle", target, noise=0.2), folder.with_name("other"), target.card, torch.float32)
    (folder.with_name("other") / prior.NAME).write_bytes((folder / prior.NAME).read_bytes())
    assert prior.read(folder.with_name("other")) == {}, "of other weights"


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "{",
        "[" * 100_000,
        '{"weights": WEIGHTS}',
        '{"weights": WEIGHTS, "temperature_0": [0.5], "temperature_1": [1.5]}',
        '{"weights": WEIGHTS, "temperature_0": [], "temperature_1": [0.5]}',
        '{"weights": WEIGHTS, "temperature_0": [0.5], "temperature_1": "x"}',
    ],
)
def test_a_damaged_file_is_named(folder: Path, wrong: str) -> None:
    prior.write(folder, SHARES)
    weights = json.loads((folder / prior.NAME).read_text())["weights"]
    (folder / prior.NAME).write_text(wrong.replace("WEIGHTS", json.dumps(weights)))
    with pytest.raises(UserError, match=prior.NAME):
        prior.read(folder)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    prior.write(tmp_path, SHARES)
    assert not (tmp_path / prior.NAME).exists()


def test_texts_that_end_at_once_say_nothing_of_a_drafter(folder: Path) -> None:
    """Else it would be known never to guess right."""
    target = tiny_target()
    target.model.generation_config.eos_token_id = [*range(target.shape.vocab_size)]
    shares = prior.measure(target, make("eagle", target), [random_tokens(9, seed=0)])
    prior.write(folder, shares)
    assert shares == {} and prior.read(folder) == {}
    prior.write(folder, {False: [0.5]})  # what was measured at one temperature alone could not be read
    assert prior.read(folder) == {}


@torch.no_grad()
@pytest.mark.slow
def test_shares_are_those_that_decoding_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 of long texts: the walk goes where decoding goes, so it counts the same guesses."""
    monkeypatch.setattr(prior, "PROMPTS", 4)
    target = Target.load(str(ASSETS / "tiny"), dtype="float32", device="cpu")
    drafter = open_speculator(ASSETS / "tiny_eagle", target)
    prompts = [random_tokens(9, seed=s) for s in range(prior.PROMPTS)]
    tried, right = [0] * prior.DEPTH, [0] * prior.DEPTH
    chain = TreePolicy("chain", depth=prior.DEPTH)
    for prompt in prompts:
        made = generate(target, Drafting(drafter), prompt, new_tokens=prior.NEW_TOKENS, policy=chain)
        for emitted, asked in zip(made.emitted, made.asked, strict=True):
            for d in range(min(asked, emitted)):
                tried[d] += 1
                right[d] += emitted - 1 > d
    overall = sum(right) / sum(tried)
    expected = [(r + prior.FEW * overall) / (n + prior.FEW) for r, n in zip(right, tried, strict=True)]
    assert sum(right) > 50
    assert prior.measure(target, drafter, prompts)[False] == pytest.approx(expected, abs=0.05)  # rounds that the end cuts are counted apart


def test_auto_begins_with_what_the_folder_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = shapes_of(TreePolicy("auto", depth=8, nodes=1), "auto", 0)
    costs = [1.6 + 0.2 * shape.depth for shape in shapes]

    def first(shares: list[float]) -> TreePolicy | None:
        return Pace(credit=0.0).choose(Auto(shapes, costs, shares), [Past()])

    assert first([0.95] * 8) == shapes[-1] and first([0.3]) is None
    target = tiny_target()
    drafter = make("eagle", target)
    drafter.acceptance = SHARES
    monkeypatch.setattr("headstart.inference.decoding.auto._over_plain", lambda shapes, block: [1.0] * len(shapes))
    for sampled in (False, True):
        assert auto_of(AUTO, target, Drafting(drafter), SamplingParams(float(sampled)), generate).prior == SHARES[sampled]
    assert known_of(target, drafter)


def test_shares_are_smoothed_sums_over_the_first_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each temperature by itself, over texts that the target said at it, as long as its context allows."""
    target, prompts = tiny_target(), [random_tokens(n, seed=n) for n in (230, 9, 5)]
    monkeypatch.setattr(prior, "PROMPTS", 2)
    walked = list[tuple[float, list[int], int]]()

    def walk(_: Target, __: object, prompt: list[int], said: list[int], depth: int, how: SamplingParams) -> Walk:
        assert list(said) == generate(target, None, prompt, new_tokens=len(said), sampling=how).tokens and depth == 2
        walked.append((how.temperature, list(prompt), len(said)))
        return Walk(10.0, 12.0, [6.0, 1.0], [9.0, 4.0]) if how.temperature else Walk(10.0, 20.0, [8.0, 6.0], [10.0, 8.0])

    monkeypatch.setattr(prior, "DEPTH", 2)
    monkeypatch.setattr(prior, "expected_walk", walk)
    found = prior.measure(target, make("eagle", target), prompts)
    assert walked == [(t, prompt, min(128, 256 - len(prompt))) for t in (0.0, 1.0) for prompt in prompts[:2]]
    cold, warm = 28 / 36, 14 / 26  # four guesses more at each depth, right at the share over all depths
    assert found[False] == pytest.approx([(16 + 4 * cold) / 24, (12 + 4 * cold) / 20])
    assert found[True] == pytest.approx([(12 + 4 * warm) / 22, (2 + 4 * warm) / 12])
