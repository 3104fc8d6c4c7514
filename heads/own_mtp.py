"""Multi-token prediction in the target's own kind of layer: the module that a target ships with, trained further (DeepSeek, 2412.19437,
section 2.2), and shared by all depths (FastMTP, 2509.18362).

The module is proj([norm(embedding of x[t+1]); norm(h_t)]), one decoder layer of the target's class with full attention, and a final norm.
The target's frozen head reads its output, which is also the state for the next depth. Unlike ``mtp``, whose layer is always Llama's, it has
whatever the target's layers have: norms on queries and keys, gated attention, experts. transformers builds and runs the layer.

Shape suffixes: B batch, N rows, D hidden.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots, TargetEnds, TargetShape
from headstart.heads.errors import UserError, first_line
from headstart.heads.formats import own_mtp as form
from headstart.heads.formats.causal_lm import LOCAL, TOKENS
from headstart.heads.kinds import check_kinds, layers_of
from headstart.heads.lm import Backbone, norm_of, stack_of
from headstart.heads.memory import Memory
from headstart.heads.mtp_weights import INSTEAD, UNLIKE, own_module
from headstart.heads.visibility import Sees

NUMBERS = "mlp_only_layers"  # a key with numbers of layers, not with one entry for each layer


class OwnMtp(Drafter):
    """``from_target``: start from the target's own MTP weights (the first module, where it has several); ``start_from`` raises UserError
    where it has none, or others than this layer holds. False: random weights. ``config``: keys of the Hugging Face config of the layer, as
    saved folders have them; None: the target's, which ``attach`` reads.
    """

    format = "own_mtp"
    decoder: Any
    arguments: dict[str, Any]  # that rebuild it without the target and its files

    def __init__(self, shape: TargetShape, *, from_target: bool = True, config: dict[str, Any] | None = None) -> None:
        super().__init__(shape)
        self.taps, self.from_target = (shape.layers,), from_target
        if config is not None:
            self._build(config)

    def _build(self, keys: dict[str, Any]) -> None:
        """Make the module from the keys of its layer's config. Raises UserError where transformers cannot, or where it does not fit."""
        model = _model_of(keys)
        hf, D = model.config, self.shape.hidden_size
        if (hf.hidden_size, keys.get("vocab_size")) != (D, self.shape.vocab_size):
            raise UserError(f"head.config has hidden_size={hf.hidden_size} and vocab_size={keys.get('vocab_size')}, the target {D} and "
                            f"{self.shape.vocab_size}")  # fmt: skip
        check_kinds(hf, "the MTP layer", drafts=True)
        hf.return_dict = True  # whatever the config says about the return type
        self.decoder, self.stack, _ = stack_of(model.get_decoder(), 1)
        self.kind, self.inside = type(model), next(name for name, m in model.named_modules() if m is self.decoder)
        self.last, norm = norm_of(self.decoder)
        self.decoder.set_input_embeddings(nn.Identity())
        if more := [n for n, _ in self.decoder.named_parameters() if not n.startswith((f"{self.stack}.", f"{self.last}."))]:
            raise UserError(f"layers of {hf.model_type} cannot be an MTP module: their decoder has {more[0]} beside them. Take head=mtp")
        self.enorm, self.hnorm = _another(norm), _another(norm)
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.reader = Backbone(self.decoder)
        self.unserved = form.unserved(self.shape.model_type, keys)
        self.arguments = {"from_target": False, "config": keys}  # its weights are in the folder

    def attach(self, ends: TargetEnds) -> None:
        """Also builds the module if no ``config`` was given. Raises UserError as the constructor does."""
        super().attach(ends)
        if not hasattr(self, "decoder"):
            if ends.config is None:
                raise UserError("this drafter has a layer of the target's kind, but the target's config is not at hand: load the target")
            self._build(one_layer(ends.config.get_text_config()))
        self.config = {"head": self.config["head"], **self.arguments}

    @torch.no_grad()
    def start_from(self, ends: TargetEnds) -> None:
        """Load the target's own MTP weights if ``from_target`` is set. Raises UserError where it has none, or others than these."""
        if not self.from_target:
            return
        name, given = own_module(ends.config)
        own = {theirs: self.state_dict()[ours] for ours, theirs in form.names(self).items()}
        wanted = own if given.keys() == own.keys() else form.in_file(self, own)
        unknown, missing = sorted(given.keys() - wanted.keys()), sorted(wanted.keys() - given.keys())
        wrong = [f"has {theirs}" for theirs in unknown] + [f"lacks {theirs}" for theirs in missing]
        sizes = [(theirs, list(given[theirs].shape), list(wanted[theirs].shape)) for theirs in sorted(given.keys() & wanted.keys())]
        wrong += [f"has {theirs} of {size}, not {fitting}" for theirs, size, fitting in sizes if size != fitting]
        if wrong:
            why = f": {UNLIKE['scale']}" if "scale" in wrong[0] else ""
            raise UserError(f"the MTP module of {name} {wrong[0]}{why}. It is no layer of the target's own kind: {INSTEAD}")
        found = form.in_memory(self, given)
        self.load_state_dict({ours: found[theirs] for ours, theirs in form.names(self).items()})

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the chosen token beside the target's final state."""
        return self._read(roots.chosen_BT, roots.states[self.taps[0]], roots.positions_BT, memory, sees).at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read the drafted token beside its parent's state."""
        return self._read(tokens_BN, parent.state, positions_BN, memory, sees)

    def _read(self, tokens_BN: Tensor, state_BND: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        token_BND = self.ends.embed(tokens_BN).to(state_BND.dtype)
        x_BND = self.eh_proj(torch.cat([self.enorm(token_BND), self.hnorm(state_BND)], dim=-1))
        hidden_BND = self.reader.read(x_BND, positions_BN, memory, sees)[1]
        return Draft(hidden_BND, hidden_BND)


def _another(norm: nn.Module) -> nn.Module:
    """A norm of the same class with weights of its own. (deepcopy would also copy what stands in for weights that do not exist.)"""
    made = copy.copy(norm)
    made._parameters = {name: nn.Parameter(weight.detach().clone()) for name, weight in norm.named_parameters()}
    return made


def one_layer(config: Any) -> dict[str, Any]:
    """The keys of a text model's config for one layer only: its last one with full attention, if it says the kinds of its layers.

    A layer is dense or has experts as engines build it for the module: as the first layer where ``mlp_only_layers`` says so (Qwen), behind
    the dense ones where ``first_k_dense_replace`` counts them (DeepSeek).
    """
    layers, kinds = config.num_hidden_layers, list(layers_of(config))
    at = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=-1) if len(kinds) == layers else -1
    keys = {**config.to_diff_dict(), "model_type": config.model_type, "num_hidden_layers": 1, "vocab_size": config.vocab_size}
    for key in (*LOCAL, "torch_dtype", "quantization_config", "transformers_version", "architectures"):
        keys.pop(key, None)
    for key, value in keys.items():
        if isinstance(value, list) and len(value) == layers and key != NUMBERS:
            keys[key] = [value[at]]
    alone = {"first_k_dense_replace": 0, "indexer_types": ["full"]}  # no layer before it whose choice of keys it could take (GLM-5)
    return keys | {key: value for key, value in alone.items() if key in keys}


def _model_of(keys: dict[str, Any]) -> Any:
    """A model of one layer with random fp32 weights, and with one token, because its embedding and head are not used. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        few = copy.deepcopy(keys) | {"vocab_size": 1, "num_hidden_layers": 1} | dict.fromkeys(TOKENS)
        hf = AutoConfig.for_model(few.pop("model_type"), **few)
        return AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    except Exception as e:  # transformers raises many types of errors for wrong settings
        raise UserError(f"no MTP layer can be made of the target's config: {first_line(e)}") from e
