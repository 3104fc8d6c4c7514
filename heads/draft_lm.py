"""An independent small causal language model as drafter (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

Any full-attention causal LM of transformers with the target's tokenizer, from a config or a folder. It reads no
state of the target: root t feeds it x[t+1]. It alone must also read x[0], which no root chose, so its memory
holds one row more than there are roots.

Fed with true tokens, a guess of depth d from root t is its guess of depth 1 from root t+d-1: training one depth
trains them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.base import Draft, Drafter, Roots, TargetShape, Unembedding
from heads.errors import UserError
from heads.layers import AsCache, ChainSees, Memory, Sees, causal


class DraftLm(Drafter):
    """``folder``: a Hugging Face model to start from; else ``config``: keys of a Hugging Face config (with ``model_type``)."""

    format = "causal_lm"
    unrolls = False

    def __init__(self, shape: TargetShape, *, config: dict[str, Any] | None = None, folder: str | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__(shape)
        if config is None and folder is None:
            raise UserError("give the draft model head.config or head.folder (the folder wins)")
        absent: set[str] = set()
        try:
            if folder is not None:
                hf = AutoConfig.from_pretrained(folder)
                self.lm, loaded = AutoModelForCausalLM.from_pretrained(folder, config=hf, dtype=torch.float32, output_loading_info=True)
                absent = loaded["missing_keys"]
            else:
                keys = {"vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_positions, **(config or {})}
                hf = AutoConfig.for_model(keys.pop("model_type", "llama"), **keys)
                self.lm = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        except Exception as e:  # transformers raises a dozen kinds for what lies in files and settings
            why = (str(e).strip() or repr(e)).splitlines()[0]
            raise UserError(f"the draft model {folder or config} cannot be made: {why}") from e
        if absent:  # transformers would go on with random numbers in their place
            raise UserError(f"the draft model {folder} lacks {min(absent)} ({len(absent)} tensors)")
        hf = self.lm.config
        if hf.vocab_size != shape.vocab_size:
            raise UserError(f"the draft model has a vocabulary of {hf.vocab_size}, the target {shape.vocab_size}: they must share one")
        if set(getattr(hf, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise UserError(f"the draft model has layers of kinds {sorted(set(hf.layer_types))}: only full attention is supported")
        if getattr(hf, "final_logit_softcapping", None):
            raise UserError("the draft model caps its logits (final_logit_softcapping), which is not supported: choose another family")
        self.arguments = {"config": {**hf.to_diff_dict(), "model_type": hf.model_type}}  # what rebuilds it without the folder

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        tokens, positions = roots.chosen_BT, roots.positions_BT + 1
        first = memory.rows() == 0
        if first:  # x[0] in front; positions of the tokens themselves, which restart at document borders
            tokens = torch.cat([roots.read_BT[:, :1], tokens], dim=1)
            positions = torch.cat([roots.positions_BT, positions[:, -1:]], dim=1)
            n = tokens.shape[1]
            sees = _of_tokens(sees) if isinstance(sees, ChainSees) else causal(n, n, tokens.device)
        hidden = self._read(tokens, positions, memory, sees)[:, int(first) :]
        draft = Draft(hidden)
        return draft if ask is None else draft.at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        if isinstance(sees, ChainSees):  # a row in front here too, so that row i continues row i
            padded = [torch.cat([x[:, :1], x], dim=1) for x in (tokens_BN, positions_BN + 1)]
            return Draft(self._read(padded[0], padded[1], memory, _of_tokens(sees))[:, 1:])
        return Draft(self._read(tokens_BN, positions_BN + 1, memory, sees))

    def _read(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Tensor:
        B, n = tokens_BN.shape
        seen = sees.dense(n, memory.rows() + n)
        if seen is None:
            seen = torch.ones(1, 1, n, memory.rows() + n, dtype=torch.bool, device=tokens_BN.device)
        # never a boolean mask: eager attention would add it as 0 and 1
        mask = torch.zeros(seen.shape, dtype=self.lm.dtype, device=seen.device).masked_fill_(~seen, torch.finfo(self.lm.dtype).min)
        mask = mask.expand(B, -1, -1, -1)
        decoder = self.lm.get_decoder()
        out = decoder(input_ids=tokens_BN, position_ids=positions_BN, attention_mask=mask, past_key_values=AsCache(memory), use_cache=True)
        return out.last_hidden_state

    def unembedding(self, depth: int) -> Unembedding:
        return Unembedding(self.lm.get_output_embeddings().weight)


def _of_tokens(sees: ChainSees) -> ChainSees:
    """The rule over tokens x[0..T] instead of roots: row i is x[i]; the last one belongs to no document."""
    documents = sees.documents_BT
    if documents is not None:
        documents = torch.cat([documents, torch.full_like(documents[:, :1], -1)], dim=1)
    return ChainSees(documents, sees.depth, closed_form=False, spans=[])
