"""One side of benchmarks/train_step.py: EAGLE-3 training steps of Headstart or another library, in that library's environment.

    python train_step_side.py SIDE FOLDER CASE      # SIDE: headstart, speculators, speculators_torch (on a GPU), specforge, modelopt,
                                                    # modelopt_compiled

Reads the weights and inputs that train_step.py wrote to ``FOLDER`` (safetensors, named as in EAGLE-3 files) and makes the model of CASE
(JSON) from them. For every line of standard input it then takes a step and prints a line of JSON: ``seconds`` (CPU time, user and
system), ``faults`` (page faults), ``peak_bytes`` (largest resident size within the step minus that before it) and ``losses`` by depth.
On a GPU, ``seconds`` is wall-clock time until the GPU is done, and ``peak_bytes`` counts its tensors. Between steps the process waits.
The libraries are unmodified. What their training loops do besides forward and backward (optimiser, clipping, data) is left out on
every side.

Shape suffixes: B batch (1), T positions, D hidden.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TAPS = (2, 6, 9)
Step = Callable[[int], tuple[Tensor, Callable[[], list[float]]]]  # tokens -> the loss, and the losses by depth
Weights = dict[str, Tensor]


def llama(case: dict[str, Any], **more: Any) -> Any:
    """The transformers config of the drafter's layer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=case["vocab"], hidden_size=case["hidden"], num_attention_heads=case["hidden"] // 64, num_hidden_layers=1, head_dim=64,
        num_key_value_heads=case["hidden"] // 64, intermediate_size=3 * case["hidden"], rms_norm_eps=1e-6, max_position_embeddings=4096,
        tie_word_embeddings=False, attention_bias=False, pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **more,
    )  # fmt: skip


def fill(model: nn.Module, weights: Weights, renamed: Callable[[str], str], ignored: tuple[str, ...]) -> None:
    """Load ``weights``. Raises RuntimeError if a weight has no parameter, or a parameter no weight."""
    found = model.load_state_dict({renamed(name): tensor for name, tensor in weights.items()}, strict=False)
    missing = [name for name in found.missing_keys if name not in ignored]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"weights that have no place: {found.unexpected_keys}; without weights: {missing}")


def headstart(case: dict[str, Any], weights: Weights, given: Weights) -> tuple[nn.Module, Step]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.loss_memory import shape
    from headstart.data.batch import TargetBatch
    from headstart.heads import hub
    from headstart.heads.base import TargetEnds
    from headstart.trainers.learner import Learner

    drafter = hub.build("eagle", shape(case["hidden"], case["vocab"]), taps=list(TAPS), fc_norm=False, norm_output=False)
    own, dtype = dict(weights), DTYPES[case["dtype"]]
    embedding = nn.Embedding.from_pretrained(own.pop("embed_tokens.weight").to(given["head"].device))
    fill(drafter, own, str, ("embed_tokens.weight",))
    drafter.attach(TargetEnds(embedding, given["head"]))
    drafter.to(device=given["head"].device, dtype=dtype)
    loss: dict[str, Any] = {name: case[name] for name in ("depth", "decay", "chunk", "kernel")} | {"terms": {"kl": 1.0}}
    learner = Learner(drafter, **loss)

    def step(n: int) -> tuple[Tensor, Callable[[], list[float]]]:
        x_BT = given["tokens"][:, :n]
        states = dict(zip(TAPS, given["states"][:, :n].chunk(3, dim=-1), strict=True))
        about = torch.ones_like(x_BT, dtype=torch.bool), torch.arange(n, device=x_BT.device)[None], torch.zeros_like(x_BT)
        out = learner(TargetBatch(x_BT, *about, states, given["final"][:, :n]), figures=case["figures"])
        return out.loss_sum / out.weight_sum, lambda: [
            float(s) / case["decay"] ** k / int(out.count_K[k]) for k, s in enumerate(out.loss_K)
        ]

    return drafter, step


def speculators(case: dict[str, Any], weights: Weights, given: Weights, losses: str = "fused") -> tuple[nn.Module, Step]:
    """``losses``: the library's Triton losses (on a GPU), or its torch losses, which its torch.compile fuses."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama(case)
    on_cpu = given["head"].device.type == "cpu"
    layer._attn_implementation = "eager" if on_cpu else "simple_flex_attention"  # the default, which has no backward pass on a CPU
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=case["depth"])
    about = SpeculatorsConfig(algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=case["vocab"],
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        speculators_config=about,
    )
    model = Eagle3DraftModel(config)
    own = weights | {"verifier_lm_head.weight": given["head"], "verifier_norm.weight": torch.ones(case["hidden"])}
    fill(model, own, lambda name: name.replace("midlayer.", "layers.0."), ())
    model.to(DTYPES[case["dtype"]])
    chosen = resolve_loss_config("kl_div", "eager" if on_cpu else losses)
    torch._dynamo.config.suppress_errors = True  # what torch cannot compile (their Triton losses, in 2.11) runs as it is

    def step(n: int) -> tuple[Tensor, Callable[[], list[float]]]:
        # as its shift_batch aligns them: token t + 1 beside the state of t; judged by what the target said at t + 1
        x_BT, places_BT = given["tokens"][:, 1:n], torch.arange(1, n, device=given["head"].device)[None]
        judged_BT = places_BT < n - 1
        _, loss, found = model(
            given["states"][:, : n - 1], x_BT, torch.zeros_like(x_BT), judged_BT, places_BT, given["final"][:, 1:n],
            ttt_steps=case["depth"], ttt_step_loss_decay=case["decay"], loss_config=chosen,
        )  # fmt: skip
        return loss, lambda: [float(found[f"loss_{k}_sum"]) / case["decay"] ** k for k in range(case["depth"])]

    return model, step


def specforge(case: dict[str, Any], weights: Weights, given: Weights) -> tuple[nn.Module, Step]:
    """On a CPU it uses its torch loss: its Triton kernel would have to be interpreted, which takes minutes."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    if given["head"].device.type == "cpu":
        eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    drafter = LlamaForCausalLMEagle3(llama(case, draft_vocab_size=case["vocab"]), attention_backend="sdpa")
    fill(drafter, weights, str, tuple(name for name, _ in drafter.named_buffers()))
    drafter.to(DTYPES[case["dtype"]])
    drafter.freeze_embedding()
    model = eagle3.OnlineEagle3Model(drafter, length=case["depth"], attention_backend="sdpa")

    def step(n: int) -> tuple[Tensor, Callable[[], list[float]]]:
        x_BT, judged_BT = given["tokens"][:, 1:n], torch.arange(1, n, device=given["head"].device)[None] < n - 1
        with torch.no_grad():  # its target's pass returns logits, so the head runs here
            said = given["final"][:, 1:n] @ given["head"].T
        losses = model(x_BT, torch.ones_like(x_BT, dtype=torch.bool), said, judged_BT[..., None], given["states"][:, : n - 1])[0]
        total = sum((case["decay"] ** k * loss for k, loss in enumerate(losses)), torch.zeros(()))

        def by_depth() -> list[float]:  # its losses are divided by all positions, and lack the target's entropy
            entropy_T = torch.cat([entropy(some) for some in said[0].split(64)])
            return [float(loss) * (n - 1) / (n - 2 - k) - float(entropy_T[k : n - 2].mean()) for k, loss in enumerate(losses)]

        return total, by_depth

    return drafter, step


def modelopt(case: dict[str, Any], weights: Weights, given: Weights, compiled: bool = False) -> tuple[nn.Module, Step]:
    """Its Eagle module over given states. ``compiled``: with torch.compile, its default, which takes minutes per length."""
    import modelopt.torch.speculative as speculative
    from transformers import LlamaForCausalLM

    dtype = DTYPES[case["dtype"]]
    layer = llama(case, dtype=dtype)
    drafter = layer.to_dict() | dict(
        draft_vocab_size=case["vocab"], use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=list(TAPS), has_lm_head=True,
        use_last_layernorm=True, use_input_layernorm_in_first_layer=True,
    )  # fmt: skip
    about = dict(
        eagle_offline=True, eagle_ttt_steps=case["depth"], eagle_loss_decay_factor=case["decay"], eagle_architecture_config=drafter,
        eagle_use_torch_compile=compiled,
    )  # fmt: skip
    model = speculative.convert(LlamaForCausalLM(layer).to(given["head"].device, dtype), [("eagle", about)])
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights["embed_tokens.weight"])
        model.lm_head.weight.copy_(given["head"])
    own = {name: weight for name, weight in weights.items() if name != "embed_tokens.weight"}
    fill(model.eagle_module, own, lambda name: name.replace("midlayer.", "layers.0."), ())
    model.train()
    said: list[Tensor] = []  # collects the loss of each depth, which the model does not return
    judged = model._eagle_loss

    def judge(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        loss, right = judged(*arguments)
        said.append(loss.detach().clone())
        return loss, right

    model._eagle_loss = judge

    def step(n: int) -> tuple[Tensor, Callable[[], list[float]]]:
        said.clear()
        if any(mask.shape[-2] != n for mask in model._cached_attn_blk_masks.values()):  # cached for another length
            model._cached_attn_blk_masks.clear()
        x_BT = given["tokens"][:, :n]
        judged_BT = torch.arange(n, device=x_BT.device)[None] < n - 1
        read = {"base_model_hidden_states": given["final"][:, :n], "aux_hidden_states": given["states"][:, :n]}
        loss = model(x_BT, attention_mask=torch.ones_like(judged_BT), loss_mask=judged_BT, base_model_outputs=read).loss

        def by_depth() -> list[float]:  # its losses lack the target's entropy
            entropy_T = torch.cat([entropy(rows @ given["head"].T) for rows in given["final"][0, :n].split(64)])
            return [float(loss) - float(entropy_T[1 + k : n - 1].mean()) for k, loss in enumerate(said)]

        return loss, by_depth

    return model, step


def entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits.float()).entropy()


SIDES: dict[str, tuple[Callable[..., tuple[nn.Module, Step]], str]] = {
    "headstart": (headstart, "headstart"),
    "speculators": (speculators, "speculators"),
    "speculators_torch": (partial(speculators, losses="eager"), "speculators"),
    "specforge": (specforge, "specforge"),
    "modelopt": (modelopt, "nvidia-modelopt"),
    "modelopt_compiled": (partial(modelopt, compiled=True), "nvidia-modelopt"),
}


def resident(field: str) -> int:
    """Resident bytes (Linux). VmRSS: now; VmHWM: the peak since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measured(model: nn.Module, step: Step, tokens: int, device: torch.device) -> dict[str, Any]:
    return _on_gpu(model, step, tokens) if device.type == "cuda" else _on_cpu(model, step, tokens)


def _on_gpu(model: nn.Module, step: Step, tokens: int) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    loss, losses = step(tokens)
    loss.backward()
    torch.cuda.synchronize()
    took, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return {"seconds": took, "peak_bytes": peak, "losses": losses()}


def _on_cpu(model: nn.Module, step: Step, tokens: int) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, a, start = resident("VmRSS"), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loss, losses = step(tokens)
    loss.backward()
    model.zero_grad(set_to_none=True)
    b, end = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    return {
        "seconds": b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime,
        "wall_seconds": end - start,
        "faults": b.ru_minflt - a.ru_minflt,
        "peak_bytes": resident("VmHWM") - before,
        "losses": losses(),
    }


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("side", choices=SIDES)
    cli.add_argument("folder", type=Path)
    cli.add_argument("case", type=json.loads)
    args = cli.parse_args()
    side, folder, case = args.side, args.folder, args.case
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to standard output, not what a library prints
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, package = SIDES[side]
    dtype, device = DTYPES[case["dtype"]], torch.device(case["device"])
    read = load_file(folder / "given.safetensors", device=case["device"])
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in read.items()}
    model, step = make(case, load_file(folder / "weights.safetensors"), given)
    model.to(device)
    for name, weight in model.named_parameters():
        of_target = name.startswith(("embed_tokens.", "verifier_", "model.")) or (side.startswith("modelopt") and name == "lm_head.weight")
        weight.requires_grad_(not of_target and (case["trained"] or not name.endswith("lm_head.weight")))
    start = time.perf_counter()
    # Warms up. torch.compile compiles for one length first, and for any length after a second one.
    once = device.type == "cuda" or side == "modelopt_compiled"
    for tokens in (case["tokens"],) if once else (4 * case["depth"], 5 * case["depth"]):
        measured(model, step, tokens, device)
    first = time.perf_counter() - start
    version = None if side == "headstart" else importlib.metadata.version(package)
    about = {"version": version, "torch": torch.__version__.partition("+")[0], "seconds_of_first_step": first}
    print(json.dumps(about), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measured(model, step, case["tokens"], device)), file=answers, flush=True)


if __name__ == "__main__":
    main()
