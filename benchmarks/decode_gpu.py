"""What decoding gains on one GPU: an 8B target of random weights in bf16, context 512. Needs torch, transformers and this checkout.

    python benchmarks/decode_gpu.py            # at most 9 minutes; appends to benchmarks/results/decode_gpu.jsonl
    python benchmarks/decode_gpu.py --smoke    # toy shapes on any machine: does it run?

Each measurement is written at once as a JSON line, to standard output and to the file; a failed one leaves its error in its line. The
parts run in separate processes, so that a failure in one does not affect the next.

- ``bandwidth``: measured on this GPU: a copy, and reductions that only read. Bounds divide bytes by the best of them.
- ``plain``: one sequence, no drafter. Bound: read all weights except the embedding table, and keys and values of 512 tokens, per token.
  ``plain, modules``: with transformers' modules instead of our fused passes (heads/kernels/fused.py), also as device graphs.
- ``v``: time to verify a tree, by its number of nodes (with verdict and compaction), over a plain round; as device graphs.
- ``round``: wall-clock time with an EAGLE-3 drafter of random weights, K = 7, 60 nodes. Bound: read the target's weights once, and those
  of the drafter's layer and head 7 times.
- ``simulated``: the same with a verdict that accepts 5 guesses per round, whatever the target says. The real verdict is still computed.
- ``batch``: plain and drafted rounds of 1, 4, 16 and 64 sequences. Each depth is accepted with an assumed probability, given in the line.
  The tree (or none) is the one that the measured parts of a round predict to be best; its real gain is measured.
- ``peer ...``: transformers' generate with a static cache and torch.compile, a minimal compiled loop like gpt-fast, and assisted generation
  against ours with the same drafter (the target's first layers; the later layers are scaled down).
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkout  # noqa: F401  (first: it finds the others where nothing is installed)
from benchmarks.gpu import Bench, accepting
from benchmarks.pair import plant
from benchmarks.rows import Row, measure
from headstart.heads import hub
from headstart.heads.lm import Backbone
from headstart.inference.decoding import rounds
from headstart.inference.decoding.policy import TreePolicy

TREES = {
    1: TreePolicy("chain", depth=1),
    3: TreePolicy("chain", depth=3),
    8: TreePolicy(depth=4, nodes=8, branch=4, expand=2),
    16: TreePolicy(depth=5, nodes=16, branch=4, expand=4),
    32: TreePolicy(depth=6, nodes=32, branch=8, expand=8),
    60: TreePolicy(depth=7, nodes=60, branch=10, expand=10),
}
ASSUMED = {3: 0.75, 16: 0.82, 60: 0.88}  # nodes -> assumed acceptance of a reached depth: random weights cannot give a measured one


# The parts ------------------------------------------------------------------------------------------------------------


def measure_bandwidth(bench: Bench) -> dict[str, Any]:
    count, runs = (1 << 20) if bench.smoke else (1 << 32), 5  # bytes; number of reads or copies in a row
    x = torch.ones(count // 4, device=bench.device)
    y, w = torch.empty_like(x), torch.ones(count // 2, device=bench.device, dtype=torch.bfloat16).view(-1, 4096)
    v = torch.ones(4096, device=bench.device, dtype=torch.bfloat16)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: y.copy_(x), 2 * count), "sum": (lambda: x.sum(), count), "largest": (lambda: x.amax(), count),
        "matrix_vector": (lambda: w @ v, count),
    }  # fmt: skip

    def fastest(call: Callable[[], Any]) -> float:
        return min(bench.seconds(lambda: [call() for _ in range(runs)]) for _ in range(5)) / runs

    rates = {name: size / fastest(call) for name, (call, size) in calls.items()}
    bench.bandwidth = max(rates.values())
    return {"gigabytes_per_second": {k: r / 1e9 for k, r in rates.items()}, "best": bench.bandwidth / 1e9}


def engine_rows(bench: Bench) -> Iterator[Row]:
    yield "bandwidth", lambda: measure_bandwidth(bench)

    def plain() -> dict[str, Any]:
        bound, found = bench.bound_ms(), bench.timed(bench.engine(None, 1, [None]), 1)
        found["passes"] = bench.target.reader.passes
        return found | {"bound_ms": bound, "share_of_bound": None if bound is None else bound / found["round_ms"]}

    yield "plain, modules", plain
    bench.target.prepack()  # as in normal decoding
    yield "plain", plain
    drafter = bench.drafter()

    def v() -> dict[str, Any]:
        plain = bench.parts(bench.engine(None, 1, [None]), None, 1)[1]
        trees = [tree for n, tree in TREES.items() if n != 3]
        engine = bench.engine(drafter, 1, trees)
        times = {str(tree.nodes): bench.parts(engine, tree, 1) for tree in trees}
        return {
            "plain_ms": plain,
            "draft_ms": {n: draft for n, (draft, _) in times.items()},
            "verify_ms": {n: verify for n, (_, verify) in times.items()},
            "v": {n: verify / plain for n, (_, verify) in times.items()},
            "graphs": engine.rounds.graphs is not None,
        }

    yield "v", v
    tree = TREES[60]

    def a_round(accepted: int | None) -> dict[str, Any]:
        if accepted is not None:
            rounds.choose = accepting([1.0] * accepted + [0.0] * (tree.depth - accepted), bench.device)
        bound, found = bench.bound_ms(drafter, tree.depth), bench.timed(bench.engine(drafter, 1, [tree]), 1)
        return found | {"bound_ms": bound, "nodes": tree.nodes, "levels": tree.depth}

    yield "round", lambda: a_round(None)
    yield "simulated", lambda: a_round(5)


def batch_rows(bench: Bench) -> Iterator[Row]:
    bench.target.prepack()
    drafter, real = bench.drafter(), rounds.choose
    trees = {n: TREES[n] for n in ASSUMED}
    largest = 4 if bench.smoke else 64
    plain, drafted = bench.engine(None, largest, [None]), bench.engine(drafter, largest, list(trees.values()))

    def of(count: int) -> dict[str, Any]:
        rounds.choose, repeats = real, max(1, min(5, 16 // count))
        found: dict[str, Any] = {"sequences": count, "plain": bench.timed(plain, count, repeats)}
        base = bench.parts(plain, None, count)[1]
        for n, tree in trees.items():
            drafted.plans = {largest: tree}
            if (graphs := drafted.rounds.graphs) is not None:  # the graphs contain the verdict, so they are captured again
                graphs.kept.clear()
                graphs.pool = torch.cuda.graph_pool_handle()  # the old one ends with its last graph
            rounds.choose = accepting([ASSUMED[n]] * tree.depth, bench.device)
            made = bench.timed(drafted, count, repeats)
            cost = sum(bench.parts(drafted, tree, count)) / base
            found[str(n)] = made | {"assumed_acceptance": ASSUMED[n], "round_over_plain": cost, "predicted": made["accepted_length"] / cost}
        best = max(trees, key=lambda n: found[str(n)]["predicted"])
        pays = found[str(best)]["predicted"] >= 1.03  # the tuner's margin
        gain = found[str(best)]["tokens_per_second"] / found["plain"]["tokens_per_second"]
        return found | {"chosen": best if pays else None, "chosen_over_plain": gain if pays else 1.0}

    for count in (1 << i for i in range(0, largest.bit_length(), 2)):
        yield f"batch {count}", lambda count=count: of(count)  # type: ignore[misc]


def peer_rows(bench: Bench) -> Iterator[Row]:
    from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache
    from transformers.utils import logging

    logging.set_verbosity_error()
    model, new = bench.model, 8 if bench.smoke else 96
    ids = torch.tensor([bench.prompts[0]], device=bench.device)

    @torch.no_grad()
    def generate(**how: Any) -> dict[str, Any]:
        """Tokens per second after the first token: the prompt's pass is measured separately and subtracted."""
        passes: list[int] = []
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

        def whole() -> Any:
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **how)

        for _ in range(2):  # the first call may compile
            whole()
        prompt = min(bench.seconds(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)) for _ in range(3))
        took = statistics.median(bench.seconds(whole) for _ in range(3))
        found = {"tokens_per_second": (new - 1) / (took - prompt), "seconds_of_prompt": prompt, "new_tokens": new}
        if "assistant_model" in how:  # no hooks on a compiled model
            hook = bench.target.body.register_forward_pre_hook(lambda *_: passes.append(1))
            whole()
            hook.remove()
            found["accepted_length"] = new / len(passes)
        return found

    yield "peer generate", lambda: generate()

    first, dial, tokens = 2, 0.015, 5
    plant(model, first, dial, confidence=1.0)
    config = LlamaConfig(**{**model.config.to_diff_dict(), "num_hidden_layers": 1})
    with torch.device(bench.device):
        small = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    small.model.layers, small.config.num_hidden_layers = model.model.layers[:first], first
    small.model.embed_tokens, small.model.norm, small.lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
    small.generation_config.update(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )

    def ours() -> dict[str, Any]:
        with torch.device("meta"):
            drafter: Any = hub.build("draft_lm", bench.target.shape, config={**config.to_diff_dict(), "model_type": "llama"})
        bench.target.prepack()
        drafter.lm, drafter.reader = small, Backbone(small.get_decoder())
        drafter.reader.quicken(own=False)  # its layers are the target's
        drafter.attach(bench.target.ends)
        return bench.timed(bench.engine(drafter.eval(), 1, [TreePolicy("chain", depth=tokens)]), 1)

    yield "peer assisted generation", lambda: generate(assistant_model=small)

    @torch.no_grad()
    def minimal() -> dict[str, Any]:
        """One call of a compiled function per token, over a static cache. The next token stays on the device."""
        gc.collect()  # frees earlier engines: graphs captured in inference mode must not coexist with other captures
        cache = StaticCache(config=model.config, max_cache_len=bench.context)

        def step(token: Tensor, position: Tensor) -> Tensor:
            out = model(input_ids=token, position_ids=position[None], past_key_values=cache, use_cache=True)
            return out.logits[:, -1:].argmax(-1)

        how: dict[str, Any] = {"backend": "eager"} if bench.smoke else {"mode": "reduce-overhead"}
        compiled = torch.compile(step, fullgraph=True, **how)
        token = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        position = torch.tensor([bench.prompt], device=bench.device)

        def steps(count: int) -> None:
            nonlocal token
            for _ in range(count):
                token = compiled(token, position).clone()
                position.add_(1)

        steps(4)
        count = 4 * bench.rounds
        return {"tokens_per_second": count / bench.seconds(lambda: steps(count))}

    yield "peer minimal compiled loop", minimal
    yield "peer assisted: ours, same drafter", ours  # after the compiled ones: on a CPU our form of the modules cannot be compiled
    yield "peer generate, static cache, compiled", lambda: generate(cache_implementation="static")


def main() -> None:
    measure(__file__, __doc__, {"engine": (160, engine_rows), "batch": (150, batch_rows), "peers": (180, peer_rows)}, total=530)


if __name__ == "__main__":
    main()
