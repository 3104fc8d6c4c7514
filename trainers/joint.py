"""Trains the target together with its drafter, through LoRA (2106.09685), as in 2401.10774, sections 2.2.2 and 2.3.2.

First the drafter learns alone, then both learn. The drafter reads the hidden states of the adapted target, and its gradient flows into
the adapter. The teacher of both is the target without the adapter, in the pass that all arms share (self-distillation). The adapted
target is a second tree of modules over the same weights, so that the shared target does not change.

Shape suffixes: B batch, T positions, N supervised positions, C positions of a chunk, V vocabulary, A anchors, D target hidden.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.live import look
from headstart.heads.bars import no_bars
from headstart.heads.base import Drafter, TargetEnds
from headstart.heads.errors import UserError
from headstart.heads.files import put_folder
from headstart.inference.decoding.target import Target
from headstart.trainers.learner import Learner, Wanted
from headstart.trainers.losses import LossOut


def check_lora(settings: Mapping[str, Any], target: Target) -> None:
    """Raises UserError if this target cannot be trained with ``trainer.lora``: on several devices, quantized, or without these modules."""
    if target.spread:
        raise UserError("trainer.lora: a target on several devices cannot be trained: take target.device=auto")
    if getattr(target.model, "hf_quantizer", None) is not None or getattr(target.model.config, "quantization_config", None) is not None:
        raise UserError(f"trainer.lora: {target.name} is quantised, its weights cannot be changed: take one in bfloat16")
    modules_of(target, settings["names"])


def modules_of(target: Target, names: Collection[str]) -> list[str]:
    """Full names of the linear modules of the decoder's layers whose last component is in ``names``. Raises UserError for a name that no
    module has.
    """
    # A module with a hook (inference/decoding/mend.py) gets no adapter. In training the hook would change only the module's own output,
    # but after LoRA is merged into the weights it would change the sum of both.
    inside = {id(m) for m in target.layers.modules() if not m._forward_hooks}
    linear = {n: n.rpartition(".")[2] for n, m in target.model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    there = ", ".join(sorted(set(linear.values()))) or "none"
    for name in names:
        if name not in linear.values():
            raise UserError(f"trainer.lora.names: no linear module of the layers of {target.name} is called {name!r}; there are {there}")
    return [place for place, name in linear.items() if name in names]


class Joint(Learner):
    """A ``Learner`` that also trains its target. ``lora`` has ``rank`` and ``alpha`` of the adapter, the ``names`` of the modules that get
    it, its peak ``lr``, ``start`` (the share of the steps in which the drafter learns alone), and ``weight``, the weight of a position's
    KL(original, adapted) relative to a guess of depth 1. (With a weight that rises from 0 the target first drifts away and ends farther
    off, for a drafter that is hardly better.) Raises UserError if drafter or target cannot be trained this way.
    """

    def __init__(self, drafter: Drafter, lora: dict[str, Any], **loss: Any) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(drafter, **loss)
        if not drafter.taps:
            raise UserError(f"trainer.lora: head {drafter.config['head']} reads no state of the target, so it cannot change it")
        original = drafter.ends.model
        target = Target(original, frozen=False)
        check_lora(lora, target)
        self.settings = lora
        model = copy.deepcopy(original, {id(p): p for p in original.parameters()})  # a copy of the modules that shares the weights
        config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=modules_of(target, lora["names"]))
        self._models = [original, get_peft_model(model, config)]  # in a list, so that torch does not register them as submodules
        self.target = Target(model, name="the adapted target", frozen=False)
        self.lora = nn.ParameterDict({n.replace(".", "/"): p for n, p in model.named_parameters() if p.requires_grad})

    @property
    def trained(self) -> nn.Module:
        """The module that is trained and whose weights a checkpoint holds: the drafter and the adapter."""
        return self

    def optimizers(self, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
        """One optimizer for the target's LoRA matrices, which have their own learning rate."""
        lr = self.settings["lr"]
        return [torch.optim.AdamW([{"params": list(self.lora.values()), "peak_lr": lr}], lr=lr, betas=betas, weight_decay=0.0, fused=True)]

    def phase(self, done: float) -> tuple[bool, ...]:
        """As ``Learner.phase``; before ``start`` the target does not learn."""
        return (*super().phase(done), done < self.settings["start"])

    def forward(self, batch: TargetBatch, figures: bool = True, done: float = 1.0, wanted: Wanted | None = None) -> LossOut:
        """As ``Learner.forward``. ``batch`` holds the states of the original target. In evaluation the teacher is the adapted target,
        because it will verify the guesses.
        """
        if self.training and done < self.settings["start"]:
            out = super().forward(batch, figures, done, wanted)
            # DistributedDataParallel waits for every gradient. As long as all are zero, AdamW leaves the adapter unchanged
            out.loss_sum = out.loss_sum + 0.0 * sum(p.sum() for p in self.lora.values())
            return out
        states, final_BTD = self.target.read_with_grad(batch.tokens_BT, batch.positions_BT, self.drafter.taps)
        if not self.training:
            return super().forward(replace(batch, states=states, final_BTD=final_BTD), figures, done, wanted)
        out = super().forward(replace(batch, states=states), figures, done, wanted)
        mask_BT = batch.supervised(0)
        apart = divergence(batch.final_BTD[mask_BT], final_BTD[mask_BT], self.target.ends, self.chunk)
        out.loss_sum = out.loss_sum + self.settings["weight"] * apart
        if figures:
            out.also["target_kl"] = float(apart.detach()), int(mask_BT.sum())
        return out

    def save(self, run: Path, tokenizer: Any) -> Path:
        """Write RUN/adapter (peft's format) and RUN/target (the target with the adapter merged, as transformers loads it). Returns the
        latter's path.

        Raises UserError for weights that are not finite, and if a folder cannot be written, which then keeps its earlier content.
        """
        from peft import PeftModel, get_peft_model_state_dict

        original, adapted = self._models
        assert isinstance(adapted, PeftModel)
        weights = original.state_dict()
        for name, module in self.target.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                base = module.get_base_layer().weight.detach()
                changed = (base.float() + module.get_delta_weight("default").detach().float()).to(base.dtype)
                if not changed.isfinite().all():
                    raise UserError(f"not saved: {name} of the target holds NaN or infinite values (lower trainer.lora.lr)")
                weights[f"{name}.weight"] = changed

        def write_target(folder: Path) -> None:
            original.save_pretrained(folder, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

        def write_adapter(folder: Path) -> None:
            tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
            adapted.peft_config["default"].save_pretrained(str(folder))

        try:
            with quiet():
                put_folder(run / "adapter", write_adapter)
                put_folder(run / "target", write_target)
        except OSError as e:
            raise UserError(f"the changed target cannot be written into {run} ({e}): free some space and run the same command again") from e
        return run / "target"


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, saving shows no progress bar per shard, and deepspeed, which gets imported, logs no hardware warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with no_bars():
            yield
    finally:
        logging.disable(before)


def divergence(original_ND: Tensor, adapted_ND: Tensor, ends: TargetEnds, chunk: int) -> Tensor:
    """KL(original, adapted) in nats, summed over N positions, from the final states [N, D] of both. Logits exist for ``chunk`` positions
    at a time and are recomputed in the backward pass.
    """

    def part(original_CD: Tensor, adapted_CD: Tensor) -> Tensor:
        log_p_CV, log_q_CV = (F.log_softmax(ends.logits(x).float(), dim=-1) for x in (original_CD, adapted_CD))
        return F.kl_div(log_q_CV, log_p_CV, reduction="sum", log_target=True)

    with torch.autocast(adapted_ND.device.type, enabled=False):
        pairs = zip(original_ND.split(chunk), adapted_ND.split(chunk), strict=True)
        return torch.stack([checkpoint(part, p, q, use_reentrant=False) for p, q in pairs] or [adapted_ND.sum() * 0.0]).sum()


@torch.no_grad()
def how_changed(original: Target, changed: Target, batches: list[TargetBatch], prompts: list[list[int]], chunk: int) -> dict[str, float]:
    """How far the changed target is from the original, over held-out rows, or over the prompts if there are none. Per supervised position:
    ``kl``, KL(original, changed) in nats, and ``other_token``, the share of positions with another most likely token.
    """
    apart = others = count = 0.0
    for batch in (b.to(original.device) for b in batches or [_prompt(original, prompt) for prompt in prompts]):
        mask_BT = batch.supervised(0)
        first_ND, second_ND = batch.final_BTD[mask_BT], look(batch, changed, ()).final_BTD[mask_BT]
        apart, count = apart + float(divergence(first_ND, second_ND, original.ends, chunk)), count + len(first_ND)
        for p_CD, q_CD in zip(first_ND.split(chunk), second_ND.split(chunk), strict=True):
            others += int((original.logits(p_CD).argmax(-1) != changed.logits(q_CD).argmax(-1)).sum())
    return {"kl": apart / max(count, 1), "other_token": others / max(count, 1)}


def _prompt(target: Target, prompt: list[int]) -> TargetBatch:
    tokens_1T = torch.tensor([prompt])
    return look(TokenBatch(tokens_1T, tokens_1T >= 0, torch.arange(len(prompt))[None], torch.zeros_like(tokens_1T)), target, ())
