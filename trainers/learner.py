"""Unroll and loss of one drafter as one module, the function that a training step differentiates.

Shape suffixes: B batch, T positions, A anchors, N drafts, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from headstart.data.batch import ReplayBatch, TargetBatch, TokenBatch
from headstart.heads.base import Draft, Drafter
from headstart.heads.errors import UserError, warn_once
from headstart.heads.unembedding import Unembedding
from headstart.heads.unroll import unroll
from headstart.inference.reports.walk import Walk, walk_rows
from headstart.trainers.beside import confidence_loss, feature_loss
from headstart.trainers.losses import LossOut, fused_loss
from headstart.trainers.metrics import by_depth
from headstart.trainers.on_policy import check_on_policy
from headstart.trainers.selector import LISTED
from headstart.trainers.terms import BESIDE, Constants, check_kernel, check_loss


@dataclass
class Wanted:
    """Which guesses of a micro-batch are trained. (Not a tuple: DistributedDataParallel would move its tensors to the device.)"""

    ask_BA: Tensor | None  # the roots to draft from; None: all
    # per depth [B, T] bool: the roots that count (at depth 1 perhaps more than ask_BA). On the CPU, because the loss plans its chunks by it
    supervised: list[Tensor]


class Learner(nn.Module):
    """A drafter's unroll and loss in one ``forward``, so that DistributedDataParallel sees all gradients.

    ``depth``: guesses per root; drafters with a fixed number of depths use theirs. ``terms``: loss term -> weight (trainers/terms.py).
    ``weighting``: a further factor of a (root, depth) pair's weight, besides ``decay``^(depth-1). ``constants``: those of terms and
    weighting that differ from the defaults. ``chunk``: the most rows of draft logits at a time. ``kernel``: see ``terms.kernel_of``.
    ``base_until``: during this share of the training the loss is a mean of two losses: that of the guesses without their correction, whose
    weight falls from 1 to 0, and the full one (2605.29707: the backbone learns first). The term ``base`` adds the loss without the
    correction with a constant weight. ``detach``: see ``unroll``. ``on_policy``: see trainers/on_policy.py. Raises UserError for an unknown
    term, weighting or constant, and for a kernel, ``detach`` or ``on_policy`` that this drafter cannot be trained with.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        depth: int,
        terms: dict[str, float],
        decay: float,
        chunk: int,
        weighting: str = "decay",
        base_until: float = 0.0,
        detach: bool = False,
        constants: Constants = None,
        on_policy: dict[str, Any] | None = None,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if on_policy is not None:
            check_on_policy(on_policy["kind"], drafter)
        if detach and drafter.anchors:
            raise UserError("loss.detach is for drafters whose depths read the states of the depths before: this one makes all in one pass")
        if not drafter.unrolls and (detach or weighting != "decay"):
            what, instead = ("detach=true", "detach=false") if detach else (f"weighting={weighting}", "weighting=decay")
            raise UserError(f"loss.{what} is of chains of guesses, {drafter.config['head']} is trained on single ones: take loss.{instead}")
        check_loss(terms, weighting, constants)
        if terms.keys() <= set(BESIDE):
            ordered = dict.fromkeys(("selector", *LISTED), "orders the candidates that a divergence finds")
            for name, does in (*ordered.items(), ("base", "repeats the divergences")):
                if name in terms:
                    raise UserError(f"loss.terms.{name} {does}: name a divergence too, such as kl")
        check_kernel(kernel, terms, next(drafter.parameters()).device)
        self.drafter, self.decay, self.chunk, self.weighting, self.base_until = drafter, decay, chunk, weighting, base_until
        self.constants, self.detach, self.on_policy, self.kernel = constants, detach, on_policy, kernel
        # a drafter with one head per depth trains all of them: an untrained one would guess nonsense
        self.asked = drafter.max_depth or depth  # guesses of a chain
        self.depth = self.asked if drafter.unrolls else 1  # depths that are trained
        self.beside = {name: terms[name] for name in BESIDE if terms.get(name)}
        self.terms = {name: weight for name, weight in terms.items() if name not in BESIDE}
        self.share = (0, 1)  # (rank, number of processes): which rows of a step this process has
        self.checkpointing = False  # gradient checkpointing of the drafter's depths (heads/unroll.py)

    @property
    def trained(self) -> nn.Module:
        """The module whose weights a checkpoint holds."""
        return self.drafter

    def optimizers(self, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
        """Optimizers of what is trained besides the drafter: none here."""
        return []

    def anchors(self, batch: TokenBatch) -> Tensor | None:
        """[B, A] roots to train at, drawn at random in each row, supervised ones first; None: all."""
        if isinstance(batch, ReplayBatch):  # each row has one root
            return batch.root_B[:, None] if self.drafter.anchors else None
        wanted, T = self.drafter.anchors, batch.tokens_BT.shape[1]
        if not wanted or wanted >= T or not self.drafter.training:
            return None
        rank, world = self.share
        score_BT = torch.rand(world, *batch.tokens_BT.shape)[rank] + batch.supervised(1).cpu()
        return score_BT.topk(wanted).indices.sort().values.to(batch.tokens_BT.device)

    def slices(self, batch: TokenBatch) -> list[Tensor | None]:
        """The supervised roots of a batch for evaluation, in parts [B, A]. To bound memory, a part has at most as many roots as a training
        step. [None]: all roots at once.
        """
        most = self.drafter.anchors
        if not most or most >= batch.tokens_BT.shape[1]:
            return [None]
        counts_BT = torch.stack(self.supervised(batch, None)).any(0)
        order_BT = counts_BT.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(counts_BT.sum(1).max()))]
        return [ask_BA.sort(1).values.to(batch.tokens_BT.device) for ask_BA in order_BT.split(most, dim=1)]

    def supervised(self, batch: TokenBatch, ask_BA: Tensor | None) -> list[Tensor]:
        """For each depth a bool mask [B, T] on the CPU: the roots in ``ask_BA`` (None: all roots) that are supervised at that depth."""
        masks_KBT = torch.stack([batch.supervised(d) for d in range(1, self.depth + 1)]).cpu()  # the host waits for the device once
        if ask_BA is not None:
            masks_KBT = masks_KBT & torch.zeros_like(masks_KBT[0]).scatter(1, ask_BA.cpu(), True)
        return list(masks_KBT)

    def wanted(self, batch: TokenBatch) -> Wanted:
        """The guesses of a batch that a step trains. For drafters with anchors the roots are drawn at random, except at depth 1 if the
        drafter makes that guess at every root (``first_everywhere``).
        """
        ask_BA = self.anchors(batch)
        supervised = self.supervised(batch, ask_BA)
        if ask_BA is not None and self.drafter.first_everywhere:  # (of a replayed round the only root is an anchor)
            supervised[0] = batch.supervised(1).cpu()
        return Wanted(ask_BA, supervised)

    def phase(self, done: float) -> tuple[bool, ...]:
        """What a step does when the share ``done`` of the training is over: steps of one phase take equally many operations."""
        return (done < self.base_until,)

    def count(self, wanted: Wanted) -> float:
        """A batch's part of the loss's divisor: the number of supervised (root, depth) pairs, weighted by decay^(depth-1)."""
        counts_K: list[int] = torch.stack(wanted.supervised).sum((1, 2)).tolist()
        return sum(self.decay**k * count for k, count in enumerate(counts_K))

    def forward(self, batch: TargetBatch, figures: bool = True, done: float = 1.0, wanted: Wanted | None = None) -> LossOut:
        """The loss of a batch, undivided. ``done``: the share of the training that is over. ``wanted``: the guesses that count, from the
        method ``wanted``; None: all supervised guesses. ``figures=False`` skips what is only logged. Raises UserError if the drafter lacks
        what a setting needs: a correction, candidates, a confidence, or states of size D.
        """
        wanted = wanted or Wanted(None, self.supervised(batch, None))
        roots, drafter = batch.roots(), self.drafter
        if not torch.is_autocast_enabled(batch.final_BTD.device.type):
            roots = roots.to(next(drafter.parameters()).dtype)
        device, supervised = batch.tokens_BT.device, wanted.supervised
        ask_BA = None if wanted.ask_BA is None else wanted.ask_BA.to(device)
        with record_function("draft"):
            again = self.checkpointing and torch.is_grad_enabled()
            drafts = unroll(drafter, roots, batch.documents_BT, self.depth, ask_BA=ask_BA, checkpointing=again, detach=self.detach)
        unembeddings = [drafter.unembedding(d) for d in range(1, self.depth + 1)]
        some = ask_BA is not None and ask_BA.shape[1] < batch.tokens_BT.shape[1]
        hidden = [draft.first_BTH if some and draft.first_BTH is not None else draft.hidden_BNH for draft in drafts]

        judged = figures or "confidence" in self.beside  # whether matches and acceptance are needed
        ordering = {name: self.beside[name] for name in ("selector", *LISTED) if name in self.beside}
        if ordering and unembeddings[0].candidates is None:
            raise UserError(f"loss.terms.{next(iter(ordering))} needs a drafter that reorders candidates: this one does not")
        if unembeddings[0].listed and not ordering:
            warn_once(f"no term of the loss trains the order of this drafter's candidates: +loss.terms.{next(iter(LISTED))}=0.25 does")
        if not unembeddings[0].listed and (lacking := ordering.keys() & LISTED.keys()):
            raise UserError(f"loss.terms.{min(lacking)} needs a drafter that lists the scores of its candidates: this one does not")

        def loss_of(hidden: list[Tensor], unembeddings: list[Unembedding]) -> LossOut:
            target = (batch.final_BTD, drafter.ends, batch.tokens_BT, supervised, self.terms, self.decay, self.chunk)
            chosen: dict[str, Any] = dict(weighting=self.weighting, constants=self.constants, kernel=self.kernel, ordering=ordering)
            with record_function("loss"):
                return fused_loss(hidden, unembeddings, *target, figures=judged, ask_BA=ask_BA, **chosen)

        out = loss_of(hidden, unembeddings)
        fading = max(0.0, 1 - done / self.base_until) if self.base_until and self.training else 0.0
        if fading or "base" in self.beside:
            _check_corrects(unembeddings[0], "base_until" if fading else "terms.base")
            backbone = [u.parts(h)[0] for u, h in zip(unembeddings, hidden, strict=True)]
            plain = loss_of(backbone, [u.uncorrected() for u in unembeddings])
            out.loss_sum = (1 - fading) * out.loss_sum + (fading + self.beside.get("base", 0.0)) * plain.loss_sum
        self._add_beside(out, drafts, batch, supervised, ask_BA)
        if figures and self.asked > self.depth:  # a deeper guess equals a later root's guess of depth 1
            later = [torch.roll(out.match_KBT[0], -d, dims=-1) & batch.supervised(d + 1) for d in range(self.asked)]
            out.match_KBT = torch.stack(later)
        return out

    def _add_beside(self, out: LossOut, drafts: list[Draft], batch: TargetBatch, supervised: list[Tensor], ask_BA: Tensor | None) -> None:
        """Add the terms besides the divergences to the loss. Raises UserError if the drafter does not have what they judge."""
        confidences = [draft.confidence_BN for draft in drafts]
        if "confidence" in self.beside:
            if any(c is None for c in confidences):
                raise UserError("loss.terms.confidence needs a drafter that says how sure it is: this one does not")
            masks = [mask.to(batch.tokens_BT.device) for mask in supervised]
            sure = confidence_loss(confidences, out.alpha_KBT, masks, self.decay, ask_BA)  # type: ignore[arg-type]
            out.loss_sum = out.loss_sum + self.beside["confidence"] * sure
        elif unused := [c.sum() for c in confidences if c is not None]:  # DistributedDataParallel waits for their gradient
            out.loss_sum = out.loss_sum + 0.0 * sum(unused)
        if "feature" in self.beside:
            states = [draft.state_BNH for draft in drafts]
            if ask_BA is not None or any(s is None or s.shape[-1] != batch.final_BTD.shape[-1] for s in states):
                raise UserError("loss.terms.feature compares the drafter's states with the target's: this drafter has none of that size")
            near = feature_loss(states, batch.final_BTD, supervised, self.decay)  # type: ignore[arg-type]
            out.loss_sum = out.loss_sum + self.beside["feature"] * near

    def figures(self, out: LossOut, wanted: Wanted, seen: Seen | None = None) -> dict[str, float]:
        """Figures of a micro-batch; with ``seen``, of all micro-batches added to it so far, this one included. They are the expected length
        of a chain and the acceptance by depth, walked round by round as decoding does (with anchors: means over the anchors), and by depth
        the accuracy and the loss.
        """
        seen = seen or Seen()
        roots_BT, match_KBT = wanted.supervised[0], out.match_KBT.cpu()
        if wanted.ask_BA is None:
            walked = walk_rows(match_KBT, roots_BT)
        else:
            roots_BT = roots_BT & torch.zeros_like(roots_BT).scatter(1, wanted.ask_BA.cpu(), True)
            reached_K = match_KBT.int().cumprod(0)[:, roots_BT].sum(1)
            rounds = int(roots_BT.sum())
            walked = Walk(rounds, rounds + int(reached_K.sum()), reached_K.tolist())
        seen.walked.add(walked)
        seen.means.add(out)
        by_depths = _acceptance(seen.walked, "train") | seen.means.figures("train")
        for name, (total, count) in out.also.items():
            before, over = seen.also.get(name, (0.0, 0))
            seen.also[name] = before + total, over + count
        also = {name: total / max(1, count) for name, (total, count) in seen.also.items()}
        return {"expected_length": seen.walked.expected_length, **by_depths, **also}


def _check_corrects(unembedding: Unembedding, name: str) -> None:
    """Raises UserError for ``loss.NAME`` where a drafter does not correct the guesses of a backbone that the loss could teach apart."""
    lacks = "has no correction" if unembedding.candidates is None else "learns its backbone by the divergences anyway"
    if unembedding.correction_VR is None or unembedding.candidates is not None:
        raise UserError(f"loss.{name} is for drafters that correct the guesses of a backbone: this one {lacks}")


@torch.no_grad()
def evaluate(learner: Learner, batches: list[TargetBatch], depth: int | None = None) -> dict[str, float]:
    """Loss, expected length and acceptance by depth over held-out text, teacher-forced. (The text is the data's, not generated.)

    The expected length is that of a chain of ``depth`` guesses; None: as many as the learner unrolls. Only one batch at a time is on the
    drafter's device.
    """
    training, device = learner.drafter.training, next(learner.drafter.parameters()).device
    learner.eval()
    loss, count, walked, means = 0.0, 0.0, Walk(), _Means()
    for batch in (batch.to(device) for batch in batches):
        match_KBT = None
        for ask_BA in learner.slices(batch):
            out = learner(batch, wanted=Wanted(ask_BA, learner.supervised(batch, ask_BA)))
            match_KBT = out.match_KBT if match_KBT is None else match_KBT | out.match_KBT
            loss, count = loss + float(out.loss_sum), count + float(out.weight_sum)
            means.add(out)
        assert match_KBT is not None
        walked.add(walk_rows(match_KBT[:depth].cpu(), batch.supervised(1)))
    learner.train(training)
    by_depths = _acceptance(walked, "heldout") | means.figures("heldout")
    return {"heldout_loss": loss / max(count, 1.0), "heldout_expected_length": walked.expected_length, **by_depths}


def _acceptance(walked: Walk, where: str) -> dict[str, float]:
    """For each depth the share of rounds in which its guess and all before it are right."""
    return by_depth([reached / max(walked.rounds, 1) for reached in walked.reached], where, "acceptance")


class _Means:
    """Mean loss and accuracy by depth, over all supervised guesses, whether or not the guesses before them are right."""

    def __init__(self) -> None:
        self.sums_3K: Tensor | None = None  # sums of the loss, of right guesses, and of guesses

    def add(self, out: LossOut) -> None:
        right_K = out.match_KBT[: len(out.count_K)].sum((1, 2))
        own_3K = torch.stack([out.plain_K.double(), right_K, out.count_K]).cpu()
        self.sums_3K = own_3K if self.sums_3K is None else self.sums_3K + own_3K

    def figures(self, where: str) -> dict[str, float]:
        """The means, under the names of the curves (trainers/metrics.py)."""
        if self.sums_3K is None:
            return {}
        loss_K, right_K, count_K = self.sums_3K
        shares = by_depth((right_K / count_K.clamp(min=1)).tolist(), where, "accuracy")
        return shares | {f"{where}/loss_depth/{d}": loss for d, loss in enumerate((loss_K / count_K.clamp(min=1)).tolist(), start=1)}


@dataclass
class Seen:
    """Figures added up over the micro-batches of a step."""

    walked: Walk = field(default_factory=Walk)
    means: _Means = field(default_factory=_Means)
    also: dict[str, tuple[float, int]] = field(default_factory=dict)  # as in ``LossOut``
