"""Compares expected with decoded lengths: every kind of drafter, a chain and a tree, temperature 0 and 1, several targets.

    python benchmarks/truth.py                      # about ten minutes on one core
    python benchmarks/truth.py --heads eagle mtp

At temperature 0 both must be exactly equal; above it they may differ by chance (``standard_error`` of the difference). The targets are
the tiny one with its trained drafter, a random one of another architecture, and those of --targets that exist. All other drafters are
untrained: whether the two numbers agree does not depend on how good a drafter is.

Writes benchmarks/results/truth.json. It measures no times, so other work may run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exactness import untrained
from benchmarks.frame import RESULTS, ROOT, keep, parser
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance
from headstart.inference.speculator import load_attached
from headstart.trainers.gate import decode_beside

HEADS = [path.stem for path in sorted((ROOT / "conf" / "head").glob("*.yaml"))]
TREE = TreePolicy(depth=4, nodes=8, branch=3)
TARGETS = ("assets/tiny", "../shared/targets/stories260K")
RANDOM: dict[str, Any] = dict(vocab_size=512, hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
                              head_dim=16, intermediate_size=128, max_position_embeddings=512)  # fmt: skip


def random_target() -> Target:
    """A random target with larger weights than usual, so that its output varies."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **RANDOM), dtype=torch.float32)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.2)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return Target(model, name="random qwen3")


def targets(folders: Sequence[str]) -> Iterator[tuple[str, Target]]:
    """Yield the targets with their names. Folders that do not exist are skipped."""
    for folder in folders:
        path = Path(folder) if Path(folder).is_dir() else ROOT / folder
        if path.is_dir():
            yield path.name, Target.load(str(path), dtype="float32", device="cpu")
        else:
            print(f"{folder} is not here: passed over")
    yield "random qwen3", random_target()


def drafters(name: str, target: Target, heads: Sequence[str]) -> Iterator[tuple[str, Drafter]]:
    """The drafters of a target: the trained one for tiny. Drafters that cannot be built for it are printed."""
    if name == "tiny":
        yield "eagle, trained", load_attached(ROOT / "assets" / "tiny_eagle", target)
    for head in heads:
        try:
            yield head, untrained(head, target)
        except UserError as e:
            print(f"{head} for {name}: {e}")


def rows(name: str, head: str, target: Target, drafter: Drafter, prompts: int, new_tokens: int) -> list[dict[str, Any]]:
    """One row per tree and temperature."""
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(3, target.shape.vocab_size, (9,), generator=generator).tolist() for _ in range(prompts)]
    truth, _ = decode_beside(target, drafter, drafter, asked, TREE, SamplingParams(), new_tokens)
    where = {"target": name, "head": head}
    return [
        where | {"tree": shape, "temperature": int(temperature[-1])} | {k: row[k] for k in ("expected", "decoded", "standard_error")}
        for temperature, of in truth.table().items()
        for shape, row in of.items()
    ]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--targets", nargs="*", default=TARGETS, help="folders, beside a random one")
    cli.add_argument("--heads", nargs="*", default=HEADS)
    cli.add_argument("--prompts", type=int, default=4)
    cli.add_argument("--new-tokens", type=int, default=32)
    asked = cli.parse_args()
    found: list[dict[str, Any]] = []
    for name, target in targets(asked.targets):
        for head, drafter in track(list(drafters(name, target, asked.heads)), description=name):
            found += rows(name, head, target, drafter, asked.prompts, asked.new_tokens)
    cold = [r for r in found if r["temperature"] == 0]
    warm = [r for r in found if r["temperature"] == 1]
    kept = {
        "prompts": asked.prompts,
        "new_tokens": asked.new_tokens,
        "largest_difference_at_0": max((abs(r["expected"] / r["decoded"] - 1) for r in cold), default=None),
        "within_2_standard_errors_at_1": sum(abs(r["expected"] - r["decoded"]) <= 2 * (r["standard_error"] or 0.0) + 1e-9 for r in warm)
        / max(len(warm), 1),
        "rows": found,
        **provenance(),
    }
    keep(RESULTS / "truth.json", kept)
    print(json.dumps({k: v for k, v in kept.items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
