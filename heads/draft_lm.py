"""An independent small causal language model as drafter (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

It is any causal LM of transformers with the target's tokenizer, or with another one that is replaced by the target's
(heads/transplant.py). It starts from a config, from a folder, or as a copy of the target's first layers. It is trained as a whole or by
LoRA (2106.09685). LoRA is merged when it is saved, so the folder always holds an ordinary model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Drafter, TargetEnds, TargetShape
from headstart.heads.errors import UserError, first_line, warn_once
from headstart.heads.formats.causal_lm import LOCAL, TOKENS, check_rope, quiet
from headstart.heads.kinds import check_kinds
from headstart.heads.lm import Backbone, stack_of
from headstart.heads.memory import Memory
from headstart.heads.reads_tokens import ReadsTokens
from headstart.heads.seal import keys_of
from headstart.heads.stored import check_model, check_types, finite
from headstart.heads.transplant import check_same, resize, tokenizer_of, transplant
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import Sees

TABLES = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\binv_freq$|\bposition_ids$")  # tables that old files hold beside the weights
SCALES = ("logit_scale", "logits_scaling")  # names in configs of a factor on the logits


class DraftLm(ReadsTokens, Drafter):
    """Give exactly one of ``config`` (keys of a Hugging Face config, with ``model_type``), ``folder`` (a Hugging Face model) and ``layers``
    (the number of the target's first layers to copy, with its embedding, final norm and head).

    ``transplant``: give the model of ``folder`` the target's vocabulary.
    ``lora``: {rank, alpha, names}. Only low-rank matrices, scaled by alpha / rank, are trained: beside the linear layers with these names
    (the last part of a module's name; null: all except the head). Raises UserError for settings and models that do not fit.
    """

    format = "causal_lm"
    lm: Any
    arguments: dict[str, Any]  # that rebuild it without its folder and without the target

    def __init__(
        self,
        shape: TargetShape,
        *,
        config: dict[str, Any] | None = None,
        folder: str | None = None,
        layers: int | None = None,
        transplant: bool = False,
        lora: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(shape)
        given = [key for key, value in (("config", config), ("folder", folder), ("layers", layers)) if value is not None]
        if len(given) != 1:
            found = " and ".join(f"head.{key}" for key in given) or "none"
            raise UserError(f"the draft model is made from one of head.config, head.folder and head.layers, found {found}: "
                            "set the others to null")  # fmt: skip
        if transplant and folder is None:
            raise UserError("head.transplant is for the model of head.folder: set head.folder")
        if transplant and lora is not None:
            raise UserError("head.lora would not train the rows that head.transplant makes: set one of them to null or false")
        self.folder, self.layers, self.transplant, self.lora, self.lm = folder, layers, transplant, lora, None
        if layers is None:
            lm = _from_config(config or {}, shape) if folder is None else _from_folder(folder)
            if transplant:
                resize(lm, shape.vocab_size)
            self._adopt(lm)
        elif layers >= shape.layers:
            raise UserError(f"head.layers={layers} must be fewer than the {shape.layers} of the target")

    def _adopt(self, lm: Any) -> None:
        """Make ``lm`` the draft model, with LoRA if set. Raises UserError for a model that does not fit or is not supported."""
        hf = lm.config
        if hf.vocab_size != self.shape.vocab_size:
            cure = "they must share one" if self.folder is None else f"head.transplant=true gives the model of {self.folder} the target's"
            raise UserError(f"the draft model has a vocabulary of {hf.vocab_size}, the target {self.shape.vocab_size}: {cure}")
        check_kinds(hf, "the draft model", drafts=True)
        if getattr(hf, "layer_types", None) is not None and not hasattr(type(hf)(), "layer_types"):
            raise UserError(f"the draft model has layer_types in its config, which no model of the kind {hf.model_type} has")
        if getattr(hf, "final_logit_softcapping", None):
            raise UserError("the draft model caps its logits (final_logit_softcapping), which is not supported: choose another family")
        if scaled := [key for key in SCALES if (getattr(hf, key, None) or 1) != 1]:
            raise UserError(f"the draft model scales its logits ({scaled[0]}), which is not supported: choose another family")
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            raise UserError("the draft model's output head has a bias, which is not supported: choose another family")
        if self.lora is not None:
            _add_lora(lm, self.lora)
        hf.return_dict = True  # whatever the config says about the return type
        self.lm, self.reader = lm, Backbone(stack_of(lm.get_decoder(), hf.num_hidden_layers)[0])
        self._describe()

    def _describe(self) -> None:
        """Record its ``arguments``."""
        hf = self.lm.config
        keys = {key: value for key, value in hf.to_diff_dict().items() if key not in (*LOCAL, "transformers_version")}
        self.arguments = {"config": {**keys, "model_type": hf.model_type}}

    def attach(self, ends: TargetEnds) -> None:
        """Also builds the model if ``layers`` is given, and takes over the target's special tokens. Raises UserError as the constructor
        does.
        """
        super().attach(ends)
        if self.lm is None:
            config = _model_of(ends).config.get_text_config()
            keys = {**config.to_diff_dict(), "model_type": config.model_type, "num_hidden_layers": self.layers}
            for key in ("quantization_config", "dtype", "torch_dtype"):
                keys.pop(key, None)
            for key, value in keys.items():  # lists with one entry per layer
                if "layer" in key and isinstance(value, list) and len(value) == self.shape.layers:
                    keys[key] = value[: self.layers]
            self._adopt(_from_config(keys, self.shape))
        if ends.model is not None:  # the target's special tokens may differ from the defaults of the draft model's type
            for key, value in special_tokens(ends.model).items():
                setattr(self.lm.config, key, value)
                setattr(self.lm.generation_config, key, value)
            self._describe()
        self.config = {"head": self.config["head"], **self.arguments}

    @torch.no_grad()
    def start_from(self, ends: TargetEnds) -> None:
        """Copy the target's first layers if ``layers`` is given. Of a folder with another vocabulary, take over the target's, if so set.
        Raises UserError where the target stores its weights differently, and for another vocabulary otherwise.
        """
        if self.folder is not None:
            self._take_vocabulary(self.folder, ends.tokenizer)
        if self.layers is None:
            return
        model = _model_of(ends)
        theirs = model.get_decoder().state_dict()
        pairs = [(name, own, theirs.get(name.replace(".base_layer", ""))) for name, own in self.lm.get_decoder().state_dict().items()]
        pairs.append(("lm_head", self.lm.get_output_embeddings().weight, model.get_output_embeddings().weight))
        for name, own, value in pairs:
            if ".lora_" in name:
                continue
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor
            if value is None or value.shape != own.shape:
                raise UserError(f"the target's layers cannot be copied ({name} is stored in another way): use head.config or head.folder")
            own.copy_(value)

    def _take_vocabulary(self, folder: str, theirs: Any) -> None:
        """Compare the tokenizer of ``folder`` with the target's, or transplant. Without two tokenizers there is nothing to compare."""
        own = tokenizer_of(folder)
        if not self.transplant:
            if own is not None and theirs is not None:
                check_same(f"the tokenizer of {folder}", own, theirs, "head.transplant=true gives its model the target's")
        elif own is None or theirs is None:
            raise UserError(f"head.transplant needs two tokenizers: {'the target' if own else folder} has none")
        else:
            copies = transplant(self.lm, _from_folder(folder), own, theirs)  # read again: resizing may have cut its rows
            warn_once(f"{copies:,} of the target's {self.shape.vocab_size:,} tokens are tokens of {folder} too, the others start as means")

    def states(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
        """The model's states after its final norm, [B, N, D]."""
        return self.reader.read(tokens_BN, positions_BN, memory, sees)[1]

    def prepack(self) -> Drafter:
        """Speed up all layers of the model, as is done for the target."""
        size = self.size
        self.reader.quicken()
        super().prepack()
        self._size = size
        return self

    def unembedding(self, depth: int) -> Unembedding:
        """The model's own output head."""
        return Unembedding(self.lm.get_output_embeddings().weight)


def _model_of(ends: TargetEnds) -> Any:
    if ends.model is None:
        raise UserError("head.layers copies the target's first layers, but only its embedding and head are at hand here: "
                        "use head.config or head.folder")  # fmt: skip
    return ends.model


def _from_config(config: dict[str, Any], shape: TargetShape) -> Any:
    """A fresh fp32 model; the target's sizes replace missing keys. Raises UserError where transformers cannot build it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        keys = {"vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_positions, **copy.deepcopy(config)}
        hf = AutoConfig.for_model(keys.pop("model_type", "llama"), **keys)
        return AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    except Exception as e:  # transformers raises many types of errors for wrong files and settings
        raise UserError(f"the draft model {config} cannot be made: {first_line(e)}") from e


def special_tokens(model: Any) -> dict[str, Any]:
    """Key of each special token -> its id(s), as ``generate`` finds them: in the generation config, else in the config, else None."""
    both = [getattr(model, "generation_config", None), model.config.get_text_config()]
    found = {key: [value for config in both if (value := getattr(config, key, None)) is not None] for key in TOKENS}
    return {key: copy.copy(values[0]) if values else None for key, values in found.items()}


def _from_folder(folder: str) -> Any:
    """The fp32 model of a folder or of a name on the hub; on the meta device its shapes alone, from its config. Raises UserError unless its
    tensors are exactly those of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    local = Path(folder).is_dir()
    if local:
        config = check_model(Path(folder))
        with keys_of(Path(folder)):
            check_rope(config)
    try:
        hf = AutoConfig.from_pretrained(folder)
        if torch.empty(0).is_meta:  # transformers refuses to load weights there
            return AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        how: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        with quiet():
            lm, loaded = AutoModelForCausalLM.from_pretrained(folder, config=hf, **how)
    except Exception as e:
        why = "its tensors have other sizes than config.json says" if "ignore_mismatched_sizes" in str(e) else first_line(e)
        raise UserError(f"the draft model {folder} cannot be made: {why}") from e
    if absent := loaded["missing_keys"]:  # transformers would fill them with random numbers
        raise UserError(f"the draft model {folder} lacks {min(absent)} ({len(absent)} tensors)")
    if surplus := [name for name in loaded["unexpected_keys"] if not TABLES.search(name)]:  # transformers would ignore them
        raise UserError(f"the draft model {folder} has {min(surplus)} ({len(surplus)} tensors), for which its config.json has no place")
    if hf.tie_word_embeddings and lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight:
        raise UserError(f"the draft model {folder} has tie_word_embeddings=true, but an output head of its own")
    if local and getattr(hf, "quantization_config", None) is None:
        check_types(Path(folder), TABLES)
    for name, weight in lm.named_parameters():
        if weight.is_floating_point() and not finite(weight):
            raise UserError(f"the draft model {folder}: {name} holds NaN or infinite values")
    return lm


def _add_lora(lm: Any, settings: Mapping[str, Any]) -> None:
    """Add low-rank matrices to linear layers and freeze everything else. Raises UserError for wrong settings and unknown names."""
    from peft import LoraConfig, inject_adapter_in_model

    if settings.keys() - {"names"} != {"rank", "alpha"}:
        raise UserError(f"head.lora must be {{rank: 16, alpha: 32, names: [q_proj, v_proj]}} (names: null for all), found {dict(settings)}")
    rank, alpha, names = settings["rank"], settings["alpha"], settings.get("names")
    if type(rank) is not int or rank < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < inf:
        raise UserError(f"head.lora: rank must be a whole number of at least 1 and alpha a number above 0, found {rank!r} and {alpha!r}")
    head = lm.get_output_embeddings()
    linear = [(name.rpartition(".")[2], m) for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head]
    known = sorted({name for name, _ in linear})
    if not known:
        raise UserError("head.lora: the draft model has no linear layers (nn.Linear) to adapt: take head.lora=null")
    names = known if names is None else names
    if not isinstance(names, list):
        raise UserError(f"head.lora.names must be a list (null for all), found {names!r}")
    if not names or (wrong := [name for name in names if name not in known]):
        raise UserError(
            f"head.lora.names: the draft model has no linear layer called {wrong[0] if names else '[]'}: it has {', '.join(known)}"
        )
    most = min(min(m.weight.shape) for name, m in linear if name in names)
    if rank > most:
        raise UserError(f"head.lora: rank {rank} is more than the smallest of these layers has ({most})")
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, bias="none"), lm)
