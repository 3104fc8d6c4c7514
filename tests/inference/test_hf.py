"""By transformers' conventions: the same sequences as ``model.generate``, by either door, or a refusal that names the setting."""

from __future__ import annotations

import copy
import functools
import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, GenerationConfig, TextStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList, StopStringCriteria

from headstart.heads import hub
from headstart.heads.base import Roots
from headstart.heads.errors import UserError, warn_once
from headstart.inference import hf
from headstart.inference.decoding import decode
from headstart.inference.decoding import decoder as decoder_module
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.plans import MANY
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.hf import generate, speculate
from headstart.inference.provenance import machine
from headstart.inference.serving.hf_asked import HARMLESS, HONOURED, OFF, PROCESSED
from tests.drafters import FEW_HEADS, make
from tests.inference.serving.calls import NEW, PAD, PROMPTS, both_doors, padded, some_ends, target_of, tokenizer, trained
from tests.tiny_targets import tiny_target

POLICIES = {"dynamic": TreePolicy(depth=3, nodes=8, branch=3), "chain": TreePolicy("chain", depth=3)}

# ---- the same sequences ----


@functools.cache
def cases() -> list[tuple[dict[str, Tensor], dict[str, Any], Tensor]]:
    """Inputs, settings, and what the model says by itself."""
    model, ends, one, several = target_of().model, some_ends(), padded(PROMPTS[:1]), padded(PROMPTS)
    early, other = {"eos_token_id": ends}, {"eos_token_id": ends[0], "pad_token_id": 7}
    asked = [
        (x, {"max_new_tokens": NEW, "pad_token_id": PAD, **how}) for x, how in ((one, {}), (one, early), (several, early), (several, other))
    ]
    return [(inputs, how, model.generate(**inputs, **how)) for inputs, how in asked]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("head", FEW_HEADS)
def test_greedy_equals_generate(head: str, policy: str) -> None:
    model, drafter, tree = target_of().model, trained(head), POLICIES[policy]
    for inputs, how, expected in cases():
        found = generate(model, drafter, policy=tree, **inputs, **how)
        assert found.dtype == torch.int64 and torch.equal(found, expected), how
    found = model.generate(**inputs, **how, custom_generate=speculate(drafter, policy=tree))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("several", [False, True])
def test_threads_take_turns(several: bool) -> None:
    """They share the decoder that is kept with the model. Its first call comes from all of them at once."""
    model, inputs = copy.deepcopy(target_of().model), padded(PROMPTS if several else PROMPTS[:1])
    how = {"max_new_tokens": NEW, "pad_token_id": PAD}
    expected = target_of().model.generate(**inputs, **how)

    def call(_: int) -> Tensor:
        found: Tensor = generate(model, trained("eagle"), policy=POLICIES["chain"], **inputs, **how)
        return found

    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(call, range(6), timeout=60):
            assert torch.equal(found, expected)


def test_a_first_call_says_that_it_measures(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only where the shapes are chosen in every round, for answers that are worth it."""
    monkeypatch.setattr(hf, "WORTH", NEW)
    warn_once.cache_clear()
    for policy, new, says in ((POLICIES["chain"], NEW, 0), (None, NEW - 1, 0), (None, NEW, 1), (None, NEW, 1)):
        generate(target_of().model, trained("eagle"), policy=policy, max_new_tokens=new, pad_token_id=PAD, **padded(PROMPTS[:1]))
        assert caplog.text.count("measures what rounds cost") == says


def test_a_penalty_does_not_hold_padding_against_a_sequence() -> None:
    """transformers counts padding as said; here a batch says what its sequences say alone."""
    model, how = target_of().model, {"max_new_tokens": NEW, "repetition_penalty": 1.4}
    alone = [model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in PROMPTS]
    assert any(PAD in said for said in alone), "no sequence says the padding token: this tests nothing"
    for found in both_doors(model, trained("eagle"), padded(PROMPTS), pad_token_id=PAD, **how):
        assert found[:, 17:].tolist() == alone


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_greedy_equals_generate_past_a_sliding_window(architecture: str) -> None:
    model, inputs = target_of(architecture).model, padded(PROMPTS)
    expected = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=PAD)
    for drafter in (None, make("mtp", target_of(architecture))):
        for found in both_doors(model, drafter, inputs, max_new_tokens=NEW, pad_token_id=PAD):
            assert torch.equal(found, expected)


def test_lengths_and_defaults_are_transformers_own() -> None:
    model, drafter, inputs = target_of().model, trained("eagle"), padded(PROMPTS)
    for how in ({}, {"max_length": 20}, {"max_new_tokens": 1}, {"max_length": 30, "num_return_sequences": 1}):
        expected = model.generate(**inputs, **how)
        assert all(torch.equal(found, expected) for found in both_doors(model, drafter, inputs, **how)), how
    config = GenerationConfig(max_new_tokens=5, eos_token_id=some_ends(), pad_token_id=PAD)
    expected = model.generate(**inputs, generation_config=config)
    assert torch.equal(generate(model, drafter, inputs["input_ids"], config, attention_mask=inputs["attention_mask"]), expected)
    assert config.max_new_tokens == 5
    # no pad token is given: the first stop token serves, and the mask is read off nothing
    ids = inputs["input_ids"][:2, -9:]
    expected = model.generate(ids, max_new_tokens=NEW, eos_token_id=some_ends(), pad_token_id=None)
    assert torch.equal(generate(model, drafter, ids, max_new_tokens=NEW, eos_token_id=some_ends(), pad_token_id=None), expected)


def test_ends_of_ones_own_are_padded_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the config's own pad or end, not by the token that the criterion looks for."""
    monkeypatch.setattr(target_of().model.generation_config, "pad_token_id", None)
    model, drafter, ids, own = target_of().model, trained("eagle"), torch.tensor([p[-9:] for p in (PROMPTS[0], PROMPTS[1])]), some_ends()
    said = model.generate(ids, max_new_tokens=NEW)[:, 9:].tolist()
    end = next(token for token in said[0][:-1] if token not in said[1])  # ends one of the two early
    for how in ({"eos_token_id": 5}, {"eos_token_id": [5, 6]}, {"eos_token_id": own, "pad_token_id": 7}, {"pad_token_id": 7}):
        how |= {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(end)])}
        expected = model.generate(ids, max_new_tokens=NEW, **how)
        assert all(torch.equal(found, expected) for found in both_doors(model, drafter, {"input_ids": ids}, max_new_tokens=NEW, **how)), how
    with pytest.raises(UserError, match="end at different lengths: give pad_token_id"):
        generate(model, drafter, ids, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([EosTokenCriteria(end)]))


def test_a_dictionary_where_one_is_asked_for() -> None:
    model, ids = target_of().model, torch.tensor(PROMPTS[:1])
    expected = model.generate(ids, max_new_tokens=NEW, return_dict_in_generate=True)
    for found in both_doors(model, trained("eagle"), {"input_ids": ids}, max_new_tokens=NEW, return_dict_in_generate=True):
        assert type(found) is type(expected) and torch.equal(found.sequences, expected.sequences)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_target().model.requires_grad_(True)
    generate(model, None, torch.tensor(PROMPTS[:1]), max_new_tokens=2)
    assert all(p.requires_grad for p in model.parameters())


# ---- who guesses ----


class Knowing:
    """A proposer that guesses what it was told."""

    taps = ()

    def __init__(self, text: list[int]) -> None:
        self.text, self.told, self.rounds = text, 0, 0

    def start(self, context: Context, tokens: int) -> None:
        self.told = 0

    def absorb(self, roots: Roots) -> None:
        self.told = int(roots.positions_BT[0, -1]) + 2  # with the chosen token

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        guesses = self.text[self.told : self.told + policy.depth]
        self.rounds += 1
        return Tree.of(guesses, list(range(-1, len(guesses) - 1)))


def test_every_kind_of_guesser(tmp_path: Path) -> None:
    target = target_of()
    model, inputs, how = target.model, padded(PROMPTS), {"max_new_tokens": NEW, "pad_token_id": PAD}
    expected = model.generate(**inputs, **how)
    whose = Target(model, tokenizer())
    hub.save(trained("eagle"), tmp_path / "folder", whose.card, torch.float32)
    for drafter in (None, trained("eagle"), str(tmp_path / "folder"), tmp_path / "folder", Knowing(expected[1].tolist())):
        assert all(torch.equal(found, expected) for found in both_doors(model, drafter, inputs, **how)), drafter
    knowing = Knowing(expected[1].tolist())
    generate(model, knowing, torch.tensor(PROMPTS[1:2]), policy=TreePolicy(), **how)
    assert knowing.rounds == -(-(NEW - 1) // 6)  # six tokens a round: it was believed
    assert torch.equal(generate(model, tmp_path / "folder", tokenizer=tokenizer(), **inputs, **how), expected)
    own = tokenizer()
    tokenizer_of_another = type(own)(tokenizer_object=type(own.backend_tokenizer).from_str(own.backend_tokenizer.to_str()))
    tokenizer_of_another.add_tokens(["another"])
    with pytest.raises(UserError, match="was trained for another target: tokenizer is"):
        generate(model, tmp_path / "folder", tokenizer=tokenizer_of_another, **inputs, **how)


def test_a_folder_that_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for, its decode.json says which tree at how many sequences, and where there is none."""
    target, how = target_of(), {"max_new_tokens": NEW, "pad_token_id": PAD}
    hub.save(trained("eagle"), tmp_path, target.card | {"tokenizer": "none"}, torch.float32)
    two, three = (asdict(TreePolicy("chain", depth=depth)) for depth in (2, 3))
    plans = {"alone": {"tree": two}, "2": {"tree": three}, "8": {"tree": None}}
    (tmp_path / "decode.json").write_text(json.dumps({"device": machine(target.device), "dtype": "float32", "plans": plans}))
    used: list[Any] = []
    alone, several = decode.generate, Decoder.held
    monkeypatch.setattr(decode, "generate", lambda *a, **k: used.append(k["policy"].depth) or alone(*a, **k))
    monkeypatch.setattr(Decoder, "held", lambda self, rows, max_length, plans: used.append(plans) or several(self, rows, max_length, plans))
    for rows in (1, 2, 4):
        some = padded(PROMPTS[:rows])
        assert torch.equal(generate(target.model, tmp_path, **some, **how, policy="tuned"), target.model.generate(**some, **how))
    assert used[0] == 2 and [list(p) for p in used[1:]] == [[2, 8, MANY]] * 2 and used[1][2].depth == 3 and used[1][8] is None
    generate(target.model, tmp_path, **padded(PROMPTS[:1]), policy=TreePolicy(depth=4), **how)
    assert used[-1] == 4
    plans["alone"]["tree"] = None
    (tmp_path / "decode.json").write_text(json.dumps({"device": machine(target.device), "dtype": "float32", "plans": plans}))
    monkeypatch.setattr(decode, "generate", lambda t, proposer, *a, **k: used.append(proposer) or alone(t, proposer, *a, **k))
    assert torch.equal(
        generate(target.model, tmp_path, **padded(PROMPTS[:1]), **how, policy="tuned"), target.model.generate(**padded(PROMPTS[:1]), **how)
    )
    assert used[-1] is None


@pytest.mark.slow
def test_what_decodes_is_kept_between_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where one prompt goes through an engine too: nothing is built again for the same model, drafter and trees."""
    monkeypatch.setattr(decoder_module, "BY_ENGINE", ("cpu",))
    made, init = list[weakref.ref[Engine]](), Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *a, **k: made.append(weakref.ref(self)) or init(self, *a, **k))
    monkeypatch.setattr(decode, "generate", lambda *a, **k: pytest.fail("the slow path"))

    def calls() -> None:
        model, how, drafter = (
            copy.deepcopy(target_of().model),
            {"max_new_tokens": NEW, "pad_token_id": PAD},
            copy.deepcopy(trained("eagle")),
        )
        hub.save(drafter, tmp_path, target_of().card | {"tokenizer": "none"}, torch.float32)

        def engines(guesser: Any, prompts: list[list[int]]) -> int:
            before, inputs = len(made), padded(prompts)
            found = generate(model, guesser, policy=POLICIES["chain"], **inputs, **how)
            assert torch.equal(found, target_of().model.generate(**inputs, **how))
            return len(made) - before

        assert [engines(drafter, [p]) for p in PROMPTS] == [1, 0, 0, 0]
        assert [engines(drafter, PROMPTS[:n]) for n in (3, 2, 1, 3)] == [1, 0, 0, 0]  # more rows than there were; then no more
        assert [engines(drafter.train(), PROMPTS[:1]) for _ in range(2)] == [0, 0] and not drafter.training
        assert [engines(guesser, PROMPTS[:1]) for guesser in (None, None, drafter, tmp_path, tmp_path, str(tmp_path))] == [1, 0, 1, 1, 0, 0]
        assert sum(there() is not None for there in made) == 1
        hub.save(drafter, tmp_path, target_of().card | {"tokenizer": "none"}, torch.float32)  # another export
        assert [engines(tmp_path, PROMPTS[:1]) for _ in range(2)] == [1, 0]
        assert engines(drafter, PROMPTS[:1]) == 1
        drafter.load_state_dict(
            {name: w.clone() for name, w in drafter.state_dict().items()}, assign=True
        )  # graphs would read the old ones
        assert [engines(drafter, PROMPTS[:1]) for _ in range(2)] == [1, 0]
        drafter.attach(target_of().ends)  # it was used with another model
        assert [engines(drafter, PROMPTS[:1]) for _ in range(2)] == [1, 0]
        assert vars(copy.deepcopy(model))[hf.KEPT].decoder is None
        before, loop = len(made), speculate(drafter, policy=POLICIES["chain"])
        for _ in range(3):
            model.generate(**padded(PROMPTS[:1]), **how, custom_generate=loop)
        assert len(made) == before, "it is that of generate"
        for count, guesser in (
            (1, tmp_path),
            (1, tmp_path),
            (1, loop),
            (2, None),
        ):  # made anew in each call, but for one that holds its own
            custom = guesser if guesser is loop else speculate(guesser, policy=POLICIES["chain"])
            model.generate(**padded(PROMPTS[:1]), **how, custom_generate=custom)
            assert len(made) == before + count

    calls()
    gc.collect()
    assert not any(there() for there in made), "it goes with the model and the drafter"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_what_was_prepacked_is_kept_too() -> None:
    layer = torch.nn.Linear(8, 8).requires_grad_(False)
    layer.weight = torch.nn.Parameter(layer.weight.to_mkldnn(), requires_grad=False)
    assert hf._places(layer) == [0, layer.bias.data_ptr()]


def test_a_model_with_another_head_is_another_model() -> None:
    model, how = copy.deepcopy(target_of().model), {"max_new_tokens": NEW, "pad_token_id": PAD}
    inputs = padded(PROMPTS[:1])
    before = generate(model, None, **inputs, **how)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.randn(model.config.vocab_size, model.config.hidden_size))
    after = generate(model, None, **inputs, **how)
    assert torch.equal(after, model.generate(**inputs, **how)) and not torch.equal(after, before)


def test_a_drafter_of_another_model() -> None:
    other = tiny_target(vocab_size=80).model
    with pytest.raises(UserError, match="the drafter was trained for another target: vocab_size is 80 here, 96 in training"):
        generate(other, make("mtp", tiny_target()), torch.tensor(PROMPTS[:1]) % 80, max_new_tokens=4)
    with pytest.raises(UserError, match=r"the drafter is in torch\.float64, the model in torch\.float32: drafter\.to"):
        generate(target_of().model, make("mtp", target_of()).double(), torch.tensor(PROMPTS[:1]), max_new_tokens=4)


# ---- stop strings and streams ----


def test_stop_strings_across_accepted_runs() -> None:
    model, inputs = target_of().model, padded(PROMPTS)
    said = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=PAD)
    for first in (3, 10):
        text = tokenizer().decode(said[1, 17 + first : 17 + first + 3])  # across three tokens
        for rows in (slice(1, 2), slice(0, 4)):
            some = {name: x[rows] for name, x in inputs.items()}
            how = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": int(said[0, -2])}
            expected = model.generate(**some, stop_strings=[text, "never said"], tokenizer=tokenizer(), **how)
            assert expected.shape[1] <= 17 + first + 3 or rows != slice(1, 2)
            for drafter in (trained("eagle"), Knowing(said[1, : 17 + NEW].tolist())):
                assert torch.equal(
                    generate(model, drafter, **some, stop_strings=[text, "never said"], tokenizer=tokenizer(), **how), expected
                )
                criteria = [StopStringCriteria(tokenizer(), [text])]
                found = model.generate(**some, stopping_criteria=criteria, custom_generate=speculate(drafter), **how)
                assert torch.equal(found, expected)
            config = GenerationConfig(stop_strings=text, **how)
            found = generate(model, None, some["input_ids"], config, attention_mask=some["attention_mask"], tokenizer=tokenizer())
            assert torch.equal(found, expected) and config.stop_strings == text
    with pytest.raises(UserError, match="stop_strings need the tokenizer"):
        generate(model, None, **inputs, stop_strings="x")


class Told(TextStreamer):
    def __init__(self, tokenizer: Any, **how: Any) -> None:
        super().__init__(tokenizer, **how)
        self.said, self.puts = [], []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.said.append(text + ("<end>" if stream_end else ""))


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_is_told_what_transformers_would_tell_it(skip_prompt: bool) -> None:
    model, ids = target_of().model, torch.tensor(PROMPTS[1:2])
    theirs, ours, by_hand = (Told(tokenizer(), skip_prompt=skip_prompt) for _ in range(3))
    expected = model.generate(ids, max_new_tokens=NEW, streamer=theirs)
    generate(model, Knowing(expected[0].tolist()), ids, max_new_tokens=NEW, streamer=ours)
    model.generate(ids, max_new_tokens=NEW, custom_generate=speculate(trained("eagle"), streamer=by_hand))
    assert ours.puts == theirs.puts == by_hand.puts and ours.said == theirs.said == by_hand.said
    with pytest.raises(UserError, match=r"streamer: .* speculate\(drafter, streamer=streamer\)"):
        model.generate(ids, max_new_tokens=NEW, streamer=theirs, custom_generate=speculate(trained("eagle")))
    with pytest.raises(UserError, match="assistant_model cannot be combined with a drafter"):
        model.generate(ids, max_new_tokens=NEW, assistant_model=model, custom_generate=speculate(trained("eagle")))
    with pytest.raises(UserError, match="a streamer takes one sequence, there are 2"):
        generate(model, None, torch.tensor([PROMPTS[0]] * 2), max_new_tokens=NEW, streamer=ours)


# ---- sampling ----


def test_sampling_is_repeatable_and_its_rows_differ() -> None:
    model, drafter, inputs = target_of().model, trained("eagle"), padded(PROMPTS[:2])
    how = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "pad_token_id": PAD}
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(generate(model, drafter, **inputs, **how))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert made[0].shape == (6, 9 + 8 + NEW) and len({tuple(row) for row in made[0][:, 17:].tolist()}) == 6
    assert torch.equal(made[0][:, :17], inputs["input_ids"].repeat_interleave(3, 0))
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **how, custom_generate=speculate(drafter)), made[0])
    state = torch.get_rng_state()
    generate(model, drafter, **inputs, max_new_tokens=2, pad_token_id=PAD)
    assert torch.equal(torch.get_rng_state(), state)  # greedy draws nothing


@pytest.mark.parametrize("how", [{"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9999}])
def test_sampling_from_one_token_is_greedy(how: dict[str, float]) -> None:
    model, inputs = target_of().model, padded(PROMPTS)
    expected = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=PAD)
    for found in both_doors(model, trained("eagle"), inputs, max_new_tokens=NEW, pad_token_id=PAD, do_sample=True, **how):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("policy", ["dynamic", pytest.param("chain", marks=pytest.mark.slow)])
def test_sampled_tokens_are_drawn_from_the_filtered_distribution(policy: str) -> None:
    """The second token of many sequences of one prompt, against the distribution by transformers' own processors."""
    model, many, first = target_of().model, 600, 40
    prompt = torch.tensor([[5, first]])
    how = {"do_sample": True, "temperature": 1.5, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "pad_token_id": PAD}
    out = model.generate(prompt, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **how)
    p_V = out.scores[0][0].softmax(-1)
    a = int(p_V.argmax())  # the likeliest first token: look at what follows it
    out = model.generate(torch.tensor([[5, first, a]]), max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **how)
    next_V = out.scores[0][0].softmax(-1)
    torch.manual_seed(0)
    drafter = trained("eagle")
    said = generate(model, drafter, prompt, policy=POLICIES[policy], max_new_tokens=3, num_return_sequences=many, **how)[:, 2:4]
    found_V = torch.bincount(said[:, 0], minlength=96) / many
    assert (found_V - p_V).abs().sum() < 4 * (12 / many) ** 0.5 and bool((p_V[said[:, 0]] > 0).all())
    follows = said[said[:, 0] == a, 1]
    assert len(follows) > 100
    found_V = torch.bincount(follows, minlength=96) / len(follows)
    assert (found_V - next_V).abs().sum() < 4 * (12 / len(follows)) ** 0.5 and bool((next_V[follows] > 0).all())


# ---- what is refused ----

REFUSED: dict[str, Any] = dict(
    num_beams=2, encoder_repetition_penalty=1.5, guidance_scale=2.0, prompt_lookup_num_tokens=3, output_scores=True, output_logits=True,
    output_hidden_states=True, output_attentions=True, penalty_alpha=0.6, dola_layers="low", constraints=[1], force_words_ids=[[3]],
    diversity_penalty=0.5, num_beam_groups=2, token_healing=True, use_mtp=True, assistant_early_exit=2, assistant_ensemble_weight=0.5,
    is_assistant=True, speculation_type="dflash", encoder_no_repeat_ngram_size=2, cache_implementation="quantized",
)  # fmt: skip


def test_what_a_tokenizer_returns_as_a_whole() -> None:
    with pytest.raises(UserError, match=r"^input_ids is a BatchEncoding, not a tensor: give what a tokenizer returns as \*\*inputs$"):
        generate(target_of().model, None, BatchEncoding({"input_ids": torch.tensor(PROMPTS[:1])}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_supported(name: str) -> None:
    model, ids = target_of().model, torch.tensor(PROMPTS[:1])
    config = GenerationConfig(max_new_tokens=4, pad_token_id=PAD, eos_token_id=2)
    setattr(config, name, REFUSED[name])
    with pytest.raises(UserError, match=rf"^{name}=.* is not supported with a drafter"):
        generate(model, None, ids, config)
    with pytest.raises(UserError, match=rf"^{name}=.* is not supported with a drafter"):
        generate(model, None, ids, max_new_tokens=4, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "output_scores"])
def test_by_the_other_door_too(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}=.* is not supported with a drafter"):
        target_of().model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, custom_generate=speculate(None), **{name: REFUSED[name]})


def test_the_tables_name_fields_of_transformers() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert (HONOURED | HARMLESS | PROCESSED | OFF.keys()) <= fields
    assert all(map(set.isdisjoint, (HONOURED, HARMLESS, PROCESSED), (HARMLESS, PROCESSED, HONOURED)))
    assert fields - HONOURED - HARMLESS - PROCESSED == REFUSED.keys() - {"cache_implementation"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"assistant_model": object()}, "assistant_model cannot be combined"),
        ({"custom_generate": "somebody/something"}, "custom_generate cannot be combined"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged' is not supported"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "padded on the left"),
        ({"attention_mask": torch.tensor([[0, 1, 0] + [1] * 6])}, "nothing masked inside"),
        ({"attention_mask": torch.zeros(1, 9, dtype=torch.int64)}, "the prompt is empty"),
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids of your own"),
        ({"inputs_embeds": torch.zeros(1, 9, 32)}, "inputs_embeds"),
        ({"max_new_tokens": 300}, "9 tokens and 300 new ones exceed the target's context of 256"),
        ({"policy": "chain"}, "policy is None, .tuned. or a TreePolicy .*, found 'chain'"),
    ],
)
def test_arguments_that_are_not_supported(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        generate(target_of().model, trained("mtp"), torch.tensor(PROMPTS[:1]), **{"max_new_tokens": 4, **how})


@pytest.mark.parametrize("stops", [False, True])
def test_a_batch_that_is_too_long_is_refused_before_an_engine_takes_memory(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(Decoder, "_make", made)
    how: dict[str, Any] = {"stop_strings": "never said", "tokenizer": tokenizer()} if stops else {}
    with pytest.raises(UserError, match="300 new ones exceed the target's context of 256"):
        generate(target_of().model, None, **padded(PROMPTS), max_new_tokens=300, pad_token_id=PAD, **how)


def test_a_cache_of_ones_own_is_refused() -> None:
    from transformers import DynamicCache

    for cache in (DynamicCache(), target_of().model(torch.tensor(PROMPTS[:1])).past_key_values):
        with pytest.raises(UserError, match="past_key_values is not supported"):
            generate(target_of().model, None, torch.tensor([PROMPTS[0] + [5]]), max_new_tokens=4, past_key_values=cache)
