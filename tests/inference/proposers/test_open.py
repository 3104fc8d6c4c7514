"""From settings to proposers: all that conf/decode has, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.cascade import Cascade
from headstart.inference.proposers.hybrid import Hybrid
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.proposers.open import KEYS, open_proposer
from headstart.inference.proposers.union import Union
from headstart.inference.settings import open_decode, open_guesser
from headstart.inference.speculator import open_speculator
from tests.drafters import HEADS, make
from tests.inference.decoding.test_lossless import PROMPTS, TARGET, plain
from tests.inference.proposers.common import lm_of
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import save_target

CONF = Path(__file__).resolve().parents[3] / "conf" / "decode"
CHOICES = {p.stem: OmegaConf.to_container(OmegaConf.load(p)) for p in sorted(CONF.glob("*.yaml"))}
SETTINGS: dict[str, Any] = {name: found["proposer"] for name, found in CHOICES.items() if "proposer" in found}  # type: ignore[call-overload,index]


@pytest.mark.parametrize("choice", SETTINGS)
def test_every_choice_decodes(choice: str) -> None:
    target = TARGET("llama")
    proposer = open_proposer(SETTINGS[choice], target, lm_of(target, 0.02))
    chain = "chain" in CHOICES[choice].get("defaults", [])  # type: ignore[union-attr]
    policy = TreePolicy("chain", depth=3) if chain else TreePolicy(depth=3, nodes=8, branch=2)
    result = generate(target, proposer, PROMPTS[0], new_tokens=12, policy=policy)
    assert result.tokens == list(plain("llama", 0)[:12])
    settings = SETTINGS[choice]
    if choice in KEYS and choice not in ("union", "hybrid", "cascade", "pipelined"):  # all that it can be told is there to be changed
        assert settings.keys() >= set(KEYS[choice]) - {"places"} | {"kind"}


def test_settings_nest() -> None:
    target, drafter = TARGET("llama"), lm_of(TARGET("llama"), 0.02)
    inner = {
        "kind": "hybrid",
        "lookup": {"kind": "ngram", "most": 5},
        "match": 5,
        "otherwise": {"kind": "cascade", "small": {"kind": "suffix"}},
    }
    found = open_proposer({"kind": "union", "parts": [{"kind": "early_exit", "layers": 2}, inner]}, target, drafter)
    assert isinstance(found, Union) and isinstance(hybrid := found.parts[1], Hybrid)
    assert isinstance(hybrid.lookup, Ngram) and hybrid.lookup.most == hybrid.match == 5
    assert isinstance(hybrid.otherwise, Cascade) and hybrid.otherwise.drafter is drafter


def test_drafters_come_from_their_folders(tmp_path: Path) -> None:
    target, drafter = TARGET("llama"), lm_of(TARGET("llama"), 0.02)
    hub.save(drafter, tmp_path / "middle", target.card, torch.float32)
    found = open_proposer({"kind": "drafter", "folder": str(tmp_path / "middle")}, target)
    assert isinstance(found, Drafting) and found.drafter is not drafter
    cascade = open_proposer({"kind": "cascade", "small": {"kind": "drafter", "folder": str(tmp_path / "middle")}}, target, drafter)
    assert isinstance(cascade, Cascade) and cascade.drafter is drafter and isinstance(cascade.small, Cascade)
    result = generate(target, cascade, PROMPTS[0], new_tokens=12, policy=TreePolicy("chain", depth=4))
    assert result.tokens == list(plain("llama", 0)[:12]) and result.accepted_length > 1.5
    with pytest.raises(UserError, match=str(tmp_path / "nowhere")):
        open_proposer({"kind": "union", "parts": [{"kind": "drafter", "folder": str(tmp_path / "nowhere")}]}, target)


def test_any_language_model_of_the_targets_tokenizer_drafts(tmp_path: Path) -> None:
    """An ordinary folder, sharded too: as the drafter, elsewhere, and as the middle and the end of a cascade of three."""
    target = Target.load(str(save_target(tmp_path / "target")), dtype="float32", device="cpu")
    middle, small = tmp_path / "middle", save_target(tmp_path / "small", num_hidden_layers=2)
    target.tokenizer.save_pretrained(middle)
    target.model.save_pretrained(middle, max_shard_size="50KB")  # agrees with the target
    assert (middle / "model.safetensors.index.json").is_file() and not (middle / "model.safetensors").exists()
    target.prepack()
    decode = open_decode({**CHOICES["auto"], "kind": "dynamic", "depth": 4})  # type: ignore[dict-item]
    drafter, none, _ = open_guesser(decode, str(middle), target)
    _, away, _ = open_guesser(decode, str(middle), target, elsewhere="cpu")
    assert isinstance(drafter, Drafter) and none is None and away is not None and not drafter.training
    inner = {"kind": "cascade", "folder": str(middle), "small": {"kind": "drafter", "folder": str(small)}}
    for prompt in ([5, 6, 7, 8], [9]):
        said = generate(target, None, prompt, new_tokens=20).tokens
        for proposer in (Drafting(drafter), away, open_proposer({"kind": "drafter", "folder": str(small)}, target)):
            assert generate(target, proposer, prompt, new_tokens=20, policy=decode.policy).tokens == said
        cascade = generate(target, open_proposer(inner, target), prompt, new_tokens=20, policy=TreePolicy("chain", depth=4))
        assert cascade.tokens == said and cascade.accepted_length > 2


def test_a_language_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = Target.load(str(save_target(tmp_path / "target")), dtype="float32", device="cpu")
    larger = save_target(tmp_path / "larger", vocab_size=400)
    (larger / "tokenizer.json").unlink()  # so that nothing says whether its tokens are the target's
    with pytest.raises(UserError, match=r"larger cannot be the draft model of .*a vocabulary of 400, the target 320"):
        open_speculator(larger, target)
    other = save_target(tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"<end>"', '"<stop>"'))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (other / name).is_file():
            (other / name).write_text((other / name).read_text().replace('"<end>"', '"<stop>"'))
    with pytest.raises(
        UserError, match=r"other cannot be the draft model of .*another vocabulary \('<.*in the target's\): take a model of"
    ):
        open_proposer({"kind": "cascade", "folder": str(other)}, target)


@pytest.mark.parametrize("head", HEADS)
def test_a_drafter_is_asked_no_deeper_than_it_can_guess(head: str) -> None:
    target = TARGET("llama")
    proposer = open_proposer({"kind": "union", "parts": [{"kind": "ngram"}, {"kind": "drafter"}]}, target, make(head, target))
    result = generate(target, proposer, PROMPTS[1], new_tokens=12, policy=TreePolicy(depth=9, nodes=12, branch=2))
    assert result.tokens == list(plain("llama", 1)[:12])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "ngrm"}, "proposer: there is no kind 'ngrm' (did you mean ngram?): choose one of drafter, "),
        ({"kind": "swift", "skp": 0.5}, "proposer: kind swift has no key 'skp' (did you mean skip?): it has skip, search, window, seed"),
        (
            {"kind": "union", "parts": [{"kind": "ngram"}, {"kind": "sufix"}]},
            "proposer.parts[1]: there is no kind 'sufix' (did you mean suffix?)",
        ),
        ({"kind": "union", "parts": {"kind": "ngram"}}, "proposer.parts must be a list of proposers"),
        (
            {"kind": "union", "parts": ["ngram"]},
            "proposer.parts[0] must be a dictionary with a kind, {kind: ngram} for example, found 'ngram'",
        ),
        ({"kind": "hybrid", "lookup": {"kind": "swift"}}, "proposer.lookup: kind must be ngram, suffix here, found 'swift'"),
        (
            {"kind": "cascade", "small": {"kind": "early_exit"}},
            "proposer.small: kind must be ngram, suffix, cascade, drafter here, found 'early_exit'",
        ),
        ({"kind": "hybrid", "otherwise": {"kind": "suffix", "least": 0}}, "least must be a whole number of at least 1, found 0"),
        ({"kind": ["ngram"]}, "there is no kind ['ngram']"),
        ({"most": 3}, "proposer must be a dictionary with a kind"),
        ("ngram", "proposer must be a dictionary with a kind"),
    ],
)
def test_wrong_settings_are_one_line(settings: Any, words: str) -> None:
    target = TARGET("llama")
    with pytest.raises(UserError) as error:
        open_proposer(settings, target, lm_of(target, 0.0))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["drafter", "cascade", "union", "hybrid", "pipelined"])
def test_a_drafter_that_is_not_there_or_says_other_tokens_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=r"which drafter\? Give speculator=DIR"):
        open_proposer({"kind": kind}, TARGET("llama"))
    with pytest.raises(UserError, match="the drafter has a vocabulary of 80, llama of 96"):
        open_proposer({"kind": kind}, TARGET("llama"), lm_of(tiny_target("llama", vocab_size=80), 0.0))
