"""A test, run when a target is loaded: does it obey the masks and positions that it is given? So architectures need not be known by name.

Trees and packed rows are read with a mask and with explicit positions. An architecture that instead counts the rows in its cache would
read them wrongly without any error. So a small tree and a packed row are read in every arrangement that decoding and training use, and the
states are compared with those of plain passes over the same texts.

Shape suffixes: T tokens, R rows of a tree, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.errors import UserError, first_line
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.fixed import FixedMemory
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

TEXT = 5  # tokens before the tree
PARENTS = (-1, -1, 1, 0, 2)  # a tree in which adjacent rows are not always parent and child, and positions differ from row numbers
FARTHEST = 1024  # most empty rows between the tree and the text; they expose sliding windows that count rows instead of positions


@torch.no_grad()
def check_driven(target: Target) -> None:
    """Raises UserError where the target's states of a tree, or of several documents in one row, differ from those of each path or document
    read by itself; and where its logits are not the product of its output head and its final state (another scaling, for example).
    """
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(target.shape.vocab_size, (TEXT + 1 + len(PARENTS),), generator=generator).to(target.device)
    tree = Tree.of(tokens_T[TEXT + 1 :].tolist(), PARENTS, target.device)
    arrangements = {"a tree of guesses": _dynamic, "a tree of guesses in front of what was read": _static}
    try:
        _check_head(target)
        expected_RD = _each_path(target, tokens_T, tree)
        for what, read in arrangements.items():
            _compare(target, read(target, tokens_T, tree), expected_RD, what)
        _compare(target, _packed(target, tokens_T), _each_document(target, tokens_T), "several documents in one row")
    except UserError:
        raise
    except Exception as e:  # any error: the model's code is not ours, and was not made for this
        instead = "take target.device=fsdp (in training), or another target" if target.tensor > 1 else "take another target"
        raise UserError(f"{target.name}: its decoder cannot be driven from outside, {type(e).__name__} at "
                        f"{first_line(e)}: {instead}") from e  # fmt: skip


def _check_head(target: Target) -> None:
    tokens_12 = torch.tensor([[0, 1]], device=target.device)
    expected = target.model(input_ids=tokens_12, use_cache=False).logits[0].to(target.device)
    found = target.logits(target.body(input_ids=tokens_12, use_cache=False).last_hidden_state[0].to(target.device))
    if not torch.allclose(found, expected, rtol=0, atol=0.02 * float(expected.abs().max())):
        raise UserError(f"{target.name}: its logits are more than its output head over its final state, which is not supported")


def apart(found_RD: Tensor, expected_RD: Tensor, dtype: torch.dtype) -> float:
    """The relative distance of states [R, D] from the expected ones, in the worst row. In half precision, in the median row: single rows
    may differ more, because a router that is close to a tie may choose other experts.
    """
    apart_R = (found_RD.float() - expected_RD.float()).norm(dim=-1) / expected_RD.float().norm(dim=-1).clamp_min(1e-12)
    return float(apart_R.max() if torch.finfo(dtype).eps < 1e-6 else apart_R.median())


def rounding(dtype: torch.dtype) -> float:
    """The largest relative distance between the same states, computed in two ways, that rounding can explain."""
    return max(1e-3, 8 * torch.finfo(dtype).eps)


def _compare(target: Target, found_D: Tensor, expected_D: Tensor, what: str) -> None:
    worst = apart(found_D, expected_D, target.dtype)
    if not worst <= rounding(target.dtype):
        why = "it is in training mode: call eval() first" if target.model.training else "take a target that honours masks and positions"
        raise UserError(
            f"{target.name}: its attention cannot be driven from outside ({what} is read {worst:.0%} off the same text alone): {why}"
        )


def _plain(target: Target, tokens_T: Tensor) -> Tensor:
    return target.body(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0].float().to(target.device)


def _each_path(target: Target, tokens_T: Tensor, tree: Tree) -> Tensor:
    """The states of the root row and the nodes [R, D], each from a plain pass over its own path."""
    found = []
    for row in range(len(tree) + 1):
        path = torch.cat([tokens_T[:TEXT], tokens_T[TEXT:][tree.rows()[0, row]]])  # ancestors come before descendants
        found.append(_plain(target, path)[-1])
    return torch.stack(found)


def _dynamic(target: Target, tokens_T: Tensor, tree: Tree) -> Tensor:
    context = Context(target, ())
    context.read_prompt(tokens_T[:TEXT])
    context.keep(TEXT)
    return context.read(tokens_T[TEXT:], tree)[1][0].float()


def _static(target: Target, tokens_T: Tensor, tree: Tree) -> Tensor:
    R, far = len(tree) + 1, _window(target.config)
    memory = FixedMemory(1, TEXT, R + far, target.device, target.layers_on())
    here_T = torch.arange(TEXT, device=target.device)
    sees = memory.load([0], [0], TEXT)
    target.read_rows(tokens_T[None, :TEXT], here_T[None], memory, sees)
    memory.loading = None
    memory.kept_B += TEXT
    memory.use(1, TEXT, R + far)
    positions_R = TEXT + F.pad(tree.depths_BN[0], (1, 0))
    return target.read_rows(tokens_T[None, TEXT:], positions_R[None], memory, memory.sees_nodes(tree.rows()))[1][0].float()


def _window(config: Any) -> int:
    """The largest number that the config calls a window, at most FARTHEST; 0: none."""
    sizes = [v for k, v in config.to_dict().items() if "window" in k and type(v) is int]
    return min(max(sizes, default=0), FARTHEST)


def _packed(target: Target, tokens_T: Tensor) -> Tensor:
    positions_T = torch.arange(len(tokens_T), device=target.device)
    positions_T[TEXT:] -= TEXT
    return target.read(tokens_T[None], positions_T[None], ())[1][0].float()


def _each_document(target: Target, tokens_T: Tensor) -> Tensor:
    return torch.cat([_plain(target, tokens_T[:TEXT]), _plain(target, tokens_T[TEXT:])])
