"""Reads a call of ``model.generate`` as transformers hands it over: its prompts, sampling settings and stopping conditions. Also pads what
is returned.

A field, a processor or an argument that would change the output and is not supported is refused by the user's name for it; none is
ignored silently.

Shape suffixes: B sequences, T tokens of the padded prompts, X rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding.sampling import SamplingParams

# Fields of a GenerationConfig that are honoured, then those that do not change the tokens of a sequence.
HONOURED = {"max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p"}
HONOURED |= {"num_return_sequences", "return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "repetition_penalty"}
HONOURED |= {"min_new_tokens", "min_length"}
HARMLESS = {"early_stopping", "length_penalty", "low_memory", "renormalize_logits", "use_cache", "cache_implementation", "cache_config"}
HARMLESS |= {"max_cache_len", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"}
HARMLESS |= {"transformers_version", "decoder_start_token_id", "num_assistant_tokens", "num_assistant_tokens_schedule"}
HARMLESS |= {"assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"}
# Fields for which transformers makes a processor that depends on one sequence and its scores alone.
PROCESSED = {"no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "typical_p", "top_h"}
PROCESSED |= {"forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"}
PROCESSED |= {"epsilon_cutoff", "eta_cutoff", "watermarking_config"}
# Every other field must be unset (None, False) or have the value that means "off".
OFF = {"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0, "guidance_scale": 1}
OFF |= {"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}
# Processors of transformers that a field of ``SamplingParams`` can replace -> (the field, the processor's attribute with its value). They
# stand in the order in which ``SamplingParams`` applies these fields.
SETTINGS = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "MinLengthLogitsProcessor": ("min_tokens", "min_length"),
    "MinNewTokensLengthLogitsProcessor": ("min_tokens", "min_new_tokens"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
ORDER = list(SETTINGS)
# Processors that run the model, look at other sequences, or remember their calls: they cannot be asked about guesses.
NOT_OF_ONE = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor"}
NOT_OF_ONE |= {"EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"}
NOT_OF_ONE |= {"SynthIDTextWatermarkLogitsProcessor", "WhisperTimeStampLogitsProcessor"}
# Inputs that transformers prepares beside the prompt; decoding here makes its own.
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}

Process = Callable[[Tensor, Tensor], Tensor]  # the ids [X, T] of X sequences and their scores [X, V] -> changed scores


def check_fields(values: dict[str, Any]) -> None:
    """Raises UserError naming a field of a GenerationConfig that would change the output and is not supported."""
    from transformers import GenerationConfig

    names = sorted(name for name in vars(GenerationConfig()).keys() - HONOURED - HARMLESS - PROCESSED if not name.startswith("_"))
    wrong = [name for name in names if values.get(name) not in (None, False, OFF.get(name))]
    if values.get("cache_implementation") in ("quantized", "paged"):  # another precision, another engine
        wrong.append("cache_implementation")
    if wrong:
        raise UserError(
            f"{wrong[0]}={values[wrong[0]]!r} is not supported with a drafter: leave it out, or call model.generate without one"
        )


def check_prepared(prepared: dict[str, Any]) -> None:
    """Raises UserError naming a prepared input that would change the output and is not supported."""
    for name in sorted(prepared.keys() - PREPARED):
        unused = prepared[name] is None or (isinstance(prepared[name], dict) and not prepared[name])  # no image: mm_encoder_outputs={}
        if not unused:
            raise UserError(f"{name} is not supported with a drafter: only input_ids and attention_mask are read")
    cache = prepared.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise UserError("past_key_values is not supported with a drafter: give the whole prompt as input_ids")


def prompts_of(input_ids: Tensor, prepared: dict[str, Any]) -> list[list[int]]:
    """The prompts without their padding. Raises UserError for padding elsewhere than on the left, and for position_ids of one's own."""
    mask_BT, positions_BT = prepared.get("attention_mask"), prepared.get("position_ids")
    mask_BT = torch.ones_like(input_ids) if mask_BT is None else mask_BT.long()
    if mask_BT.shape != input_ids.shape or bool((mask_BT[:, 1:] < mask_BT[:, :-1]).any()):
        raise UserError("attention_mask: prompts must be padded on the left (tokenizer.padding_side='left'), nothing masked inside them")
    if positions_BT is not None and bool((positions_BT != (mask_BT.cumsum(1) - 1).clamp(min=0)).any()):
        raise UserError("position_ids of your own are not supported with a drafter: leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask_BT.bool(), strict=True)]


class Ends(NamedTuple):
    """Where a sequence ends."""

    stop: list[int]  # tokens
    own: list[Any]  # criteria to call at every token: stop strings, time, the user's own
    length: int  # most tokens of the padded prompt and the new ones together
    padded: bool  # whether a sequence that has ended is padded while others go on; else it goes on as long as they do


def ends_of(criteria: Sequence[Any]) -> Ends:
    """Split the stopping criteria of transformers into stop tokens, the length limit, and criteria to call at every token."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    stop, own, lengths = list[int](), list[Any](), list[int]()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            stop += criterion.eos_token_id.flatten().tolist()
        else:
            own.append(criterion)
    return Ends(stop, own, min(lengths), any(hasattr(criterion, "eos_token_id") for criterion in criteria))


def split(
    processors: Sequence[Any], sampled: bool, stop: list[int], length: int, padding: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """Split transformers' list of processors. Returns those that must be called as they are, and the fields of ``SamplingParams`` that
    replace the others: the last ones in the list, as far as they stand in the order of ``SETTINGS``. ``length``: of the padded
    prompts; ``padding``: how much of it each has.

    Raises UserError naming the user's argument where a processor cannot be applied.
    """
    own, last, found = list(processors), len(ORDER), dict[str, Any]()
    while own and type(own[-1]).__name__ == "LogitNormalization":  # as the last one it changes no distribution
        own.pop()
    while own and (name := type(own[-1]).__name__) in ORDER and ORDER.index(name) < last and _is_plain(own[-1], stop, length, padding):
        field, attribute = SETTINGS[name]
        value, last = getattr(own.pop(), attribute), ORDER.index(name)
        if name == "MinLengthLogitsProcessor":
            value -= length
        found[field] = max(value, found.get(field, 0)) if field == "min_tokens" else value
    for processor in own:
        name = getattr(processor, "__name__", type(processor).__name__)
        if name in NOT_OF_ONE:
            what = "watermarking_config" if name.startswith("SynthID") else f"logits_processor: {name}"
            raise UserError(f"{what} is not supported with a drafter: leave it out, or call model.generate without one")
    filters = ("temperature", "top_k", "top_p", "min_p")  # these never remove the likeliest token: greedy decoding needs none
    return own, {"temperature": 1.0, **found} if sampled else {k: v for k, v in found.items() if k not in filters}


def _is_plain(processor: Any, stop: list[int], length: int, padding: Sequence[int]) -> bool:
    """Whether the processor does exactly what its field of ``SamplingParams`` does."""
    if (ends := getattr(processor, "eos_token_id", None)) is not None:
        return set(ends.flatten().tolist()) == set(stop) and getattr(processor, "prompt_length_to_skip", length) == length
    filters = getattr(processor, "filter_value", float("-inf")) == float("-inf") and getattr(processor, "min_tokens_to_keep", 1) == 1
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # transformers 5.23 leaves out the padding, as we do
        return filters and ignored.tolist() == list(padding)
    return filters and not ignored


def samplings(settings: dict[str, Any], sampled: bool, count: int) -> list[SamplingParams]:
    """``SamplingParams`` for each of ``count`` sequences, each with a seed of its own where they are sampled."""
    if not sampled:
        return [SamplingParams(**settings)] * count
    seeds = torch.randint(1 << 62, (count,)).tolist()  # from torch's global generator, as transformers' sampling
    return [SamplingParams(**settings, seed=seed) for seed in seeds]


def process_of(processors: Sequence[Any], padding_T: Tensor, b: int) -> Process:
    """The processors as one function, for sequence ``b`` of the batch. As in transformers, they see the sequence with its padding.

    One difference: for a repetition penalty, the padding does not count as tokens of the sequence.
    """
    from transformers import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

    def alone(processor: Any) -> Any:
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed = processor._prefix_allowed_tokens_fn  # it takes the number of the sequence
        return PrefixConstrainedLogitsProcessor(lambda _, ids_T: allowed(b, ids_T), 1)

    steps = [alone(processor) for processor in processors]

    def process(ids_XT: Tensor, scores_XV: Tensor) -> Tensor:
        whole_XT = torch.cat([padding_T.to(ids_XT.device).expand(len(ids_XT), -1), ids_XT], 1)
        for step in steps:
            penalty = type(step) is RepetitionPenaltyLogitsProcessor and not step.prompt_ignore_length
            scores_XV = step(ids_XT if penalty else whole_XT, scores_XV)
        return scores_XV

    return process


def check_caller(model: Any) -> None:
    """Raises UserError if ``model.generate`` was given a streamer or an assistant, which it does not pass on. Its frame is searched."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("streamer") is not None:
        raise UserError("streamer: transformers does not hand it to a drafter: give it as speculate(drafter, streamer=streamer)")
    if frame is not None and frame.f_locals.get("assistant_model") is not None:
        raise UserError("assistant_model cannot be combined with a drafter: leave it out")


def padded(said: list[list[int]], pad: Tensor | None) -> Tensor:
    """The new tokens as one tensor, int64 [B, longest], padded on the right. ``pad``: the pad token that transformers prepared: the
    config's own, or else its first end token; None: there is neither.

    Raises UserError where padding is needed and ``pad`` is None.
    """
    longest, fill = max(map(len, said)), [] if pad is None else [int(pad)]
    if not fill and any(len(row) < longest for row in said):
        raise UserError("the sequences end at different lengths: give pad_token_id")
    return torch.tensor([row + fill * (longest - len(row)) for row in said], dtype=torch.int64)
