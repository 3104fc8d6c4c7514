"""The parts of a loss, by name: divergences, further terms, and weightings of guesses.

Shape suffixes: K depths, B batch, T positions, R draft rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads import native
from headstart.heads.errors import UserError
from headstart.heads.kernels.launch import launches
from headstart.trainers.divergences import Divergence, find, names

Constants = Mapping[str, Mapping[str, float]] | None  # term or weighting -> constant -> value, where it is not the default
Weighting = Callable[[Tensor, Tensor, Tensor], Tensor]  # (alpha_KBT, true_KBT: see LossOut; supervised_KBT) -> [K, B, T]
# Terms that are not divergences of two distributions (trainers/beside.py, selector.py). base: the divergences once more, for the guesses
# without their correction (trainers/learner.py).
BESIDE = ("feature", "confidence", "selector", "choice", "distractor", "base")


def chain(alpha_KBT: Tensor, true_KBT: Tensor, supervised_KBT: Tensor) -> Tensor:
    """Weights [K, B, T] for end-to-end total variation (2606.12370). With them, the gradient of ``tv`` is K times the gradient of
    1 - sum_k prod_(i<=k) alpha_i / K, the expected share of a chain that sampling rejects. Depth i has the weight
    sum_(k>=i) prod_(j<=k, j!=i) alpha_j.
    """
    alpha_KBT = alpha_KBT.where(supervised_KBT, 1.0)
    weights = []
    for i in range(len(alpha_KBT)):
        others_KBT = alpha_KBT.clone()
        others_KBT[i] = 1.0
        weights.append((others_KBT.cumprod(0) * supervised_KBT)[i:].sum(0))
    return torch.stack(weights)


def dpace(alpha_KBT: Tensor, true_KBT: Tensor, supervised_KBT: Tensor, a: float = 0.5) -> Tensor:
    """D-PACE (2605.18810): w_j = sum_(k>=j) prod_(i<=k) ((1 - a) q_i + a), where q_i is the drafter's probability of the true token.
    The weights [K, B, T] are normalized to a mean of 1 over the supervised pairs of one micro-batch of one process. So with this weighting,
    and no other, the gradient depends on trainer.accumulate and on the number of processes. Raises UserError unless 0 <= a <= 1.
    """
    if not 0 <= a <= 1:
        raise UserError(f"loss.constants.dpace.a must be from 0 to 1, found {a!r}")
    smooth_KBT = ((1 - a) * true_KBT + a).where(supervised_KBT, 1.0)
    weight_KBT = (smooth_KBT.cumprod(0) * supervised_KBT).flip(0).cumsum(0).flip(0) * supervised_KBT
    return weight_KBT * (supervised_KBT.sum() / weight_KBT.sum().clamp(min=1e-12))


WEIGHTINGS: dict[str, Weighting | None] = {"decay": None, "dpace": dpace, "chain": chain}


class Weights(NamedTuple):
    """The weights of the divergences that the kernels know (trainers/kernel.py, native_kernel.py), and their constants."""

    kl: float = 0.0
    tv: float = 0.0
    lk_alpha: float = 0.0
    lk_hybrid: float = 0.0
    eta: float = 3.0
    ce: float = 0.0
    data_ce: float = 0.0

    @classmethod
    def of(cls, terms: Mapping[str, float], constants: Constants) -> Weights:
        """From ``loss.terms`` and ``loss.constants``, which are checked."""
        eta = (constants or {}).get("lk_hybrid", {}).get("eta", 3.0)
        return cls(**{name: float(weight) for name, weight in terms.items()}, eta=float(eta))


class Judged(NamedTuple):
    """Loss and figures of each row of drafts."""

    loss_R: Tensor  # weighted
    alpha_R: Tensor  # acceptance probability at temperature 1
    true_R: Tensor  # the drafter's probability of the token in the data; 0 where it lacks that token
    match_R: Tensor  # bool: the drafter's most likely token is the target's


IN_KERNEL = tuple(name for name in Weights._fields if name != "eta")


def term(name: str, constants: Constants = None) -> Divergence:
    """The divergence of that name, with its constants. Raises UserError for an unknown name or a wrong constant; so does the divergence if
    it returns anything but one value for each row, which would be broadcast to all rows.
    """
    try:
        found = _with_constants(name, find(name), constants)
    except KeyError:
        raise UserError(f"loss.terms has no {name!r}: there are {', '.join(sorted([*names(), *BESIDE]))}") from None

    def by_row(log_q_RV: Tensor, teacher: Any) -> Tensor:
        loss_R: Tensor = found(log_q_RV, teacher)
        if loss_R.shape != log_q_RV.shape[:1]:
            shape, rows = list(loss_R.shape), len(log_q_RV)
            raise UserError(f"loss.terms.{name}: its function returned a tensor of shape {shape}, not one value for each of {rows} rows")
        return loss_R

    return by_row


def weighting_of(name: str, constants: Constants = None) -> Weighting | None:
    """The weighting of that name, with its constants; None for ``decay``, which gives a guess the weight decay^(depth-1) alone. Raises
    UserError for an unknown name or a wrong constant.
    """
    if name not in WEIGHTINGS:
        raise UserError(f"loss.weighting must be one of {', '.join(WEIGHTINGS)}, found {name!r}")
    found = WEIGHTINGS[name]
    return found and _with_constants(name, found, constants)


def check_loss(terms: Collection[str], weighting: str, constants: Constants) -> None:
    """Raises UserError for an unknown term, weighting or constant."""
    for name in constants or {}:
        if name not in terms and name != weighting:
            raise UserError(f"loss.constants.{name} is of nothing in this loss: it has {', '.join([*terms, weighting])}")
        if name in BESIDE:
            raise UserError(f"loss.constants.{name}: it has none")
    for name in terms:
        if name not in BESIDE:
            term(name, constants)
    weighting_of(weighting, constants)


def kernel_of(kernel: str, terms: Collection[str], device: torch.device, dtypes: Collection[torch.dtype]) -> str:
    """What computes the loss: torch, triton (trainers/kernel.py) or native (trainers/native_kernel.py). With ``loss.kernel=auto`` it is the
    kernel for this device if that is available and knows all terms (native: also the ``dtypes`` of the logits), else torch. Raises
    UserError if the native kernel is asked for and does not know the dtypes.
    """
    known = all(dtype in native.DTYPES for dtype in dtypes)
    if kernel == "native" and not known:
        raise UserError(f"loss.kernel=native reads float32 and bfloat16, not {', '.join(map(str, dtypes))}: take loss.kernel=torch")
    if kernel != "auto":
        return kernel
    if not in_kernel(kernel, terms, device):
        return "torch"
    if device.type == "cuda":
        return "triton" if launches(device) else "torch"
    from headstart.trainers import native_kernel

    return "native" if known and native_kernel.right() else "torch"


def in_kernel(kernel: str, terms: Collection[str], device: torch.device) -> bool:
    """Whether a kernel, if available, computes the loss: one is asked for, or ``loss.kernel`` is auto and the device's knows all terms."""
    return kernel not in ("auto", "torch") or (kernel == "auto" and device.type in ("cuda", "cpu") and not _not_in_kernel(terms))


def check_kernel(kernel: str, terms: Collection[str], device: torch.device | None = None) -> None:
    """Raises UserError if ``loss.kernel`` asks for a kernel that cannot be used: it does not know a term, triton or a C++ compiler is
    missing, or the drafter is on another device. ``device``: the drafter's; None: not known yet.
    """
    if kernel in ("torch", "auto"):
        return
    instead = "take loss.kernel=torch"
    if other := _not_in_kernel(terms):
        raise UserError(f"loss.kernel={kernel} knows {', '.join(IN_KERNEL)}, not {other[0]}: {instead}")
    if kernel == "native":
        if device is not None and device.type != "cpu":
            raise UserError(f"loss.kernel=native is for CPUs, the drafter is on {device.type}: {instead}")
        from headstart.trainers import native_kernel

        if not native_kernel.right():
            why = native.searched()
            raise UserError(f"loss.kernel=native cannot be had ({why if isinstance(why, Exception) else 'it computes wrongly'}): {instead}")
        return
    try:
        from headstart.trainers.kernel import INTERPRETED
    except ImportError:
        raise UserError(f"loss.kernel={kernel} needs `pip install triton`, or {instead}") from None
    if device is not None and device.type != "cuda" and not INTERPRETED:
        raise UserError(f"loss.kernel={kernel} is for GPUs, the drafter is on {device.type}: {instead}")


def _not_in_kernel(terms: Collection[str]) -> list[str]:
    """The divergences among ``terms`` that the kernels do not know."""
    return [name for name in terms if name not in (*IN_KERNEL, *BESIDE)]


def _with_constants(name: str, function: Callable[..., Any], constants: Constants) -> Callable[..., Any]:
    """``function`` with the constants given for ``name`` as keyword arguments. Raises UserError for a constant that it does not take, and
    for one that must be a positive integer and is not.
    """
    own = {key: p.default for key, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    given = (constants or {}).get(name, {})
    for key, value in given.items():
        if key not in own:
            raise UserError(f"loss.constants.{name} has no {key!r}: it has {', '.join(own) or 'none'}")
        if isinstance(own[key], int) and (not isinstance(value, int) or value < 1):
            raise UserError(f"loss.constants.{name}.{key} must be a whole number from 1 on, found {value!r}")
    return functools.partial(function, **given) if given else function
