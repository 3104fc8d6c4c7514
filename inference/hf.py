"""Speculative decoding for models of transformers: ``generate`` takes a GenerationConfig and returns what ``model.generate`` returns.

transformers prepares everything as usual (defaults, special tokens, masks, lengths, several sequences a prompt), and then calls a
function in place of its own decoding loop: ``model.generate(ids, custom_generate=speculate(drafter))``. A setting that would change
the output and is not supported is refused by its name; none is ignored silently.

Shape suffixes: B sequences, T tokens of the padded prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.driven import in_turn
from headstart.heads.errors import UserError, warn_once
from headstart.inference.decoding.auto import WORTH
from headstart.inference.decoding.decode import check_prompt
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.plans import load_plans
from headstart.inference.decoding.policy import AUTO, TreePolicy, fit_depth
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.elsewhere import Elsewhere
from headstart.inference.serving.hf_asked import (
    Ends,
    check_caller,
    check_fields,
    check_prepared,
    ends_of,
    padded,
    process_of,
    prompts_of,
    samplings,
    split,
)
from headstart.inference.speculator import open_speculator

Guesser = Drafter | Proposer | str | Path | None
Policy = TreePolicy | Literal["tuned"] | None
MEASURES = (
    "decode=auto first measures what rounds cost on this machine: some seconds, once for each number of sequences, greedy and sampled. To "
    'start at once, give a shape: policy=TreePolicy("chain", depth=4)'
)
KEPT = "_headstart_kept"  # attribute of the model that holds its decoder, so that both are freed together


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
    """``model.generate(input_ids, generation_config, streamer=streamer, **kwargs)`` with speculative decoding by ``drafter``.

    Greedy output is the model's own, token for token. Sampled output is distributed as the model's, and repeatable after
    ``torch.manual_seed``. There are two differences: padding does not count for the repetition penalty, and stopping criteria of your own
    are called for each sequence by itself. The decoder (with a folder's drafter, and on a GPU with buffers and device graphs) is kept with
    the model. Later calls with the same arguments reuse it, until a given folder's files change.

    ``drafter``: a Drafter, any other proposer, a folder, or None for plain decoding. ``policy``: the shape of the trees; None: the fastest
    shape, chosen every round (inference/decoding/auto.py), which above temperature 0 may draw other samples in another process; "tuned":
    the trees of the folder's decode.json. ``tokenizer``: for stop_strings, as in transformers, and to check a folder's tokenizer against.
    Calls from several threads take turns.
    Raises UserError naming a setting that is not supported, or the reason why the drafter does not fit the model.
    """
    if not isinstance(input_ids, Tensor):
        raise UserError(f"input_ids is a {type(input_ids).__name__}, not a tensor: give what a tokenizer returns as **inputs")
    for name in ("custom_generate", "assistant_model", "synced_gpus"):
        if kwargs.get(name):
            raise UserError(f"{name} cannot be combined with a drafter: leave it out")
    check_fields({**(vars(generation_config) if generation_config else {}), **kwargs})  # before transformers checks them
    config, mine = copy.deepcopy(generation_config), model.generation_config.stop_strings
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None) or mine
    if strings:  # transformers does not pass the tokenizer to a custom function, so the criterion is made here
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
    """A decoding loop for ``model.generate(..., custom_generate=speculate(drafter))``. It takes the arguments of ``generate``, and keeps
    the decoder with the model in the same way.

    transformers 5.19 does not pass ``streamer`` and ``tokenizer`` to such a function. So give the streamer to ``speculate`` (a streamer
    given to ``model.generate`` is refused, because no token would reach it), and stop strings as
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``. The loop raises what ``generate`` raises.
    """
    if not (policy is None or policy == "tuned" or isinstance(policy, TreePolicy)):
        raise UserError(f'policy is None, "tuned" or a TreePolicy (headstart.inference.decoding.policy), found {policy!r}')
    own = _Kept()

    @in_turn
    @torch.no_grad()
    def loop(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **prepared: Any) -> Any:
        nonlocal own
        check_fields(vars(generation_config))
        check_caller(model)
        check_prepared(prepared)
        ends, length, sampled = ends_of(stopping_criteria), input_ids.shape[1], bool(generation_config.do_sample)
        prompts = prompts_of(input_ids, prepared)
        processors, settings = split(logits_processor, sampled, ends.stop, length, [length - len(prompt) for prompt in prompts])
        if streamer is not None and len(prompts) > 1:
            raise UserError(f"a streamer takes one sequence, there are {len(prompts)}")
        own = own.or_the_last(model, drafter, policy, tokenizer)
        decoder = own.decoder_of(model, drafter, policy, tokenizer)
        each = samplings(settings, sampled, len(prompts))
        how: dict[str, Any] = {"new_tokens": max(ends.length - length, 1), "stop_ids": ends.stop}  # at least 1: criteria follow a token
        if how["new_tokens"] >= WORTH and any(tree and tree.kind == "auto" for tree in decoder.plans.values()):
            warn_once(MEASURES)
        growing = [_Growing(row, ends, how["new_tokens"], streamer, len(prompts)) for row in input_ids]
        together = decoder.batches and decoder.engine_holds(max(map(len, prompts)) + how["new_tokens"])
        if len(prompts) > 1 and not processors and together:
            _together(decoder, prompts, growing, each, how)
        else:
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for b, (prompt, sequence, sampling) in enumerate(zip(prompts, growing, each, strict=True)):
                if processors:
                    how["process"] = process_of(processors, input_ids[b, : length - len(prompt)], b)
                with suppress(_Over):
                    decoder.generate(prompt, sampling=sampling, on_tokens=sequence.take, **how)
            if streamer is not None:
                streamer.end()
        last = max(sequence.end or sequence.count for sequence in growing)
        said = [sequence.new(last if sequence.goes_on else sequence.end) for sequence in growing]
        sequences = torch.cat([input_ids, padded(said, generation_config._pad_token_tensor).to(input_ids.device)], 1)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    return loop


class _Kept:
    """Keeps a decoder from call to call while its ingredients stay the same. In a copy or pickle of the model it is empty."""

    def __init__(self) -> None:
        self.made_of: list[Any] = []
        self.decoder: Decoder | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()

    def or_the_last(self, model: Any, *made_of: Any) -> _Kept:
        """The one of the model's last call, if its decoder has the same ingredients and this one has no decoder yet. Otherwise this one,
        which the model holds from now on.
        """
        last = vars(model).get(KEPT)
        if self.decoder is None and isinstance(last, _Kept) and last.decoder and _same(last.made_of, _made_of(model, *made_of)):
            return last
        setattr(model, KEPT, self)
        return self

    def decoder_of(self, model: Any, drafter: Guesser, policy: Policy, tokenizer: Any) -> Decoder:
        if self.decoder is None or not _same(self.made_of, _made_of(model, drafter, policy, tokenizer)):
            self.decoder = None  # freed before the next one is made
            self.decoder = _open(drafter, model, tokenizer, policy)
            self.made_of = _made_of(model, drafter, policy, tokenizer)
        if isinstance(drafter, Drafter):
            drafter.eval()  # it may be in training between the calls
        self.decoder.target.refresh_head()
        return self.decoder


def _made_of(model: Any, drafter: Guesser, policy: Policy, tokenizer: Any) -> list[Any]:
    """The ingredients of a decoder: objects, to be compared by identity, and last a tuple of values, to be compared by equality."""
    files: Any = None
    if isinstance(drafter, str | Path):
        files = str(drafter), sorted((path.name, (at := path.stat()).st_mtime_ns, at.st_size) for path in Path(drafter).glob("*"))
        drafter = None
    elif isinstance(drafter, Drafter):
        weight = next(drafter.parameters(), None)
        files = None if weight is None else (weight.device, weight.dtype, _places(drafter))
    ends = getattr(drafter, "_ends", None)  # the drafter may have been attached to another target meanwhile
    adapters = [(str(m.active_adapters), m.disable_adapters, m.merged) for m in model.modules() if hasattr(m, "lora_A")]
    return [model, drafter, tokenizer, ends[0] if ends else None, (model.device, model.dtype, policy, files, _places(model), adapters)]


def _places(module: torch.nn.Module) -> list[int]:
    """The addresses of its weights. They change with a new output head, a new adapter or loaded weights, which captured graphs would not
    use. What oneDNN has prepacked has none, and cannot be replaced.
    """
    return [0 if p.is_mkldnn else p.data_ptr() for p in module.parameters()]


def _same(a: list[Any], b: list[Any]) -> bool:
    return a[-1] == b[-1] and all(x is y for x, y in zip(a[:-1], b[:-1], strict=True))


def _open(drafter: Guesser, model: Any, tokenizer: Any, policy: Policy) -> Decoder:
    """Make a decoder for the model as a target. Raises UserError where the drafter was made for another model."""
    target = Target(model, tokenizer, name=model.name_or_path or "the model", frozen=False)
    check_driven(target)
    tree = AUTO if policy is None or policy == "tuned" else policy
    if tokenizer is None:
        target.card.pop("tokenizer")  # nothing to compare with
    if isinstance(drafter, (str, Path)):
        found = open_speculator(drafter, target)
        return Decoder(target, found, load_plans(drafter, target, found) if policy == "tuned" else tree)
    if policy == "tuned":
        raise UserError('policy="tuned" reads decode.json of a folder: give the drafter as one')
    if not isinstance(drafter, Drafter):
        return Decoder(target, drafter, tree)
    hub.check_target(hub.target_card(drafter.shape, ""), {k: v for k, v in target.card.items() if k != "tokenizer"}, "the drafter")
    here = next(drafter.eval().parameters(), None)
    if here is not None and here.device != target.device:
        return Decoder(target, Elsewhere(drafter, target), fit_depth(tree, drafter))
    if here is not None and here.dtype != target.dtype:
        raise UserError(f"the drafter is in {here.dtype}, the model in {target.dtype}: drafter.to(model.dtype)")
    drafter.attach(target.ends)
    return Decoder(target, drafter, tree)


class _Over(Exception):
    """Raised when a stopping criterion holds."""


class _Growing:
    """Collects the new tokens of one sequence, streams them, and asks the stopping criteria after each. ``end``: the number of new tokens
    when a criterion first held. Several sequences without stop tokens are not padded: each goes on until all have ended, as in
    transformers.
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
        """Add tokens. Raises _Over once the sequence needs no more."""
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


def _together(decoder: Decoder, prompts: list[list[int]], growing: list[_Growing], each: list[SamplingParams], how: dict[str, Any]) -> None:
    for prompt in prompts:  # before an engine takes memory for it
        check_prompt(decoder.target, prompt, how["new_tokens"])
    with decoder.held(len(prompts), max(map(len, prompts)) + how["new_tokens"], decoder.several) as engine:
        rows = [engine.add_request(prompt, sampling=s, **how) for prompt, s in zip(prompts, each, strict=True)]
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
