"""The conventions of transformers: ``generate`` takes a GenerationConfig and returns what ``model.generate`` returns.

transformers prepares what it always prepares (defaults, special tokens, masks, lengths, several sequences a prompt) and
hands over to a function in the place of its own loop: ``model.generate(ids, custom_generate=speculate(drafter))``.
What would change the output and is not supported is refused by its name; nothing is ignored in silence.

Shape suffixes: B sequences, T tokens of the padded prompts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import hub
from heads.base import Drafter
from heads.errors import UserError
from inference import decode
from inference.engine import Plans, generate_batch
from inference.plans import ALONE, MANY, load_plans
from inference.propose import Drafting, Proposer, TreePolicy
from inference.proposers.elsewhere import Elsewhere
from inference.sampling import Sampling
from inference.settings import open_speculator
from inference.target import Target

Guesser = Drafter | Proposer | str | Path | None

# Fields of a GenerationConfig that are honoured, then those that have no influence on what one sequence says.
HONOURED = {"max_length", "max_new_tokens", "stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
HONOURED |= {"num_return_sequences", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"}
HARMLESS = {"early_stopping", "length_penalty", "low_memory", "renormalize_logits", "use_cache", "cache_implementation", "cache_config"}
HARMLESS |= {"max_cache_len", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"}
HARMLESS |= {"transformers_version", "decoder_start_token_id", "num_assistant_tokens", "num_assistant_tokens_schedule"}
HARMLESS |= {"assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"}
# Every other field must be unset (None, False) or have the value that stands for it.
OFF = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "min_length": 0, "min_new_tokens": 0}
OFF |= {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "guidance_scale": 1, "encoder_repetition_penalty": 1}
OFF |= {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0}
# What transformers makes of the honoured fields: the processor, and its attribute.
PROCESSORS = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
}
PROCESSORS |= {"TopKLogitsWarper": ("top_k", "top_k"), "TopPLogitsWarper": ("top_p", "top_p"), "MinPLogitsWarper": ("min_p", "min_p")}
# What it hands over beside the prompt, and is ours to make.
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def generate(
    model: Any,
    drafter: Guesser,
    input_ids: Tensor,
    generation_config: Any = None,
    streamer: Any = None,
    *,
    policy: TreePolicy | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """``model.generate(input_ids, generation_config, streamer=streamer, **kwargs)``, drafted by ``drafter``.

    Greedy output is the model's own, token for token; sampled output is distributed as the model's and repeatable after
    ``torch.manual_seed``. One difference: a repetition penalty does not hold padding against a sequence. ``drafter``: a
    Drafter, any other proposer, a folder (opened at every call: ``speculate`` keeps it), or None for plain decoding.
    ``policy``: the shape of its trees; None: what the folder's decode.json says, or the default. ``tokenizer``: for
    stop_strings, as in transformers, and to compare with the folder's.
    Raises UserError naming a setting that is not supported, or what does not fit the model.
    """
    for name in ("custom_generate", "assistant_model", "synced_gpus"):
        if kwargs.get(name):
            raise UserError(f"{name} cannot be combined with a drafter: leave it out")
    _check_fields({**(vars(generation_config) if generation_config else {}), **kwargs})  # before transformers has an opinion of its own
    config, mine = copy.deepcopy(generation_config), model.generation_config.stop_strings
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None) or mine
    if strings:  # transformers does not pass the tokenizer on to a function, so it gets the criterion ready-made
        from transformers.generation.stopping_criteria import StopStringCriteria

        if tokenizer is None:
            raise UserError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        if config is not None:
            config.stop_strings = None
        if mine:
            kwargs["stop_strings"] = None
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    how = speculate(drafter, policy=policy, tokenizer=tokenizer, streamer=streamer)
    return model.generate(input_ids, generation_config=config, custom_generate=how, **kwargs)


def speculate(drafter: Guesser, *, policy: TreePolicy | None = None, tokenizer: Any = None, streamer: Any = None) -> Callable[..., Any]:
    """For ``model.generate(..., custom_generate=speculate(drafter))``. A folder is opened at the first call and kept.

    transformers 5.19 keeps ``streamer`` and ``tokenizer`` from a function: give the streamer to ``speculate`` (with one given to
    ``model.generate`` it is refused: no token would reach it), and stop strings as
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``. Raises what ``generate`` raises.
    """
    opened: list[tuple[Any, Target, Drafter | Proposer | None, Plans]] = []  # the model last used, and what serves it

    @torch.no_grad()
    def loop(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **prepared: Any) -> Any:
        _check_fields(vars(generation_config))
        _check_streamer(model)
        _check_prepared(generation_config, logits_processor, prepared)
        stop, strings, length = _ends(stopping_criteria)
        prompts = _prompts(input_ids, prepared)
        if streamer is not None and len(prompts) > 1:
            raise UserError(f"a streamer takes one sequence, there are {len(prompts)}")
        if not opened or opened[0][0] is not model:
            opened[:] = [(model, *_open(drafter, model, tokenizer, policy))]
        _, target, guesser, plans = opened[0]
        target.refresh_head()
        chains = all(tree.kind == "chain" for tree in plans.values() if tree is not None)
        each = _samplings(generation_config, "block" if chains else "top_plus_one", len(prompts))
        how: dict[str, Any] = {"new_tokens": length - input_ids.shape[1], "stop_ids": stop}
        if len(prompts) > 1 and not strings and (guesser is None or isinstance(guesser, Drafter)):
            several = {n: tree for n, tree in plans.items() if n != ALONE}
            said = [g.tokens for g in generate_batch(target, guesser, prompts, sampling=each, rows=len(prompts), plans=several, **how)]
        else:
            how["policy"] = next(iter(plans.values()))
            proposer = None if how["policy"] is None else Drafting(guesser) if isinstance(guesser, Drafter) else guesser
            if streamer is not None:
                streamer.put(input_ids.cpu())
            said = [_one(target, proposer, p, strings, streamer, sampling=s, **how) for p, s in zip(prompts, each, strict=True)]
            if streamer is not None:
                streamer.end()
        sequences = torch.cat([input_ids, _padded(said, generation_config.pad_token_id, stop).to(input_ids.device)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    return loop


def _open(
    drafter: Guesser, model: Any, tokenizer: Any, policy: TreePolicy | None
) -> tuple[Target, Drafter | Proposer | None, dict[int, TreePolicy | None]]:
    """The model as a target, what guesses for it, and the trees for up to so many sequences (``ALONE`` first).

    Raises UserError where the drafter was made for another model.
    """
    target = Target(model, tokenizer, name=model.name_or_path or "the model", frozen=False)
    target.check_head()
    tree = policy or TreePolicy()
    if tokenizer is None:
        target.card.pop("tokenizer")  # nothing to compare with
    if isinstance(drafter, (str, Path)):
        found = open_speculator(drafter, target)
        tuned = load_plans(drafter, target, found) if policy is None else None
        return target, found, tuned or {MANY: tree.at_most(found.max_depth or tree.depth)}
    if not isinstance(drafter, Drafter):
        return target, drafter, {MANY: tree}
    hub.check_target(hub.target_card(drafter.shape, ""), {k: v for k, v in target.card.items() if k != "tokenizer"}, "the drafter")
    trees: dict[int, TreePolicy | None] = {MANY: tree.at_most(drafter.max_depth or tree.depth)}
    here = next(drafter.eval().parameters(), None)
    if here is not None and here.device != target.device:
        return target, Elsewhere(drafter, target), trees
    if here is not None and here.dtype != target.dtype:
        raise UserError(f"the drafter is in {here.dtype}, the model in {target.dtype}: drafter.to(model.dtype)")
    drafter.attach(target.ends)
    return target, drafter, trees


def _check_fields(values: dict[str, Any]) -> None:
    """Raises UserError naming a field of a GenerationConfig that would change the output and is not supported."""
    from transformers import GenerationConfig

    names = sorted(name for name in vars(GenerationConfig()).keys() - HONOURED - HARMLESS if not name.startswith("_"))
    wrong = [name for name in names if values.get(name) not in (None, False, OFF.get(name))]
    if values.get("cache_implementation") in ("quantized", "paged"):  # another precision, another engine
        wrong.append("cache_implementation")
    if wrong:
        raise UserError(
            f"{wrong[0]}={values[wrong[0]]!r} is not supported with a drafter: leave it out, or call model.generate without one"
        )


def _check_streamer(model: Any) -> None:
    """Raises UserError where ``model.generate`` was given a streamer: it is not handed over, only that call's own frame knows of it."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("streamer") is not None:
        raise UserError("streamer: transformers does not hand it to a drafter: give it as speculate(drafter, streamer=streamer)")


def _check_prepared(config: Any, processors: Sequence[Any], prepared: dict[str, Any]) -> None:
    """Raises UserError naming what else would change the output and is not supported."""
    for processor in processors:
        kind = type(processor).__name__
        field, attribute = PROCESSORS.get(kind, ("", ""))
        own = field and getattr(config, field) == getattr(processor, attribute) and not getattr(processor, "prompt_ignore_length", None)
        if not own and kind != "LogitNormalization":
            raise UserError(f"logits_processor: {kind} is not supported with a drafter: generate without one")
    for name in sorted(prepared.keys() - PREPARED):
        if prepared[name] is not None:
            raise UserError(f"{name} is not supported with a drafter: only input_ids and attention_mask are read")
    cache = prepared.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise UserError("past_key_values is not supported with a drafter: give the whole prompt as input_ids")


def _ends(criteria: Sequence[Any]) -> tuple[list[int], list[Any], int]:
    """Where a sequence ends: stop tokens, criteria for stop strings, and its length with the padded prompt."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

    stop, strings, length = [], [], 0
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            length = min(length, criterion.max_length) if length else criterion.max_length
        elif type(criterion) is EosTokenCriteria:
            stop += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is StopStringCriteria:
            strings.append(criterion)
        else:
            raise UserError(f"stopping_criteria: {type(criterion).__name__} is not supported with a drafter: "
                            "use max_new_tokens, eos_token_id or stop_strings")  # fmt: skip
    return stop, strings, length


def _prompts(input_ids: Tensor, prepared: dict[str, Any]) -> list[list[int]]:
    """The prompts without their padding."""
    mask_BT, positions_BT = prepared.get("attention_mask"), prepared.get("position_ids")
    mask_BT = torch.ones_like(input_ids) if mask_BT is None else mask_BT.long()
    if mask_BT.shape != input_ids.shape or bool((mask_BT[:, 1:] < mask_BT[:, :-1]).any()):
        raise UserError("attention_mask: prompts must be padded on the left (tokenizer.padding_side='left'), nothing masked inside them")
    if positions_BT is not None and bool((positions_BT != (mask_BT.cumsum(1) - 1).clamp(min=0)).any()):
        raise UserError("position_ids of your own are not supported with a drafter: leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask_BT.bool(), strict=True)]


def _samplings(config: Any, rule: str, count: int) -> list[Sampling]:
    penalty = config.repetition_penalty or 1.0
    if not config.do_sample:
        return [Sampling(repetition_penalty=penalty, rule=rule)] * count
    warm: dict[str, Any] = {"temperature": config.temperature or 1.0, "repetition_penalty": penalty, "rule": rule}
    warm |= {"top_k": config.top_k or 0, "top_p": 1.0 if config.top_p is None else config.top_p, "min_p": config.min_p or 0.0}
    seeds = torch.randint(1 << 62, (count,)).tolist()  # of torch's own generator, as transformers' sampling
    return [Sampling(**warm, seed=seed) for seed in seeds]


class _Said(Exception):
    """A stop string is complete."""


def _one(target: Target, proposer: Proposer | None, prompt: list[int], strings: list[Any], streamer: Any, **how: Any) -> list[int]:
    """The new tokens of one sequence, given to the streamer as they are accepted; they end with the token that completes a stop string."""
    text, new = list(prompt), []

    def take(tokens: list[int]) -> None:
        for token in tokens:
            text.append(token)
            new.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if any(bool(done(torch.tensor([text[-done.maximum_token_len :]]), None)) for done in strings):
                raise _Said

    with suppress(_Said):
        decode.generate(target, proposer, prompt, on_tokens=take, **how)
    return new


def _padded(said: list[list[int]], pad: int | None, stop: list[int]) -> Tensor:
    """[B, longest], filled up on the right; without a padding token with the first stop token, as transformers does."""
    longest = max(map(len, said))
    pad = stop[0] if pad is None and stop else pad
    if pad is None and any(len(row) < longest for row in said):
        raise UserError("the sequences end at different lengths: give pad_token_id")
    return torch.tensor([row + [pad] * (longest - len(row)) for row in said], dtype=torch.int64)
