"""Runs SGLang's model classes in this process without its server: on a CPU, in fp32, for one sequence. See in_sglang.py."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

ABSENT = (  # imported, never called: for GPUs, images and audio, and of the server
    *("sgl_kernel", "flashinfer", "torchvision", "torchaudio", "torchcodec", "decord"),
    *("setproctitle", "uvicorn", "fastapi"),
)
MODULES = ("llama", "qwen3", "llama_eagle", "llama_eagle3", "dflash", "dspark")  # of sglang.srt.models
Found = dict[tuple[int, int], Tensor]  # (root, depth) -> the logits of that guess


class Absent:
    """Imports the packages of ABSENT as empty modules in which every name exists."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Attention:
    """Replaces SGLang's attention backends. It keeps the keys and values of one sequence, in order of positions."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new = (k.view(-1, layer.tp_k_head_num, layer.head_dim), v.view(-1, layer.tp_v_head_num, layer.head_dim))
        old = self.rows.get(layer.layer_id)
        self.rows[layer.layer_id] = new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
        return self.rows[layer.layer_id]

    def cut(self, length: int) -> None:
        self.rows = {i: (k[:length], v[:length]) for i, (k, v) in self.rows.items()}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any) -> Tensor:
        keys, values = self.write(layer, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        sees = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if layer.attn_type.value == "decoder":
            sees = sees.tril(len(keys) - len(queries))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sees, scale=layer.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class Sglang:
    """SGLang, set up to serve the folder ``target``. ``place``: an empty folder for this process alone."""

    def __init__(self, target: Path, place: Path) -> None:
        from transformers.utils import import_utils

        for name, known in inspect.getmembers(import_utils, inspect.isfunction):
            if name.startswith("is_") and name.endswith("_available") and not inspect.signature(known).parameters:
                known()  # lets transformers find out which packages exist before ABSENT pretends that more do
        sys.meta_path.append(Absent())
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"  # the default leaves DSpark's confidence out
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        self.version = importlib.metadata.version("sglang")
        self.args = ServerArgs(model_path=str(target), device="cpu", dtype="float32", attention_backend="torch_native")
        publish(self.args, role="benchmark", ranks=SpawnRanks(world_rank=0))
        group = f"file://{place / 'group'}"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=group, backend="gloo")
        initialize_model_parallel(backend="gloo")
        entries = [importlib.import_module(f"sglang.srt.models.{name}").EntryClass for name in MODULES]
        self.classes = {cls.__name__: cls for entry in entries for cls in (entry if isinstance(entry, list) else [entry])}

    def config(self, folder: Path, draft: bool = True) -> Any:
        """A folder's config.json as SGLang's server reads it. (SGLang caches it: never reuse the path of a folder that was read.)"""
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(self.args, model_path=str(folder), is_draft_model=draft)

    def load(self, folder: Path, tensors: dict[str, Tensor], draft: bool = True) -> Any:
        """Build the model that config.json names and load these tensors. Parameters that they do not fill are NaN."""
        config = self.config(folder, draft).hf_config
        model = self.classes[config.architectures[0]](config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        model.load_weights(iter(tensors.items()))
        return model.eval()

    def capture(self, target: Any, folder: Path, served: Path, algorithm: str) -> list[int]:
        """Make ``target`` return the layers that the drafter in ``folder`` reads. Returns SGLang's numbers of these layers."""
        from sglang.srt.model_executor.model_runner_components.attention_backend_setup import configure_aux_hidden_state_capture
        from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import resolve_spec_aux_hidden_state_config
        from sglang.srt.runtime_context import get_context
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        get_context().override("benchmark", speculative_algorithm=algorithm, speculative_draft_model_path=str(folder))
        known = SpeculativeAlgorithm.from_string(algorithm)
        asked = {"server_args": self.args, "model_config": self.config(served, draft=False)}
        found = resolve_spec_aux_hidden_state_config(**asked, spec_algorithm=known, is_draft_worker=False)
        keys = ("eagle_use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "dflash_use_aux_hidden_state", "dflash_target_layer_ids")
        configure_aux_hidden_state_capture(model=target, is_dspark=known.is_dspark(), **{key: getattr(found, key) for key in keys})
        return list(target.model.layers_to_capture)

    def read(self, model: Any, attention: Attention, tokens: Tensor, first: int, states: Tensor | None = None, **more: Any) -> Any:
        """Read ``tokens``, the first at position ``first``. Returns the logits and the states of all of them."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        places = torch.arange(first, first + len(tokens))
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=len(tokens), input_ids=tokens, req_pool_indices=places, seq_lens=places + 1,
            out_cache_loc=places, seq_lens_sum=int((places + 1).sum()), capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_info=SimpleNamespace(hidden_states=states),
        )  # fmt: skip
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=attention)):
            return model(tokens, places, batch, **more)

    def unread(self, folder: Path, tensors: dict[str, Tensor]) -> list[str]:
        """The tensors that the model does not use: changing them changes nothing."""

        def content(tensors: dict[str, Tensor]) -> list[Any]:
            model = self.load(folder, tensors)
            ids = getattr(model, "hot_token_id", None)
            return [x.nan_to_num().double().sum().item() for x in model.parameters()] + ([] if ids is None else ids.tolist())

        own, other = content(tensors), {name: ~x if x.dtype == torch.bool else x + 1 for name, x in tensors.items()}
        return sorted(name for name in tensors if content(tensors | {name: other[name]}) == own)

    def share(self, model: Any, target: Any, algorithm: str) -> None:
        """Give the drafter the target's modules, as SGLang's workers do."""
        embed, head = target.get_embed_and_head()
        if algorithm == "EAGLE3":
            model.set_embed(embed)
        elif algorithm == "EAGLE":
            model.set_embed_and_head(embed, head)
        elif algorithm == "DSPARK":
            model.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)

    def autoregressive(self, model: Any, text: Tensor, states: Tensor, roots: Sequence[int], depth: int) -> Found:
        """EAGLE: depth 1 at every root, all depths at ``roots`` (descending). Each depth reads the state of the depth before."""
        attention = Attention()
        begun = self.read(model, attention, text[1:], 0, states)
        found = {(t, 1): logits for t, logits in enumerate(begun.next_token_logits)}
        for t in roots:
            attention.cut(t + 1)
            state = begun.hidden_states[t : t + 1]
            for d in range(2, depth + 1):
                out = self.read(model, attention, text[t + d : t + d + 1], t + d - 1, state)
                found[t, d], state = out.next_token_logits[0], out.hidden_states
        return found

    def independent(self, model: Any, text: Tensor, roots: Sequence[int], depth: int) -> Found:
        """A draft model: it reads only the text."""
        logits = self.read(model, Attention(), text, 0).next_token_logits
        return {(t, d): logits[t + d] for t in roots for d in range(1, depth + 1)}

    def blocks(self, model: Any, target: Any, text: Tensor, states: Tensor, roots: Sequence[int]) -> Found:
        """Block drafters: the target's states become keys and values, then the block of each root (descending) is filled."""
        from sglang.srt.speculative.dspark_components.dspark_config import resolve_runtime_config

        embed, head = target.get_embed_and_head()
        size, mask, markov = model.block_size, model.draft_config.mask_token_id, getattr(model, "markov_head", None)
        if markov is not None:
            how = resolve_runtime_config(draft_hf_config=model.config, speculative_num_draft_tokens=None, target_vocab_size=len(head))
            size, mask = how.gamma, how.mask_token_id
        found: Found = {}
        attention, context = Attention(), model.project_target_hidden(states)
        for layer in model.layers:
            k, v = layer.self_attn.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
            k = layer.self_attn.apply_k_rope(torch.arange(len(k)), layer.self_attn.apply_k_norm(k))
            attention.write(layer.self_attn.attn, k, v)
        for t in roots:
            attention.cut(t + 1)
            ids = torch.cat([text[t + 1 : t + 2], torch.full((size - 1,), mask)])
            slots = self.read(model, attention, ids, t + 1, input_embeds=embed[ids]).hidden_states
            before = text[t + 1 : t + 1 + size]  # the true tokens before each guess, from the anchor on
            if markov is not None:
                sure = model.confidence_head(slots, markov.get_prev_embeddings(before))
                rows = torch.cat([self.biased(model, slots, before), sure[:, None]], dim=1)
                self.check_markov(model, slots, before[:1])
            elif model.projector_type == "domino":
                rows = self.corrected(model, target, slots, before)
                self.check_walk(model, target, slots, before[:1])
            elif getattr(model, "candidate_selector", None) is not None:
                rows = self.selected(model, head, slots[1:], before)
            else:
                rows = (slots @ head.T)[1:]
            found |= {(t, d): row for d, row in enumerate(rows, start=1)}
        return found

    def biased(self, model: Any, slots: Tensor, before: Tensor) -> Tensor:
        """DSpark's logits after these tokens, [block, vocabulary]."""
        rows, state = model.compute_base_logits(slots)[0], model.markov_head.init_state(slots[None])
        for k in range(len(slots)):
            bias, state = model.markov_head.step_bias(before[k : k + 1], hidden_states=slots[k : k + 1], state=state)
            rows[k] += bias[0]
        return rows

    def check_markov(self, model: Any, slots: Tensor, anchor: Tensor) -> None:
        """Raises RuntimeError if SGLang's greedy loop over a DSpark block takes other tokens than the argmax of ``biased``."""
        from sglang.srt.speculative.dspark_components.dspark_draft import draft_markov_block

        alone = SimpleNamespace(sync=lambda site, tokens: tokens)  # one process has nothing to agree on
        given = {"base_logits": model.compute_base_logits(slots)[0][None], "draft_hidden": slots[None], "anchor_tokens": anchor}
        how = {"step_temperatures": torch.zeros(1), "noise": SimpleNamespace(key=0, offset=torch.tensor([0])), "greedy_draft": True}
        walked = draft_markov_block(markov_head=model.markov_head, tp_sync=alone, **given, **how)[0][0]
        if not self.biased(model, slots, torch.cat([anchor, walked[:-1]])).argmax(-1).equal(walked):
            raise RuntimeError("SGLang walks through a DSpark block in another way")

    def selected(self, model: Any, head: Tensor, slots: Tensor, before: Tensor) -> Tensor:
        """DFlash 2's logits after these tokens, [block - 1, vocabulary], -inf for tokens that are not candidates."""
        logits = slots @ head.T
        ids = logits.topk(model.candidate_selector.top_k).indices
        unary = model._transform_unary_logits(logits.gather(1, ids))
        rows = torch.full_like(logits, -torch.inf)
        for e in range(len(ids)):  # one slot at a time, each after its own anchor
            slot = slice(e, e + 1)
            states = {"candidate_ids": ids[None, slot], "unary_logits": unary[None, slot], "hidden_states": slots[None, slot]}
            rows[e, ids[e]] = model.candidate_selector.build_lattice(**states, anchor_token_ids=before[slot])[0, 0, 0]
        return rows

    def corrected(self, model: Any, target: Any, slots: Tensor, before: Tensor) -> Tensor:
        """Domino's logits after these tokens, [block - 1, vocabulary]: SGLang leaves out the deepest guess."""
        embed, head = target.get_embed_and_head()
        read = model.prefix_gru(embed[before][None])[0][0]
        fix = model.embed_proj(torch.cat([slots, read], dim=-1))
        return (slots @ head.T + torch.cat([torch.zeros_like(fix[:1]), fix[1:]]))[:-1]

    def check_walk(self, model: Any, target: Any, slots: Tensor, anchor: Tensor) -> None:
        """SGLang's loop over a Domino block returns only tokens. Raises RuntimeError if the argmax of ``corrected`` differs from them."""
        from sglang.srt.speculative.domino_utils import domino_greedy_rollout

        modules = {"target_embedding": target.model.embed_tokens, "prefix_gru": model.prefix_gru, "embed_proj": model.embed_proj}
        how = {"vocab_size": model.config.vocab_size, "shift_label": model.shift_label, "candidate_pool_size": 0, "in_cuda_graph": False}
        head = target.get_embed_and_head()[1]
        walked = domino_greedy_rollout(draft_hidden=slots[None], bonus_tokens=anchor, lm_head_weight=head, **modules, **how)[0]
        if not self.corrected(model, target, slots, torch.cat([anchor, walked])).argmax(-1).equal(walked):
            raise RuntimeError("SGLang walks through a Domino block in another way")
