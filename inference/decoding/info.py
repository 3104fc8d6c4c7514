"""What is known of a target without running it: its shape, tokenizer, embedding, output head and fingerprint.

Two classes provide this: ``Target`` is a loaded model; ``StoredTarget`` reads the model's files, and loads the layers only when a pass
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

from headstart.heads.bars import no_bars
from headstart.heads.base import TargetEnds, TargetShape
from headstart.heads.errors import UserError, first_line
from headstart.heads.kinds import reads_images
from headstart.heads.seal import target_card, tokenizer_sha

if TYPE_CHECKING:
    from headstart.inference.decoding.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW = 64  # how many of the first values of every parameter go into the fingerprint


def rotations(config: Any) -> list[dict[str, Any]]:
    """A transformers config's ``rope_parameters``: one entry for each kind of layer where kinds rotate differently (gemma3), else one."""
    found = getattr(config, "rope_parameters", None) or {}
    return [each for each in found.values() if isinstance(each, dict)] or [dict(found)]


def rope_switch_of(config: Any) -> int | None:
    """The length in tokens above which a target with LongRoPE (2402.13753) uses other rotary frequencies. A sequence that crosses it would
    have to be read again from its start, because its cached keys have the old rotations. None for targets without LongRoPE. ``config``:
    transformers' config of the text model.
    """
    long = (rope for rope in rotations(config) if rope.get("rope_type") == "longrope")
    return next((int(rope["original_max_position_embeddings"]) for rope in long), None)


class TargetInfo(ABC):
    """What drafters need of a target. They are built for it, attached to it, saved with its card and checked against it."""

    name: str
    tokenizer: Any
    shape: TargetShape
    ends: TargetEnds
    device: torch.device  # of the embedding
    dtype: torch.dtype
    sharded: Any = False  # whether the layers are sharded over several processes
    apart = False  # whether each of these processes reads rows of its own (``Target.read_apart``)

    @property
    @abstractmethod
    def rope_switch(self) -> int | None:
        """The length in tokens above which its rotations change, or None: see ``rope_switch_of``."""

    @abstractmethod
    def opened(self) -> Target:
        """The model, ready for passes; loaded at the first call. Raises UserError where it cannot be loaded."""

    @abstractmethod
    def first_values(self) -> Iterable[tuple[str, Tensor]]:
        """The name of every parameter that reads text, with its first ``FEW`` values, in the parameter's dtype."""

    # These three serve targets whose passes run in another process or on another machine. For a target in this process they do nothing.

    def expect(self, taps: Collection[int], length: int) -> None:  # noqa: B027
        """Announce the taps and the longest document (in tokens) of later calls of ``read``. Raises UserError where these are refused."""

    def begin(self, tokens_BT: Tensor, positions_BT: Tensor) -> None:  # noqa: B027
        """Announce a batch that ``read`` will be called with soon, so that a pass elsewhere can begin."""

    def close(self) -> None:  # noqa: B027
        """Announce that nothing more will be read."""

    def check_taps(self, taps: Collection[int]) -> None:
        """Raises UserError for a tap outside 0..layers."""
        if wrong := [k for k in taps if not 0 <= k <= self.shape.layers]:
            raise UserError(f"{self.name} has {self.shape.layers} layers, layer {wrong[0]} was tapped")

    @cached_property
    def tokenizer_sha(self) -> str:
        """Digest of the tokenizer's vocabulary: a drafter serves one tokenizer only."""
        return tokenizer_sha(self.tokenizer)

    @cached_property
    def card(self) -> dict[str, Any]:
        """The properties in which a drafter and its target must agree."""
        return target_card(self.shape, self.tokenizer_sha)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the target: its card, and a digest of a few weights of every parameter. Even a fine-tuned copy has another digest."""
        sha = hashlib.sha256()
        for name, values in sorted(self.first_values(), key=lambda pair: pair[0]):
            few = values.detach().to("cpu", torch.bfloat16)  # so that the digest does not depend on the dtype that the target was loaded in
            sha.update(name.encode() + few.view(torch.uint8).numpy().tobytes())
        return {**self.card, "weights": sha.hexdigest()}


def read_names(model: Any) -> tuple[str, ...]:
    """How the names of the parameters begin that a text is read with: the language model's and the output head's of a multimodal model,
    all ("") of a causal LM.
    """
    if not reads_images(model.config):
        return ("",)
    parts = model.get_decoder(), model.get_output_embeddings()
    return tuple(name and f"{name}." for name, module in model.named_modules() if any(module is part for part in parts))


def shape_of(config: Any, name: str) -> TargetShape:
    """The shape of the target with this transformers config. Raises UserError for a config that lacks a needed value."""
    try:
        return TargetShape.of(config)
    except AttributeError as e:
        raise UserError(f"{name}: its config has no {e.name}: not a shape of decoder that is known here") from e


def ends_of(config: Any, embed: nn.Module, head_VD: Tensor, whole: Any, tokenizer: Any) -> TargetEnds:
    """The embedding and output head that drafters share. ``config``: of the model. ``head_VD``: on the embedding's device. ``whole`` and
    ``tokenizer``: as in ``TargetEnds``.
    """
    text = config.get_text_config()
    if hasattr(embed, "embed_scale"):  # gemma scales embeddings; engines share the unscaled table (exceptions: heads/engines.py)
        embed = nn.Embedding.from_pretrained(embed.weight)
    softcap, scaled = getattr(text, "final_logit_softcapping", None), logit_scale(text) != 1
    return TargetEnds(embed, scaled_head(text, head_VD), softcap, whole, scaled, config=config, tokenizer=tokenizer)


def scaled_head(config: Any, head_VD: Tensor) -> Tensor:
    """The output head times the target's scale of logits: a copy, or ``head_VD`` itself where the scale is 1."""
    scale = logit_scale(config)
    return head_VD if scale == 1 else head_VD * scale


def logit_scale(config: Any) -> float:
    """The factor that the target multiplies its logits by (granite, cohere, falcon_h1, hyperclovax); 1 for others."""
    factor: float = (getattr(config, "logit_scale", None) or 1.0) * (getattr(config, "lm_head_multiplier", None) or 1.0)
    scaling: float = getattr(config, "logits_scaling", None) or 1.0  # most kinds divide by it
    return factor * scaling if config.model_type == "hyperclovax" else factor / scaling


@contextmanager
def loading(path: str) -> Iterator[None]:
    """A context for loading from ``path`` with transformers: without progress bars, and every error becomes a UserError of one line."""
    try:
        with no_bars():
            yield
    except UserError:
        raise
    except SafetensorError as e:
        raise UserError(f"target {path}: its weights are damaged or truncated ({e}): download them again") from e
    except Exception as e:  # transformers, the hub and the tokenizers library raise a dozen kinds for what lies in files
        if "scaled_dot_product_attention" in str(e):
            raise UserError(f"target {path} is not for torch's attention: take target.attention=eager") from e
        raise UserError(f"target {path} cannot be loaded: {first_line(e).rstrip('.')}") from e
