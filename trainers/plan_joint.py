"""What ``trainer.lora`` adds to a plan: the adapter, and a second pass of the target, through which gradients flow (trainers/joint.py).

It is counted like the drafter (trainers/plan.py): the adapted target runs without values, and what autograd saves of its pass is added up.
No shape suffixes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from headstart.heads.base import Drafter
from headstart.heads.visibility import ChainSees
from headstart.inference.decoding.target import Target
from headstart.trainers.joint import modules_of
from headstart.trainers.operations import Operations
from headstart.trainers.shapes import Kept, without_numbers, without_weights


class Adapted(NamedTuple):
    """The needs of an adapted target in training, besides those of its drafter."""

    trained: int = 0  # parameters of the adapter, in fp32
    kept: float = 0.0  # bytes: tensors that autograd saves of the pass, and what the pass returns
    loss: float = 0.0  # bytes of the divergence's buffers
    flops: float = 0.0  # of one micro-batch, forward and backward, averaged over the run


def adapted(model: Any, drafter: Drafter, arm: dict[str, Any], trainer: dict[str, Any], half: bool, kind: torch.dtype) -> Adapted:
    """Count the joint training of ``model``, a target without values, under its FakeTensorMode. ``arm``: head, loss and trainer of the
    drafter, with ``trainer.lora``. ``kind``: the target's dtype. Raises UserError for a module that the target does not have.
    """
    from peft import LoraConfig, get_peft_model

    lora, shape, B, T = arm["trainer"]["lora"], drafter.shape, trainer["batch_size"], trainer["length"]
    modules = modules_of(Target(model, frozen=False), lora["names"])
    with unset_fake_temporarily(), torch.device("meta"):  # peft moves its matrices, which FakeTensorMode does not allow
        copy = without_weights(model.config).to(kind)
        get_peft_model(copy, LoraConfig(r=lora["rank"], target_modules=modules))
    without_numbers(copy)
    kept = Kept([*copy.parameters(), *copy.buffers()])
    positions = torch.arange(T).expand(B, -1)
    inputs = {"input_ids": torch.zeros(B, T, dtype=torch.int64), "position_ids": positions, "use_cache": False}
    with Operations() as counts, kept.saving(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        states, final = Target(copy, frozen=False).reader.run_by(ChainSees(None), 0, positions, drafter.taps, **inputs)
    for x in (*states.values(), final):
        kept.add(x)
    trained = sum(p.numel() for p in copy.parameters() if p.requires_grad)
    finals = 2 * B * T * shape.hidden_size * kind.itemsize  # of both targets, at the supervised positions
    # log-probabilities of both, probabilities, and two gradients, in fp32
    loss = 4.0 * min(arm["loss"]["chunk"], B * T) * shape.vocab_size * 5
    # The backward pass takes as many operations as the forward pass for frozen weights, which need only the gradient of their inputs, twice
    # as many for the adapter, and two and a half times as many for attention. Logits: both targets' twice, because the backward pass
    # computes them again, and one backward product, for the adapted target.
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * T * T * B
    logits = 5 * 2.0 * B * T * shape.hidden_size * shape.vocab_size
    flops = 2 * counts.count + 2.0 * trained * B * T + 1.5 * attention + logits
    return Adapted(trained, kept.total + finals, loss, (1 - lora["start"]) * flops)
