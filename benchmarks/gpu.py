"""The machine, the target and the clock of decode_gpu.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.rounds import Kind
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Acceptance, Tree
from headstart.inference.decoding.verify import greedy

LARGE = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TOY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
CONTEXT = 512  # kept rows that every pass reads. Prompts are shorter, so that sequences stay within it while they are timed
ROUNDS, WARM = 12, 3  # timed rounds in a row; rounds before them, while graphs are captured and the first results arrive
READING = 3  # rounds before those, while the last prompts of a batch are read


class Bench:
    """The machine, the shapes, and the target."""

    def __init__(self, smoke: bool) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.smoke = smoke
        self.bandwidth: float | None = None  # bytes per second; None: not measured yet
        self.device = torch.device("cpu" if smoke or not torch.cuda.is_available() else "cuda")
        shape = TOY if smoke else LARGE
        kv = {"num_key_value_heads": shape["num_attention_heads"] // 4, "max_position_embeddings": 8192, "tie_word_embeddings": False}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        config = LlamaConfig(**shape, **kv, **rope, **ends)
        torch.manual_seed(0)
        with torch.device(self.device):  # create the weights on the device itself
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Not frozen, as transformers leaves a model: with a frozen head, torch copies the whole of it for a slice of states.
        self.target = Target(self.model.eval(), name="random", frozen=False)
        self.context, self.prompt = (64, 8) if smoke else (CONTEXT, 336)
        self.rounds = 3 if smoke else ROUNDS
        self.new_tokens = 8 * (READING + WARM + self.rounds + 1)  # enough for the deepest tree if every guess were accepted
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(shape["vocab_size"], (64, self.prompt), generator=generator).tolist()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def engine(self, drafter: Drafter | None, rows: int, trees: Sequence[TreePolicy | None]) -> Engine:
        """An engine with room for any of these trees. It uses the last one."""
        plans = {rows + i: tree for i, tree in enumerate(reversed(trees))}
        max_length = max(self.context, self.prompt + self.new_tokens)
        return Engine(self.target, drafter, sequences=rows, max_length=max_length, plans=plans)

    def fill(self, engine: Engine, count: int) -> list[Row]:
        """Add sequences to the engine and read their prompts."""
        rows = [engine.add_request(p, new_tokens=self.new_tokens, stop_ids=()) for p in self.prompts[:count]]
        while any(row.read < len(row.prompt) for row in rows):
            engine.step()
        return rows

    def timed(self, engine: Engine, count: int, repeats: int = 5) -> dict[str, Any]:
        """Wall-clock times of rounds, host included, without the first rounds of each prompt. ``graphs``: whether rounds are replayed
        from graphs (if they cannot be captured, the engine runs without and is slower).
        """
        took, emitted = [], 0
        for repeat in range(repeats + 1):
            rows = self.fill(engine, count)
            for _ in range(WARM):
                engine.step()
            before = sum(len(row.tokens) for row in rows)
            spent = self.seconds(lambda: [engine.step() for _ in range(self.rounds)])
            if repeat:
                took.append(spent)
                emitted += sum(len(row.tokens) for row in rows) - before
            for row in rows:
                engine.drop(row)
            engine.step()  # completes the round in flight; its result is not used
        a_round = statistics.median(took) / self.rounds
        a_sequence = emitted / (repeats * self.rounds * count)
        speed = {"round_ms": 1e3 * a_round, "tokens_per_second": a_sequence * count / a_round, "accepted_length": a_sequence}
        return speed | {"graphs": engine.rounds.graphs is not None}

    @torch.inference_mode()
    def parts(self, engine: Engine, tree: TreePolicy | None, count: int) -> tuple[float, float]:
        """Milliseconds of the drafting graph and of the verifying graph, run separately; sequences do not advance."""
        rows, rounds = self.fill(engine, count), engine.rounds
        kind = Kind(count, rounds.padded_length(self.context), tree, tree is not None, 0, False)
        warp = LogitsWarper.over({k: v[:count] for k, v in rounds.warps.items()}, [SamplingParams()] * count)
        put_back = rounds.snapshot()
        found = []
        for call in rounds.parts(kind, warp):
            took = []
            for _ in range(12):
                put_back()
                took.append(self.seconds(call))
            found.append(1e3 * statistics.median(took[2:]))
        put_back()
        for row in rows:
            engine.drop(row)
        return found[0], found[1]

    def drafter(self) -> Drafter:
        """EAGLE-3 as published for such a target: one layer, 32,000 tokens. Its logits are scaled up, so that trees get deep."""
        torch.manual_seed(1)
        with torch.device(self.device):
            drafter: Any = hub.build("eagle", self.target.shape, draft_vocab=list(range(self.target.shape.vocab_size // 4)))
        drafter.lm_head.weight.data.mul_(24)  # gives logits a standard deviation of about 14
        drafter.attach(self.target.ends)
        return drafter.to(device=self.device, dtype=torch.bfloat16).eval().prepack()

    def bound_ms(self, drafter: Any = None, levels: int = 0) -> float | None:
        """A lower bound in ms: the weights, keys and values that a round must read, divided by the bandwidth."""
        config = self.model.config
        weights = sum(p.nbytes for p in self.model.parameters()) - self.model.get_input_embeddings().weight.nbytes
        head = config.hidden_size // config.num_attention_heads
        weights += 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head * self.context
        if drafter is not None:
            once = drafter.fc.weight.nbytes
            weights += once + levels * (sum(p.nbytes for p in drafter.parameters()) - once)
        return None if self.bandwidth is None else 1e3 * weights / self.bandwidth


def accepting(probabilities: Sequence[float], device: torch.device) -> Callable[..., Acceptance]:
    """A verdict that accepts each reached depth with its given probability, as far as the tree is that deep."""
    p_K = torch.tensor(probabilities, device=device, dtype=torch.float64)

    def choose(
        logits_BRV: Tensor, tree: Tree, warp: LogitsWarper, rule: str, rng: Any, seen_BRV: Any = None, hasty: bool = False
    ) -> Acceptance:
        choice_BR = logits_BRV.argmax(-1)
        depth_B1 = (rng.uniform(0, len(p_K)) < p_K).cumprod(1).sum(1, keepdim=True)
        depths_BR = F.pad(tree.depths_BN, (1, 0))
        leaf_B1 = depths_BR.masked_fill(depths_BR > depth_B1, -1).argmax(1, keepdim=True)
        path_BN = tree.rows().gather(1, leaf_B1[..., None].expand(-1, -1, depths_BR.shape[1]))[:, 0, 1:]
        R = depths_BR.shape[1]
        up_BN = torch.where(path_BN, tree.parents_BN + 1, R)  # the target says the tokens on the path
        return greedy(tree, F.pad(choice_BR, (0, 1)).scatter(1, up_BN, tree.tokens_BN)[:, :R])

    return choose
