"""Does vLLM draft the same? Compares its tokens, target passes and guesses with ours: chains at temperature 0, on the same prompts.

    python benchmarks/in_vllm.py RUN [RUN ...] --vllm PYTHON     # PYTHON: of an environment that has vLLM (CPU or GPU)

Each RUN is the folder of a finished run (or of one of its arms). vLLM gets the settings in the exported folder's model card
(heads/serving.py): method, number of guesses and whatever else the kind of drafter needs. vLLM is not a dependency: it runs in its own
environment, one process per run (vllm_side.py), which returns tokens and its counters.

Writes benchmarks/results/in_vllm.json, one entry per head (variants with a trimmed vocabulary or other norms have their own), each with
its commit. Exit status 1 if a run failed, or if tokens, passes or guesses differ. Few guesses are accepted after a short training, so
tokens and passes alone may hide that guesses differ. (vLLM also counts accepted guesses after the last requested token, so its accepted
length is slightly higher; the passes are the same.)
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chains import chains_of, compare_all, same_guesses
from benchmarks.frame import parser
from benchmarks.vllm_side import Vllm
from headstart.heads.serving import Command
from headstart.inference.reports.figures import acceptance


def ask(vllm: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process in vLLM's environment. Raises RuntimeError with the end of its output."""
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "draft"  # a neutral name: vLLM chooses the method by words in the folder's name
        link.symlink_to(request["speculative"]["model"])
        settings = {
            "model": request["target"], "dtype": "float32", "enforce_eager": True, "max_model_len": request["longest"],
            "speculative_config": request["speculative"] | {"model": str(link)}, "disable_log_stats": False,
        }  # fmt: skip
        with Vllm(vllm, settings) as engine:
            return engine.ask(request) | {"version": engine.version}


def depth_of(command: Command) -> int:
    return int((command.speculative or {})["num_speculative_tokens"])


def compare(run: Path, args: Namespace) -> tuple[str, dict[str, Any]]:
    """Compare one run. Returns the name of its entry, and the entry."""
    chains = chains_of(run, "vLLM", depth_of, args.prompts, args.new_tokens)
    speculative = chains.command.speculative or {}
    theirs = ask(args.vllm, {
        "target": chains.target.name, "speculative": speculative | {"model": str(chains.folder)}, "new_tokens": chains.new_tokens,
        "prompts": chains.asked, "stop": list(chains.target.stop_ids), "longest": chains.longest,
    })  # fmt: skip
    return chains.name, {
        "vllm": theirs["version"],
        "speculative_config": {key: value for key, value in speculative.items() if key != "model"},
        "target_passes_in_vllm": theirs["drafts"],
        "accepted_length_in_vllm": 1 + theirs["accepted"] / theirs["drafts"],
        "accepted_length_here": sum(chains.passes) / len(chains.passes),
        "acceptance_by_depth_in_vllm": [n / theirs["drafts"] for n in theirs["accepted_by_depth"]],
        "acceptance_by_depth_here": acceptance(chains.ours, chains.depth)["acceptance_by_depth"],
        **chains.beside(theirs["tokens"], theirs["guesses"]),
    }


def same(entry: dict[str, Any]) -> bool:
    """Whether tokens, passes and guesses are the same."""
    tokens = entry["prompts_with_the_same_tokens"] == entry["prompts"]
    return tokens and entry["target_passes_in_vllm"] == entry["target_passes_here"] and not entry["guesses_that_differ"]


def row(entry: dict[str, Any]) -> list[str]:
    asked = entry["speculative_config"]
    passes = (str(entry[f"target_passes_{where}"]) for where in ("in_vllm", "here"))
    return [asked["method"], str(asked["num_speculative_tokens"]), *passes, *same_guesses(entry)]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    columns = ("method", "guesses", "passes in vLLM", "here", "other guesses", "same tokens")
    compare_all(cli, "vLLM", "in_vllm.json", columns, compare, row, same)


if __name__ == "__main__":
    main()
