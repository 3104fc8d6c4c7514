"""Losses of a drafter, computed from its hidden states in chunks. A [tokens, vocabulary] tensor of the whole batch never exists.

The teacher (the target) at position p supervises the guess of depth d of root p - d, for all depths d. The loss therefore walks over
positions in chunks (trainers/chunks.py). For each chunk the teacher logits are computed once. One matrix product gives the draft logits
of all depths that share an unembedding. All chunks share one buffer for them. After a chunk only the gradients of the product's two
factors remain: those of the hidden states and of the unembedding.
The softmax is fp32. After the first mask is read the host does not wait for the device.

Shape suffixes: B batch, T positions, P = B * T, A roots with drafts (all T, or the anchors), K depths, H drafter hidden, D target
hidden, C positions of a chunk, R draft rows of a chunk, S positions of a strip, V vocabulary of the drafter.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import TargetEnds
from headstart.heads.products import add, fill, times
from headstart.heads.unembedding import Unembedding
from headstart.inference.decoding.sampling import wide
from headstart.trainers.chunks import Chunk, chunks, guesses_of, keep_freed_memory, strip_of
from headstart.trainers.divergences import Divergence, Teacher, nll, overlap
from headstart.trainers.known import Known
from headstart.trainers.selector import Selection
from headstart.trainers.terms import Constants, Weights, kernel_of, term, weighting_of

KERNELS = {"triton": "headstart.trainers.kernel", "native": "headstart.trainers.native_kernel"}


@dataclass
class LossOut:
    """Sums over supervised (root, depth) pairs, not yet divided by their weight. Only ``loss_sum`` has a gradient.

    A target token outside a trimmed draft vocabulary counts as a rejection.
    """

    loss_sum: Tensor  # scalar, weighted
    weight_sum: Tensor  # scalar, sum of decay^(depth-1): divide loss_sum by it, both summed over micro-batches and processes
    match_KBT: Tensor  # bool: root t's most likely guess of depth k+1 is the target's; False where unsupervised
    count_K: Tensor  # supervised roots per depth
    alpha_KBT: Tensor  # acceptance probability of each guess (temperature 1), 0 where unsupervised
    true_KBT: Tensor  # the drafter's probability of the token in the data, 0 where unsupervised
    loss_K: Tensor = field(default_factory=lambda: torch.zeros(0))  # each depth's part of loss_sum: divergences and selector
    plain_K: Tensor = field(default_factory=lambda: torch.zeros(0))  # the same without the weights of the pairs; 0 without figures
    also: dict[str, tuple[float, int]] = field(default_factory=dict)  # further figures for the curves: sum, and number of positions


def fused_loss(
    hidden: list[Tensor],
    unembeddings: list[Unembedding],
    final_BTD: Tensor,
    ends: TargetEnds,
    tokens_BT: Tensor,
    supervised: list[Tensor],
    terms: dict[str, float],
    decay: float,
    chunk: int,
    figures: bool = True,
    ask_BA: Tensor | None = None,
    weighting: str = "decay",
    constants: Constants = None,
    kernel: str = "auto",
    ordering: Mapping[str, float] | None = None,
) -> LossOut:
    """Weighted sum of ``terms`` (divergence name -> weight) over depths 1..K. Each list has one entry per depth.

    ``hidden`` [B, A, H] are the drafts of the roots in ``ask_BA`` (None: of every root). A depth with T rows instead of A, [B, T, H],
    has the drafts of every root. ``supervised`` [B, T] bool: the roots that count; they have a draft. Keep these masks on the CPU, else
    the host waits for the device once. A (root, depth) pair has the weight decay^(depth-1), times that of ``weighting``
    (trainers/terms.py). ``constants`` belong to terms and weighting. At most ``chunk`` rows of draft logits exist at a time (at least
    K; on a GPU more, see chunks.guesses_of). The forward pass computes the gradients and keeps them until ``backward``, which can run
    once. Weights that require no gradient (the target's head) get none. ``figures=False`` skips what is only logged (matches,
    acceptance), which takes a tenth of a step in torch. ``kernel``: see ``terms.kernel_of``.
    Where an unembedding has candidates, ``terms`` judge its uncorrected logits, and trainers/selector.py the order of the candidates.
    ``ordering``: the terms of that order -> their weights. Raises UserError for an unknown term, weighting or constant.
    """
    weighed = [(weight, term(name, constants)) for name, weight in terms.items()]
    weigh, device = weighting_of(weighting, constants), final_BTD.device
    supervised_KBT = torch.stack(supervised)
    # by depth d and teacher position p: whether root p - d is supervised at depth d. On the CPU, because the host plans the chunks by it
    at_KP = torch.stack([F.pad(m, (d, 0))[:, : m.shape[1]] for d, m in enumerate(supervised_KBT.cpu(), start=1)]).flatten(1)
    widest = max(len(u.weight_VH) for u in unembeddings)
    parts = chunks(at_KP, guesses_of(chunk, len(hidden), widest, device), max(1, strip_of(device) // widest), device)
    depth_K1 = torch.arange(len(hidden), device=device, dtype=wide(hidden[0]).dtype)[:, None]
    weight_KP = (decay**depth_K1).expand(-1, tokens_BT.numel())
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        ends = replace(ends, head_VD=ends.head_VD.to(final_BTD.dtype), times=times)  # cast once, not in every chunk
    # x[p+1], the token in the data that the teacher at p predicts
    data_P = F.pad(tokens_BT[:, 1:], (0, 1)).flatten()
    by = kernel_of(kernel, terms, device, (_dtype_of(hidden[0]), final_BTD.dtype))

    def walk(sums: _Sums) -> LossOut:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for part in parts:
                sums.judge(part, ends.logits(final_BTD.flatten(0, 1)[part.positions_C]), data_P[part.positions_C])
        return sums.out(at_KP.sum(1).to(device, non_blocking=True), decay)

    sums = partial(_Sums, unembeddings=unembeddings, parts=parts, shape=tokens_BT.shape, ask_BA=ask_BA, by=by)
    if weigh is not None and torch.is_grad_enabled():
        # the weight of a guess depends on the other depths of its root, which lie in other chunks: a first pass without gradients
        looked = walk(sums([h.detach() for h in hidden], terms=[], in_kernel=Weights.of({}, constants), weight_KP=weight_KP))
        weight_KP = weight_KP * weigh(looked.alpha_KBT, looked.true_KBT, supervised_KBT.to(device)).flatten(1)
    in_kernel = None if by == "torch" else Weights.of(terms, constants)
    return walk(sums(hidden, terms=weighed, in_kernel=in_kernel, weight_KP=weight_KP, ordering=ordering, figures=figures))


def _dtype_of(hidden: Tensor) -> torch.dtype:
    """The dtype of the draft logits."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _Sums:
    """Accumulates one pass of ``fused_loss`` over all chunks: the sums, and the gradients of its inputs."""

    def __init__(
        self, hidden: list[Tensor], *, unembeddings: list[Unembedding], parts: list[Chunk], shape: tuple[int, ...],
        terms: list[tuple[float, Divergence]], in_kernel: Weights | None, weight_KP: Tensor, ask_BA: Tensor | None, by: str,
        ordering: Mapping[str, float] | None = None, figures: bool = True,
    ) -> None:  # fmt: skip
        """``by``: what computes the loss (``terms.kernel_of``); ``in_kernel``: the same terms, as the kernels take them."""
        self.hidden, self.terms, self.weight_KP, self.figures, self.in_kernel = hidden, terms, weight_KP, figures, in_kernel
        self.kernel = None if by == "torch" else importlib.import_module(KERNELS[by])
        self.shape, self.ordering, device = shape, ordering or {}, hidden[0].device
        self.dtype = _dtype_of(hidden[0])
        # each root's row in ``hidden`` (-1: none), for depths that have rows of the asked roots alone; None: every root is asked
        self.row_P: Tensor | None = None
        self.asked = shape[1] if ask_BA is None else ask_BA.shape[1]
        if ask_BA is not None:
            self.row_P = torch.full((shape[0] * shape[1],), -1, device=device)
            places_BA = ask_BA + shape[1] * torch.arange(shape[0], device=device)[:, None]
            self.row_P[places_BA.flatten()] = torch.arange(ask_BA.numel(), device=device)
        self.weights = list({id(w): w for u in unembeddings for w in u.blocks}.values())
        self.grad = bool(terms) and torch.is_grad_enabled() and any(x.requires_grad for x in [*hidden, *self.weights])
        self.cast = {id(w): w.detach().to(self.dtype) for w in self.weights}
        self.grads_BAH = [torch.zeros(h.shape, dtype=h.dtype, device=device) if self.grad and h.requires_grad else None for h in hidden]
        self.grads_VH = {id(w): torch.zeros_like(w, dtype=wide(w).dtype) for w in self.weights if self.grad and w.requires_grad}
        # depths that share a matrix and a vocabulary are computed in one product
        self.groups: dict[tuple[int, ...], tuple[Unembedding, list[int]]] = {}
        for k, u in enumerate(unembeddings):
            self.groups.setdefault((*map(id, u.blocks), id(u.ids_V)), (u, []))[1].append(k)
        self.vocabularies = {id(u.ids_V): u.ids_V for u in unembeddings}
        numbers = max((sum(part.counts_K) for part in parts), default=0) * max(len(u.weight_VH) for u in unembeddings)
        self.room = torch.empty(numbers, dtype=self.dtype, device=device)  # the chunks share it for their logits
        if device.type == "cpu" and numbers > strip_of(device):
            keep_freed_memory()
        self.loss_K, self.plain_K = (torch.zeros(len(hidden), dtype=wide(hidden[0]).dtype, device=device) for _ in range(2))
        self.match_KP = torch.zeros(weight_KP.shape, dtype=torch.bool, device=device)
        self.alpha_KP, self.true_KP = (torch.zeros(weight_KP.shape, dtype=self.loss_K.dtype, device=device) for _ in range(2))

    def judge(self, chunk: Chunk, said_CV: Tensor, data_C: Tensor) -> None:
        """Add a chunk's losses and gradients. ``said_CV``: the target's logits (its whole vocabulary) at the chunk's positions;
        ``data_C``: the tokens in the data that follow them.
        """
        roots, places = chunk.root_R.split(chunk.counts_K), chunk.said_R.split(chunk.counts_K)
        row_P, A = self.row_P, self.asked
        asked = roots if row_P is None else [row_P[x] if h.shape[1] == A else x for x, h in zip(roots, self.hidden, strict=True)]
        products, logits, used = [], dict[int, Tensor](), 0
        for unembedding, depths in self.groups.values():
            hidden_RH = torch.cat([self.hidden[k].flatten(0, 1)[asked[k]].to(self.dtype) for k in depths])
            parts = unembedding.parts(hidden_RH)
            size = len(hidden_RH) * len(unembedding.weight_VH)
            logits_RV = self.room[used : used + size].view(len(hidden_RH), len(unembedding.weight_VH))
            used += size
            fill(logits_RV, parts[0], self.cast[id(unembedding.weight_VH)])
            selection = None
            if unembedding.candidates is not None:  # before the judge overwrites the logits
                place_R, matrix = torch.cat([places[k] for k in depths]), self.cast.get(id(unembedding.correction_VR))
                rest = parts[1:], matrix, said_CV, place_R, data_C[place_R], self.ordering
                selection = Selection.of(logits_RV, unembedding.candidates, *rest)
            else:
                for part_RH, block in zip(parts[1:], unembedding.blocks[1:], strict=True):
                    logits_RV.addmm_(part_RH, self.cast[id(block)].T)
            logits |= zip(depths, logits_RV.split([chunk.counts_K[k] for k in depths]), strict=True)
            products.append((unembedding, depths, parts, logits_RV, selection))
        judge = self._in_strips if self.kernel is None else self._in_a_kernel
        judge(chunk, said_CV, data_C, roots, places, logits)
        for unembedding, depths, parts, grad_RV, selection in products:
            done = list[Tensor]()
            if selection is not None:
                done = self._select(selection, id(unembedding.correction_VR), depths, roots, grad_RV, parts[1:])
                if self.figures:
                    self._look(selection, said_CV, data_C, depths, roots, places)
            if self.grad:  # the judge has overwritten the logits with their gradient
                self._products(unembedding, depths, asked, parts, grad_RV, done)

    def _in_a_kernel(
        self, chunk: Chunk, said_CV: Tensor, data_C: Tensor, roots: Sequence[Tensor], places: Sequence[Tensor], logits: dict[int, Tensor]
    ) -> None:
        assert self.kernel is not None
        said = {key: self.kernel.Said.of(said_CV, data_C, ids_V) for key, ids_V in self.vocabularies.items()}
        for unembedding, depths in self.groups.values():
            for k in depths:
                weight_R = self.weight_KP[k, roots[k]]
                about = (said[id(unembedding.ids_V)], places[k], weight_R, self.in_kernel, self.grad)
                loss_R, alpha_R, true_R, match_R = self.kernel.judge(logits[k], *about)
                self.loss_K[k] += loss_R.sum()
                if self.figures:  # a kernel returns weighted losses, which do not tell the loss of a pair with weight 0
                    self.plain_K[k] += torch.where(weight_R > 0, loss_R / weight_R, 0.0).sum()
                for kept_KP, own_R in ((self.alpha_KP, alpha_R), (self.true_KP, true_R), (self.match_KP, match_R)):
                    kept_KP[k, roots[k]] = own_R.to(kept_KP.dtype)

    def _in_strips(
        self, chunk: Chunk, said_CV: Tensor, data_C: Tensor, roots: Sequence[Tensor], places: Sequence[Tensor], logits: dict[int, Tensor]
    ) -> None:
        done_K = [0] * len(roots)
        for positions, counts_K in chunk.strips:
            log_p_SV = F.log_softmax(wide(said_CV[positions]), dim=-1)
            teachers = {key: Teacher.of(log_p_SV, data_C[positions], ids_V) for key, ids_V in self.vocabularies.items()}
            for unembedding, depths in self.groups.values():
                for k in (k for k in depths if counts_K[k]):
                    rows = slice(done_K[k], done_K[k] + counts_K[k])
                    teacher = teachers[id(unembedding.ids_V)]
                    if counts_K[k] < positions.stop - positions.start:
                        teacher = teacher.at(places[k][rows] - positions.start)
                    self._loss(k, roots[k][rows], logits[k][rows], teacher)
                    done_K[k] = rows.stop

    def _loss(self, k: int, root_R: Tensor, logits_RV: Tensor, teacher: Teacher) -> None:
        """Add the loss of some guesses of depth k+1 and overwrite their logits with the gradient."""
        if self.figures:
            self.match_KP[k, root_R] = logits_RV.argmax(-1) == teacher.best_C
        leaf_RV = wide(logits_RV.detach()).requires_grad_(self.grad)
        with torch.set_grad_enabled(self.grad):
            log_q_RV = F.log_softmax(leaf_RV, dim=-1)
            zero_R = leaf_RV.new_zeros(len(leaf_RV))
            loss_R = sum((weight * divergence(log_q_RV, teacher) for weight, divergence in self.terms), zero_R)
            loss = (self.weight_KP[k, root_R] * loss_R).sum()
        self.loss_K[k] += loss.detach()
        if self.figures:
            self.plain_K[k] += loss_R.detach().sum()
            self.alpha_KP[k, root_R] = overlap(log_q_RV.detach(), teacher)
            self.true_KP[k, root_R] = torch.exp(-nll(log_q_RV.detach(), teacher.data_C)) * (teacher.data_C >= 0)
        if self.grad:
            logits_RV.copy_(torch.autograd.grad(loss, leaf_RV)[0])

    def _select(
        self, selection: Selection, matrix: int, depths: list[int], roots: Sequence[Tensor], grad_RV: Tensor, parts: list[Tensor]
    ) -> list[Tensor]:
        """Add the order's loss, and its gradient to the logits'. Returns those of ``parts``, if needed. ``matrix``: the correction's id."""
        weight_R = torch.cat([self.weight_KP[k, roots[k]] for k in depths])
        losses = torch.stack([weight_R, torch.ones_like(weight_R)]) * selection.loss_R
        for k, loss_2R in zip(depths, losses.split([len(roots[k]) for k in depths], dim=1), strict=True):
            self.loss_K[k] += loss_2R[0].sum()
            self.plain_K[k] += loss_2R[1].sum()
        return selection.backward(weight_R, grad_RV, parts, self.cast.get(matrix), self.grads_VH.get(matrix)) if self.grad else []

    def _look(
        self, selection: Selection, said_CV: Tensor, data_C: Tensor, depths: list[int], roots: Sequence[Tensor], places: Sequence[Tensor]
    ) -> None:
        """Note matches and acceptance as they are after the selection."""
        place_R, counts = torch.cat([places[k] for k in depths]), [len(roots[k]) for k in depths]
        served = selection.figures(said_CV, place_R, data_C[place_R], max(1, strip_of(place_R.device) // said_CV.shape[1]))
        for kept_KP, own_R in zip((self.match_KP, self.alpha_KP, self.true_KP), served, strict=True):
            for k, part_R in zip(depths, own_R.split(counts), strict=True):
                kept_KP[k, roots[k]] = part_R

    def _products(
        self, unembedding: Unembedding, depths: list[int], asked: Sequence[Tensor], parts: list[Tensor], grad_RV: Tensor, done: list[Tensor]
    ) -> None:
        """Backpropagate from the logits to the two factors of their product, the matrix and the hidden states. ``done``: the
        gradients of the last parts, if they are known already.
        """
        blocks = unembedding.blocks[: len(parts) - len(done)]
        for weight, part_RH in zip(blocks, parts, strict=False):
            grad_VH = self.grads_VH.get(id(weight))
            if grad_VH is not None:  # half-precision products are added up in fp32, block by block: no second matrix of this size
                add(grad_VH, grad_RV.T, part_RH.T, strip_of(grad_RV.device))
        if any(self.grads_BAH[k] is not None for k in depths):
            grads = [*(times(grad_RV, self.cast[id(weight)].T) for weight in blocks), *done]
            grad_RH = grads[0] if len(grads) == 1 else torch.cat(grads, dim=-1)
            for k, part in zip(depths, grad_RH.split([len(asked[k]) for k in depths]), strict=True):
                grad_BAH = self.grads_BAH[k]
                if grad_BAH is not None:
                    grad_BAH.flatten(0, 1)[asked[k]] = part.to(grad_BAH.dtype)

    def out(self, count_K: Tensor, decay: float) -> LossOut:
        weight_sum = (decay ** torch.arange(len(count_K), device=count_K.device) * count_K).sum()
        loss = self.loss_K.sum()
        if self.grad:
            inputs = [*self.hidden, *self.weights]
            grads = [*self.grads_BAH, *(g if (g := self.grads_VH.get(id(w))) is None else g.to(w.dtype) for w in self.weights)]
            loss = Known.apply(loss, grads, *inputs)
        match_KBT, alpha_KBT, true_KBT = (x.view(-1, *self.shape) for x in (self.match_KP, self.alpha_KP, self.true_KP))
        return LossOut(loss, weight_sum, match_KBT, count_K, alpha_KBT, true_KBT, self.loss_K, self.plain_K)
