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
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding import decode
from headstart.inference.decoding.engine import Engine, Plans, generate_batch
from headstart.inference.decoding.plans import ALONE, MANY, load_plans
from headstart.inference.decoding.policy import AUTO, TreePolicy, fit_depth
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import Sampling
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.elsewhere import Elsewhere
from headstart.inference.serving.hf_asked import Ends, check_fields, check_prepared, ends_of, process_of, prompts_of, samplings, split
from headstart.inference.speculator import open_speculator

Guesser = Drafter | Proposer | str | Path | None
Policy = TreePolicy | Literal["tuned"] | None


def generate(
    model: Any,
    drafter: Guesser,
    input_ids: Tensor,
    generation_config: Any = None,
    streamer: Any = None,
    *,
    policy: Policy = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """``model.generate(input_ids, generation_config, streamer=streamer, **kwargs)``, drafted by ``drafter``.

    Greedy output is the model's own, token for token; sampled output is distributed as the model's and repeatable after
    ``torch.manual_seed``. Two differences: a repetition penalty does not hold padding against a sequence, and a stopping
    criterion of your own is asked about each sequence by itself. ``drafter``: a
    Drafter, any other proposer, a folder (opened at every call: ``speculate`` keeps it), or None for plain decoding.
    ``policy``: the shape of its trees; None: whatever is fastest, round by round (inference/decoding/auto.py), which above temperature 0
    may draw other samples in another process; "tuned": what the folder's decode.json says. ``tokenizer``: for stop_strings, as in
    transformers, and to compare with the folder's.
    Raises UserError naming a setting that is not supported, or what does not fit the model.
    """
    for name in ("custom_generate", "assistant_model", "synced_gpus"):
        if kwargs.get(name):
            raise UserError(f"{name} cannot be combined with a drafter: leave it out")
    check_fields({**(vars(generation_config) if generation_config else {}), **kwargs})  # before transformers has an opinion of its own
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


def speculate(drafter: Guesser, *, policy: Policy = None, tokenizer: Any = None, streamer: Any = None) -> Callable[..., Any]:
    """For ``model.generate(..., custom_generate=speculate(drafter))``. A folder is opened at the first call and kept.

    transformers 5.19 keeps ``streamer`` and ``tokenizer`` from a function: give the streamer to ``speculate`` (with one given to
    ``model.generate`` it is refused: no token would reach it), and stop strings as
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``. Raises what ``generate`` raises.
    """
    opened: list[tuple[Any, Target, Drafter | Proposer | None, Plans]] = []  # the model last used, and what serves it

    @torch.no_grad()
    def loop(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **prepared: Any) -> Any:
        check_fields(vars(generation_config))
        _check_streamer(model)
        check_prepared(prepared)
        ends, length, sampled = ends_of(stopping_criteria), input_ids.shape[1], bool(generation_config.do_sample)
        processors, settings = split(logits_processor, sampled, ends.stop, length)
        prompts = prompts_of(input_ids, prepared)
        if streamer is not None and len(prompts) > 1:
            raise UserError(f"a streamer takes one sequence, there are {len(prompts)}")
        if not opened or opened[0][0] is not model:
            opened[:] = [(model, *_open(drafter, model, tokenizer, policy))]
        _, target, guesser, plans = opened[0]
        target.refresh_head()
        each = samplings(settings, sampled, len(prompts))
        how: dict[str, Any] = {"new_tokens": max(ends.length - length, 1), "stop_ids": ends.stop}  # ends are looked at behind a token
        growing = [_Growing(row, ends, how["new_tokens"], streamer, len(prompts)) for row in input_ids]
        if len(prompts) > 1 and not processors and (guesser is None or isinstance(guesser, Drafter)):
            several = {n: tree for n, tree in plans.items() if n != ALONE}
            _together(target, guesser, prompts, growing, each, several, how)
        else:
            how["policy"] = next(iter(plans.values()))
            proposer = None if how["policy"] is None else Drafting(guesser) if isinstance(guesser, Drafter) else guesser
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for b, (prompt, sequence, sampling) in enumerate(zip(prompts, growing, each, strict=True)):
                if processors:
                    how["process"] = process_of(processors, input_ids[b, : length - len(prompt)], b)
                with suppress(_Over):
                    decode.generate(target, proposer, prompt, sampling=sampling, on_tokens=sequence.take, **how)
            if streamer is not None:
                streamer.end()
        last = max(sequence.end or sequence.count for sequence in growing)
        said = [sequence.new(last if sequence.goes_on else sequence.end) for sequence in growing]
        sequences = torch.cat([input_ids, _padded(said, generation_config.pad_token_id, ends.stop).to(input_ids.device)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    return loop


def _open(
    drafter: Guesser, model: Any, tokenizer: Any, policy: Policy
) -> tuple[Target, Drafter | Proposer | None, dict[int, TreePolicy | None]]:
    """The model as a target, what guesses for it, and the trees for up to so many sequences (``ALONE`` first).

    Raises UserError where the drafter was made for another model.
    """
    target = Target(model, tokenizer, name=model.name_or_path or "the model", frozen=False)
    check_driven(target)
    tree = AUTO if policy is None or policy == "tuned" else policy
    if tokenizer is None:
        target.card.pop("tokenizer")  # nothing to compare with
    if isinstance(drafter, (str, Path)):
        found = open_speculator(drafter, target)
        plans: dict[int, TreePolicy | None] = {MANY: fit_depth(tree, found)}
        return target, found, load_plans(drafter, target, found) if policy == "tuned" else plans
    if policy == "tuned":
        raise UserError('policy="tuned" reads decode.json of a folder: give the drafter as one')
    if not isinstance(drafter, Drafter):
        return target, drafter, {MANY: tree}
    hub.check_target(hub.target_card(drafter.shape, ""), {k: v for k, v in target.card.items() if k != "tokenizer"}, "the drafter")
    trees: dict[int, TreePolicy | None] = {MANY: fit_depth(tree, drafter)}
    here = next(drafter.eval().parameters(), None)
    if here is not None and here.device != target.device:
        return target, Elsewhere(drafter, target), trees
    if here is not None and here.dtype != target.dtype:
        raise UserError(f"the drafter is in {here.dtype}, the model in {target.dtype}: drafter.to(model.dtype)")
    drafter.attach(target.ends)
    return target, drafter, trees


def _check_streamer(model: Any) -> None:
    """Raises UserError where ``model.generate`` was given a streamer: it is not handed over, only that call's own frame knows of it."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("streamer") is not None:
        raise UserError("streamer: transformers does not hand it to a drafter: give it as speculate(drafter, streamer=streamer)")


class _Over(Exception):
    """A criterion holds."""


class _Growing:
    """The new tokens of one sequence as they are accepted; ``end``: how many there are where a criterion of its own first held.

    Of several that are not padded, each goes on until the last has ended: so transformers does it.
    """

    def __init__(self, padded_T: Tensor, ends: Ends, new_tokens: int, streamer: Any, beside: int) -> None:
        self.text_1T = torch.cat([padded_T, padded_T.new_zeros(new_tokens)])[None]
        self.criteria, self.streamer, self.goes_on = ends.own, streamer, beside > 1 and not ends.padded
        self.start, self.count = len(padded_T), 0
        self.end: int | None = None

    def new(self, count: int | None = None) -> list[int]:
        found: list[int] = self.text_1T[0, self.start : self.start + (self.count if count is None else count)].tolist()
        return found

    def take(self, tokens: Sequence[int]) -> None:
        """Raises _Over where no more are wanted."""
        for token in tokens:
            if self.end is not None and not self.goes_on:
                raise _Over
            self.text_1T[0, self.start + self.count] = token
            self.count += 1
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            so_far_1T = self.text_1T[:, : self.start + self.count]
            holds = [bool(torch.as_tensor(criterion(so_far_1T, None)).any()) for criterion in self.criteria]
            if any(holds) and self.end is None:
                self.end = self.count
        if self.end is not None and not self.goes_on:
            raise _Over


def _together(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], growing: list[_Growing], each: list[Sampling], plans: Plans, how: Any
) -> None:
    if not growing[0].criteria:
        made = generate_batch(target, drafter, prompts, sampling=each, rows=len(prompts), plans=plans, **how)
        for sequence, row in zip(growing, made, strict=True):
            sequence.take(row.tokens)
        return
    capacity = max(map(len, prompts)) + how["new_tokens"]
    engine = Engine(target, drafter, rows=len(prompts), capacity=capacity, plans=plans, rule=each[0].rule)
    rows = [engine.admit(prompt, sampling=s, **how) for prompt, s in zip(prompts, each, strict=True)]
    while True:
        for row, sequence in zip(rows, growing, strict=True):
            try:
                sequence.take(row.tokens[sequence.count :])
            except _Over:
                engine.drop(row)
        last = max(sequence.end or sequence.count for sequence in growing)
        if all(row.done or (sequence.end and sequence.count >= last) for row, sequence in zip(rows, growing, strict=True)):
            return
        engine.step()


def _padded(said: list[list[int]], pad: int | None, stop: list[int]) -> Tensor:
    """[B, longest], filled up on the right; without a padding token with the first stop token, as transformers does."""
    longest = max(map(len, said))
    pad = stop[0] if pad is None and stop else pad
    if pad is None and any(len(row) < longest for row in said):
        raise UserError("the sequences end at different lengths: give pad_token_id")
    return torch.tensor([row + [pad] * (longest - len(row)) for row in said], dtype=torch.int64)
