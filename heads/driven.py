"""Makes the layers of transformers attend by our visibility rules: in closed form, over many documents, without copies of shared keys.

Decoders of transformers look up their attention function by the name in their config. While a decoder reads rows by a rule, its config
names our function, which finds the rule in a thread-local variable. So a rule that has a closed form needs no mask.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.layers import autocasts
from headstart.heads.visibility import KEPT, ChainSees, Sees, grouped

NAME = "headstart"


class _Pass(threading.local):
    sees: Sees | None = None
    marked: Mapping[int, Sees] = {}  # id of the tensor that is passed as the mask -> rule


_PASS = _Pass()
_LOCKS: dict[int, threading.RLock] = {}  # id of a config -> its lock, as long as the config lives (it cannot be hashed)


def alone(config: Any) -> threading.RLock:
    """The lock to hold during every pass of layers with this config, because threads that share the layers share the config too."""
    lock = _LOCKS.get(id(config))
    if lock is None:
        lock = _LOCKS.setdefault(id(config), threading.RLock())
        weakref.finalize(config, _LOCKS.pop, id(config), None)
    return lock


def in_turn(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop``, a function of a model, in which threads that use one model take turns: they share its decoder and its attention."""

    @functools.wraps(loop)  # transformers looks at its arguments
    def locked(model: Any, *args: Any, **kwargs: Any) -> Any:
        with alone(model.config):
            return loop(model, *args, **kwargs)

    return locked


@contextmanager
def by_rule(config: Any, sees: Sees, by_kind: Mapping[str, Sees] | None = None) -> Iterator[dict[str, Tensor | None]]:
    """Inside, layers with this config that are called without a mask follow the rule ``sees``. ``by_kind``: kind of layer -> its own rule.

    Yields, for each kind, what to pass as its mask: None for ``sees`` itself, else a marker tensor by which the rule is found. (The marker
    is NaN, so that a layer which computes with it instead gives NaN.)
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)  # registered without a mask function, so that none is made
    rules = by_kind or {}
    marks = {kind: None if rule is sees else torch.full((1, 1, 1, 1), torch.nan) for kind, rule in rules.items()}
    with alone(config):
        before = _PASS.sees, _PASS.marked, config._attn_implementation
        _PASS.sees, config._attn_implementation = sees, NAME
        _PASS.marked = {id(mark): rules[kind] for kind, mark in marks.items() if mark is not None}
        try:
            yield marks
        finally:
            _PASS.sees, _PASS.marked, config._attn_implementation = before


def can_follow(module: Any, config: Any) -> bool:
    """Whether a decoder uses the attention that can be replaced (sdpa), and lies on one device as a whole."""
    parameters = list(module.parameters())
    one = len({p.device for p in parameters}) == 1 and not any(hasattr(p, "full_tensor") for p in parameters)
    return config._attn_implementation == "sdpa" and one and parameters[0].device.type != "meta"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers with queries [B, h, N, d], and keys and values of all rows in memory. Returns ([B, N, h, d], None)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if autocasts(query):  # rotation gives fp32 queries and keys, while values have the half precision of their product
        query, key = query.to(value.dtype), key.to(value.dtype)
    sees, group = _PASS.sees, query.shape[1] // key.shape[1]
    if (own := _PASS.marked.get(id(attention_mask))) is not None:
        sees, attention_mask = own, None
    assert sees is not None
    plain = not dropout and kwargs.get("position_bias") is None and kwargs.get("is_causal") is not False
    if plain and attention_mask is None:
        rows = query.shape[2]
        segments = zip(key.split(rows, 2), value.split(rows, 2), strict=True) if isinstance(sees, ChainSees) else [(key, value)]
        return sees.attend(query, list(segments), scaling).transpose(1, 2), None
    if plain and group > 1 and query.shape[2] <= KEPT and attention_mask is not None:
        return grouped(query, key, value, attention_mask.repeat(1, 1, group, 1), scaling).transpose(1, 2), None
    if attention_mask is None:
        attention_mask = sees.bias(query.shape[2], key.shape[2], 1, query.dtype, query.device)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs | {"is_causal": False})
