"""A target with recognizable states, and rows for it, shared by the tests of captured states."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from headstart.data.batch import TargetBatch
from headstart.data.pack import pack
from headstart.data.packed import Document, Packed
from headstart.data.shards import Shards

LAYERS, HIDDEN, TAPS = 3, 6, (0, 2, 3)


class FakeTarget:
    """Its states encode the token, its position and the layer. It counts its passes."""

    def __init__(self, name: str = "fake", scale: float = 1.0) -> None:
        self.shape: Any = SimpleNamespace(layers=LAYERS, hidden_size=HIDDEN)
        self.device, self.passes = torch.device("cpu"), 0
        self.card: dict[str, Any] = {"model_type": name, "hidden_size": HIDDEN}
        self.model = nn.Linear(2, 2)
        nn.init.constant_(self.model.weight, scale)
        nn.init.zeros_(self.model.bias)
        self.fingerprint = {**self.card, "weights": f"{scale}"}

    def begin(self, tokens_BT: Any, positions_BT: Any) -> None:
        """Nothing to begin: this target reads when ``read`` is called."""

    def read(self, tokens_BT: Any, positions_BT: Any, taps: Any) -> Any:
        self.passes += 1
        base_BT = torch.sin(tokens_BT.float() * 0.37) + positions_BT / 7
        layers = {k: base_BT[..., None] * torch.arange(1.0, HIDDEN + 1) + k for k in range(LAYERS + 1)}
        return {k: layers[k] for k in taps}, layers[LAYERS]


def rows(seed: int = 0, documents: int = 40) -> Packed:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(8, 60, documents)
    return pack([Document(rng.integers(0, 90, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes], 32)


def equal(ours: TargetBatch, theirs: TargetBatch) -> bool:
    tensors = [(getattr(ours, k), getattr(theirs, k)) for k in ("tokens_BT", "loss_mask_BT", "positions_BT", "documents_BT", "final_BTD")]
    assert ours.states.keys() == theirs.states.keys()
    tensors += [(ours.states[k], theirs.states[k]) for k in ours.states]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


def decoded(shards: Shards, batch_size: int, **place: int) -> Iterator[TargetBatch]:
    """The batches of a stream with their states, as a training decodes them."""
    return (batch.states_on(torch.device("cpu"), torch.bfloat16) for batch in shards.stored_stream(batch_size, **place))


def in_bf16(batch: TargetBatch) -> TargetBatch:
    batch.states = {k: s.bfloat16() for k, s in batch.states.items()}
    batch.final_BTD = batch.final_BTD.bfloat16()
    return batch
