"""The frozen target: any stock causal LM of Hugging Face, or the language model in a multimodal one, read in two ways.

``Target.read`` is the teacher-forced pass over packed documents (training). ``Target.read_rows`` is a pass of decoding: it reads rows
after those in a key-value cache, by an attention rule and explicit positions. ``Context`` (one sequence) and ``Rounds`` (many) use it to
read prompts and trees of draft tokens.

Shape suffixes: B batch, T tokens, R rows of one pass (root row and nodes), P rows in the cache, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import TargetEnds
from headstart.heads.errors import UserError
from headstart.heads.kinds import check_kinds, model_class
from headstart.heads.lm import Backbone, stack_of
from headstart.heads.memory import Memory, Passing, Slots
from headstart.heads.prepack import prepack_beside
from headstart.heads.products import frozen_layers
from headstart.heads.visibility import CausalSees, ChainSees, Sees
from headstart.inference.decoding.gathered import gather_ahead, let_go
from headstart.inference.decoding.info import DTYPES, FEW, TargetInfo, ends_of, loading, read_names, rope_switch_of, scaled_head, shape_of
from headstart.inference.decoding.mend import mend_scales
from headstart.inference.decoding.placement import (
    check_config,
    check_device,
    check_folder,
    hub_answers,
    multiplies_bf16,
    placement,
    tensor_size,
    wait_for_all,
)

log = logging.getLogger(__name__)


def _whole(x: Any) -> Tensor:
    """The whole of a parameter, gathered where it is sharded over several processes."""
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def _documents(positions_BT: Tensor) -> Tensor:
    """The number of each token's document in its row: one begins wherever the positions restart."""
    return torch.nn.functional.pad((positions_BT[:, 1:] != positions_BT[:, :-1] + 1).cumsum(1), (1, 0))


class Target(TargetInfo):
    """A frozen causal LM of transformers and its tokenizer. Of a multimodal model, only the language model is run: it reads text."""

    tensor = 1  # how many processes compute each layer together (tensor parallelism)
    group: Any = None  # the group of these processes, where each of them reads rows of its own (``read_apart``)

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "target", frozen: bool = True) -> None:
        """``frozen=False`` leaves the model in its mode and trainable, for a caller who trains it and only generates with it here.

        Raises UserError for a model that cannot be a target.
        """
        self.model = model.eval().requires_grad_(False) if frozen else model
        if frozen:
            model.config.return_dict = True  # some configs are saved with False, and transformers' own code then fails
        self.tokenizer, self.name = tokenizer, name
        self.config = model.config.get_text_config()
        self.shape = shape_of(model.config, name)
        self.body, self.layers = self._find_body()
        self.reader = Backbone(self.body)
        mend_scales(self.layers)
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.typed = "auto"  # the target.dtype with which ``load`` gives this dtype: auto where the folder stores it
        if self.device.type == "cuda":  # torch's first choice on newer GPUs spends tens of milliseconds on every new length
            torch.backends.cuda.enable_cudnn_sdp(False)
        if away := [n for n, p in model.named_parameters() if p.is_meta]:
            raise UserError(f"{name}: {away[0]} and {len(away) - 1} other tensors do not fit on the GPUs (accelerate would copy them "
                            "there again at every pass): free some memory, take more GPUs, or a quantised model")  # fmt: skip
        head = model.get_output_embeddings()
        self.ends = ends_of(model.config, model.get_input_embeddings(), self._matrix(head), model, tokenizer)
        check_kinds(self.config, name)
        if getattr(head, "bias", None) is not None:
            raise UserError(f"{name}: an output head with a bias is not supported")

    def _find_body(self) -> tuple[Any, nn.ModuleList]:
        """The decoder without its output head, and its list of layers, under whatever name the model has them. Raises UserError where there
        is none that can be used.
        """
        body, _, layers = stack_of(self.model.get_decoder(), self.shape.layers)
        if "position_ids" not in inspect.signature(body.forward).parameters or getattr(self.config, "alibi", False):
            raise UserError(f"{self.name}: it counts positions itself, so the branches of a tree cannot be read side by side")
        return body, layers

    def _matrix(self, head: nn.Module) -> Tensor:
        """The output head as one matrix [V, D] on the embedding's device: gathered where it is sharded, dequantized where quantized."""
        weight = _whole(head.weight)
        if weight.dtype not in (*DTYPES.values(), torch.float64) or weight.shape[-1] != self.shape.hidden_size:
            with torch.no_grad():
                weight = head(torch.eye(self.shape.hidden_size, dtype=self.dtype, device=weight.device)).T.contiguous()
        return weight.to(self.device)

    def refresh_head(self) -> None:
        """Read the output head from the model again, in case it was trained meanwhile. Only a scaled head needs this, being a copy."""
        if self.ends.scaled:
            self.ends.head_VD = scaled_head(self.config, self._matrix(self.model.get_output_embeddings()))

    def ends_on(self, device: torch.device, dtype: torch.dtype) -> TargetEnds:
        """Copies of the embedding and the output head, for a drafter on another device or in another dtype."""
        from accelerate.hooks import remove_hook_from_module

        embed = remove_hook_from_module(copy.deepcopy(self.ends.embed)).to(device=device, dtype=dtype)
        return TargetEnds(embed, self.ends.head_VD.to(device, dtype), self.ends.softcap, scaled=self.ends.scaled, config=self.ends.config)

    @property
    def rope_switch(self) -> int | None:
        return rope_switch_of(self.config)

    @property
    def sharded(self) -> bool:
        """Whether the layers are sharded over several processes."""
        return any(hasattr(p, "full_tensor") for p in self.model.parameters())

    def agreed(self, clock: Callable[[], float]) -> Callable[[], float]:
        """``clock``; for processes that share the layers, the clock of the first one. All of them then measure the same seconds: they must
        run the same rounds, also in a measurement that ends by the clock, and choose the same shapes.
        """

        def of_the_first() -> float:
            seconds = torch.tensor(clock(), dtype=torch.float64, device=self.device)
            torch.distributed.broadcast(seconds, 0)
            return float(seconds)

        return of_the_first if self.sharded else clock

    def layers_on(self) -> Counter[torch.device]:
        """How many layers each device holds."""
        return Counter(next(layer.parameters()).device for layer in self.layers)

    @property
    def spread(self) -> bool:
        """Whether a pass uses more than one device or process. Such a pass cannot be captured as a device graph."""
        return self.sharded or len({p.device for p in self.model.parameters()}) > 1

    @classmethod
    def load(cls, path: str, *, dtype: str = "auto", device: str = "auto", attention: str = "sdpa") -> Target:
        """Load a target from a folder or a hub id. ``device`` is one of: ``auto`` (the process's own GPU, else the CPU); a torch device;
        ``map`` (accelerate spreads the layers over all GPUs); ``tp`` (tensor parallelism over all processes that torchrun started, which
        must then all decode the same); ``tp:N`` (tensor parallelism within groups of N processes, each group holding a share of the
        weights); ``fsdp`` (every process holds a share of the weights, gathered layer by layer).

        Raises UserError naming the missing or damaged file, or the reason why the model cannot be a target.
        """
        from transformers import AutoConfig, AutoTokenizer

        from headstart.inference.decoding.probe import check_driven

        if dtype not in ("auto", *DTYPES):
            raise UserError(f"target.dtype must be auto, {', '.join(DTYPES)}, found {dtype!r}")
        device = check_device(device)
        check_folder(path)
        here = {"trust_remote_code": False, "local_files_only": not (Path(path).is_dir() or hub_answers())}
        with loading(path):
            config = AutoConfig.from_pretrained(path, **here)
            check_config(config, attention, str(path))  # before the weights, which are large
            tokenizer = AutoTokenizer.from_pretrained(path, **here)
            how: Any = {"dtype": DTYPES.get(dtype, "auto"), "attn_implementation": attention, **placement(device, config), **here}
            model, loaded = model_class(config).from_pretrained(path, output_loading_info=True, **how)
        wait_for_all(device)
        if absent := sorted(loaded["missing_keys"]):  # transformers would go on with random numbers in their place
            raise UserError(f"target {path}: its weights lack {absent[0]} ({len(absent)} tensors): download them again")
        if model.dtype is torch.bfloat16 and model.device.type == "cpu" and not multiplies_bf16(model.device):
            log.warning("%s is in bfloat16, which this CPU does not multiply itself: torch reads many tokens several times as fast in fp32 "
                        "(target.dtype=float32, twice the memory); decoding in C++ is as fast in either", path)  # fmt: skip
        target = cls(model, tokenizer, name=str(path))
        target.typed = "auto" if dtype == "auto" or config.dtype == model.dtype else dtype
        target.tensor = tensor_size(device)
        gather_ahead(target.layers)
        check_driven(target)
        return target

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: those that end transformers' ``generate``, and the tokenizer's eos token. Some fine-tunes end with
        the latter, but still have the generation_config.json of their base model, which does not name it.
        """
        ids, own = getattr(self.model.generation_config, "eos_token_id", None), getattr(self.tokenizer, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        ids = ids if isinstance(ids, (list, tuple)) else [ids]
        return tuple(dict.fromkeys(token for token in [*ids, own] if token is not None))

    def prepack(self) -> Target:
        """Prepare the weights for faster decoding. Afterwards the layers' weights can only be multiplied by, not read or trained."""
        _ = self.fingerprint  # computed now, while the weights can still be read
        prepack_beside(self.ends.head_VD)
        self.reader.quicken()
        vars(self).pop("quick", None)  # to be found again: the fused reader that it stands for was replaced
        return self

    def opened(self) -> Target:
        return self

    def first_values(self) -> Iterable[tuple[str, Tensor]]:
        read = read_names(self.model)
        return ((name, _whole(p.detach()).flatten()[:FEW]) for name, p in self.model.named_parameters() if name.startswith(read))

    def read_apart(self) -> Target:
        """For a target that is sharded over several processes: from now on every process passes rows of its own to ``read``, and has whole
        copies of the embedding and the output head. All processes must call this, and later ``read``, at the same time and with equally
        many rows. Any other target stays as it is.
        """
        if self.sharded and not self.apart:
            _ = self.fingerprint  # computed now: it gathers the shards of all processes
            self.apart, ends = True, copy.copy(self.ends)
            let_go(self.model)
            if hasattr(ends.embed.weight, "full_tensor"):
                ends.embed = nn.Embedding.from_pretrained(_whole(ends.embed.weight))
            self.ends, ends.whole = ends, None  # no model: nobody may run its layers alone
            if self.tensor > 1:
                self.group = torch.distributed.new_subgroups(self.tensor)[0]
        return self

    def new_memory(self, rows: int = 0) -> Slots:
        """A key-value cache for one sequence with room for ``rows`` rows."""
        return Slots(rows)

    @torch.no_grad()
    def read_rows(
        self, tokens_BR: Tensor, positions_BR: Tensor, memory: Memory, sees: Sees, taps: Collection[int] = ()
    ) -> tuple[dict[int, Tensor], Tensor]:
        """A pass of decoding: read rows after those in ``memory`` (the key-value cache) and add them to it. Returns the tapped states and
        the final state, [B, R, D] each. Raises UserError for a tap that is no layer of the target.
        """
        self.check_taps(taps)
        return self.reader.read(tokens_BR, positions_BR, memory, sees, taps)

    @torch.no_grad()
    def read(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Teacher-forced pass over packed documents. A document begins wherever the positions restart.

        Returns the tapped states and the final state, [B, T, D] each. Raises UserError for a tap that is no layer of the target.
        """
        if self.quick:
            return self._read_quickly(tokens_BT.to(self.device), positions_BT.to(self.device), taps)
        if self.group is None:
            with frozen_layers(self.model):
                return self.read_with_grad(tokens_BT, positions_BT, taps)
        kept: tuple[dict[int, Tensor], Tensor] | None = None
        for member in range(self.tensor):  # the rows of one process at a time, so that a pass needs memory for these alone
            theirs = [x.to(self.device).clone() for x in (tokens_BT, positions_BT)]
            for x in theirs:
                torch.distributed.broadcast(x, group=self.group, group_src=member)
            found = self.read_with_grad(theirs[0], theirs[1], taps)
            if member == torch.distributed.get_rank(self.group):
                kept = found
        assert kept is not None
        return kept

    @cached_property
    def quick(self) -> bool:
        """Whether packed documents are read by the fused kernels of a GPU, which keep nothing for gradients (heads/kernels/fused.py)."""
        quick = self.device.type == "cuda" and self.dtype in (torch.bfloat16, torch.float16) and not self.spread
        if quick and not any(p.requires_grad for p in self.model.parameters()) and self.reader.lean is None:
            self.reader.quicken(own=False)
        return quick and self.reader.lean is not None

    def _read_quickly(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]:
        self.check_taps(taps)
        lean, documents_BT = self.reader.lean, _documents(positions_BT)
        assert lean is not None
        sees = ChainSees(documents_BT) if documents_BT.any() else CausalSees(tokens_BT.shape[1], tokens_BT.shape[1])
        return lean.read(tokens_BT, positions_BT, Passing(), sees, taps)

    def read_with_grad(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]:
        """``read`` with gradients, for training an adapter that is part of the target."""
        tokens_BT, positions_BT = tokens_BT.to(self.device), positions_BT.to(self.device)
        documents_BT = _documents(positions_BT)
        inputs = {"input_ids": tokens_BT, "position_ids": positions_BT, "use_cache": False}
        self.check_taps(taps)
        # transformers would build a mask for sliding windows, and on a CPU our attention is faster than torch's
        own = self.reader.follows and (self.reader.windows or self.device.type == "cpu")
        if not documents_BT.any() and not own:  # one document in each row: the model's own causal mask, which has the fastest kernel
            return self.reader.run(taps, **inputs)
        return self.reader.run_by(ChainSees(documents_BT), 0, positions_BT, taps, **inputs)

    def logits(self, final_RD: Tensor) -> Tensor:
        return self.ends.logits(final_RD)
