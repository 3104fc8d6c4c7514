"""What a target is, apart from running it: shape, tokenizer, embedding and output head, and the fingerprint it is known again by.

Two kinds of object say so: ``Target``, a model that runs, and ``StoredTarget``, its files, from which the model is opened when a pass
is needed.

Shape suffixes: V vocabulary, D hidden.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from headstart.heads.base import TargetEnds, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.seal import target_card, tokenizer_sha

if TYPE_CHECKING:
    from headstart.inference.decoding.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW = 64  # values of every parameter that the fingerprint is made of


class TargetInfo(ABC):
    """What drafters are built for, attached to, saved with and compared by."""

    name: str
    tokenizer: Any
    shape: TargetShape
    ends: TargetEnds
    device: torch.device  # of the embedding
    dtype: torch.dtype
    shared: Any = False  # whether several processes have a part each of its layers
    apart = False  # whether these then read rows of their own each (``Target.read_apart``)

    @abstractmethod
    def opened(self) -> Target:
        """The model, ready for passes; loaded at the first call. Raises UserError where it cannot be."""

    @abstractmethod
    def first_values(self) -> Iterable[tuple[str, Tensor]]:
        """Of every parameter of the model, by its name: its first ``FEW`` values, in its dtype."""

    # What a target that reads here needs nothing of:

    def expect(self, taps: Collection[int], length: int) -> None:  # noqa: B027
        """Told once what ``read`` will be asked for, of documents of up to ``length`` tokens. Raises UserError where it cannot be had."""

    def begin(self, tokens_BT: Tensor, positions_BT: Tensor) -> None:  # noqa: B027
        """Told of a batch that ``read`` will be asked for soon: where passes happen elsewhere, they begin."""

    def close(self) -> None:  # noqa: B027
        """Nothing more will be read."""

    def check_taps(self, taps: Collection[int]) -> None:
        """Raises UserError for a layer that there is not."""
        if wrong := [k for k in taps if not 0 <= k <= self.shape.layers]:
            raise UserError(f"{self.name} has {self.shape.layers} layers, layer {wrong[0]} was tapped")

    @cached_property
    def tokenizer_sha(self) -> str:
        """Fingerprint of the tokenizer's vocabulary: a drafter serves one tokenizer only."""
        return tokenizer_sha(self.tokenizer)

    @cached_property
    def card(self) -> dict[str, Any]:
        """What must agree between a drafter and its target."""
        return target_card(self.shape, self.tokenizer_sha)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Whose outputs these are: the target's card, and a digest of a few weights of every parameter (a fine-tuned copy differs)."""
        sha = hashlib.sha256()
        for name, values in sorted(self.first_values(), key=lambda pair: pair[0]):
            few = values.detach().to("cpu", torch.bfloat16)  # the same whatever dtype it was loaded in
            sha.update(name.encode() + few.view(torch.uint8).numpy().tobytes())
        return {**self.card, "weights": sha.hexdigest()}


def shape_of(config: Any, name: str) -> TargetShape:
    """Raises UserError for a transformers config that says too little."""
    try:
        return TargetShape.of(config)
    except AttributeError as e:
        raise UserError(f"{name}: its config has no {e.name}: not a shape of decoder that is known here") from e


def ends_of(config: Any, embed: nn.Module, head_VD: Tensor, whole: Any) -> TargetEnds:
    """What drafters share, of a (text) config's model. ``head_VD``: the output head, on the device of the embedding."""
    if hasattr(embed, "embed_scale"):  # gemma's: engines share the table with drafters without its scale
        embed = nn.Embedding.from_pretrained(embed.weight)
    softcap, scaled = getattr(config, "final_logit_softcapping", None), logit_scale(config) != 1
    return TargetEnds(embed, scaled_head(config, head_VD), softcap, whole, scaled)


def scaled_head(config: Any, head_VD: Tensor) -> Tensor:
    """The output head times the scale of the logits, where there is one: then a copy."""
    scale = logit_scale(config)
    return head_VD if scale == 1 else head_VD * scale


def logit_scale(config: Any) -> float:
    """What the logits are multiplied by (granite, cohere)."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Around what transformers loads from there: without its bars, and what goes wrong is a UserError of one line."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except UserError:
        raise
    except SafetensorError as e:
        raise UserError(f"target {path}: its weights are damaged or truncated ({e}): download them again") from e
    except Exception as e:  # transformers, the hub and the tokenizers library raise a dozen kinds for what lies in files
        raise UserError(f"target {path} cannot be loaded: {(str(e).strip() or repr(e)).splitlines()[0].rstrip('.')}") from e
    finally:
        logging.enable_progress_bar()
