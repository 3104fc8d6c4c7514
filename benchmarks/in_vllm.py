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

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.frame import RESULTS, keep, parser
from benchmarks.vllm_side import Vllm
from headstart.data.source import open_source
from headstart.heads.serving import serving
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.provenance import provenance
from headstart.inference.reports.figures import acceptance, rounds_of
from headstart.inference.settings import open_decode, open_target
from headstart.inference.speculator import open_speculator


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


def compare_guesses(made: Generation, tokens: list[int], guesses: list[list[int]]) -> tuple[int, int]:
    """(guesses compared, those that differ) of one prompt, over the rounds that begin at the same token here and in vLLM. ``guesses``: of
    vLLM, after each pass. The length of ours is compared, which ends where the text does.
    """
    ours, place = dict[int, list[int]](), 1  # the first token comes from the prompt's own pass
    for each in rounds_of(made):
        ours[place] = list(each.guesses)
        place += len(each.tokens)
    compared = differing = 0
    place = 1
    for theirs in guesses:
        pairs = list(zip(ours.get(place, []), theirs, strict=False))
        compared, differing = compared + len(pairs), differing + sum(a != b for a, b in pairs)
        accepted = next((i for i, (guess, token) in enumerate(zip(theirs, tokens[place:], strict=False)) if guess != token), len(theirs))
        place += accepted + 1
    return compared, differing


def compare(run: Path, vllm: str, prompts: int | None, new_tokens: int | None) -> tuple[str, dict[str, Any]]:
    """Compare one run. Returns the name of its entry, and the entry."""
    settings = json.loads((run / "config.json").read_text())
    target = open_target(settings["target"] | {"dtype": "float32"})
    drafter, folder = open_speculator(run / "speculator", target), (run / "speculator").resolve()
    found = serving(drafter, target.name, str(folder), settings["decode"]["depth"])
    speculative = next((c.speculative for c in found.commands if c.speculative), None)
    if speculative is None:
        raise RuntimeError(f"vLLM does not load this folder: {found.unserved or 'another engine does'}")
    depth: int = speculative["num_speculative_tokens"]
    asked_for = {"prompts": prompts, "new_tokens": new_tokens}
    settings["decode"] |= {key: value for key, value in asked_for.items() if value is not None}
    decoding, trainer = open_decode(settings["decode"]), settings["trainer"]
    source = open_source(settings["data"], target, length=trainer["length"], seed=trainer["seed"])
    asked = source.prompts(decoding.prompts, decoding.new_tokens)
    how: dict[str, Any] = {"new_tokens": decoding.new_tokens, "policy": TreePolicy("chain", depth=depth), "sampling": decoding.sampling}
    ours = [generate(target, Drafting(drafter), p, **how) for p in asked]
    rounds = [n for g in ours for n in g.emitted]
    longest = max(map(len, asked)) + decoding.new_tokens + 64  # vLLM stops drafting near its length limit
    theirs = ask(vllm, {
        "target": target.name, "speculative": speculative | {"model": str(folder)}, "new_tokens": decoding.new_tokens, "prompts": asked,
        "stop": list(target.stop_ids), "longest": min(longest, target.shape.max_positions),
    })  # fmt: skip
    pairs = zip(ours, theirs["tokens"], theirs["guesses"], strict=True)
    compared, differing = map(sum, zip(*(compare_guesses(*each) for each in pairs), strict=True))
    trimmed = drafter.config.get("draft_vocab")
    other = "".join(f"_{key}" for key in ("norm_before_fc", "norm_before_residual") if drafter.config.get(key))
    return drafter.config["head"] + (f"_vocabulary_{len(trimmed)}" if trimmed else "") + other, {
        "vllm": theirs["version"],
        "speculative_config": {key: value for key, value in speculative.items() if key != "model"},
        "prompts": len(asked),
        "new_tokens": sum(map(len, theirs["tokens"])),
        "train_steps": trainer["steps"],
        "target_passes_in_vllm": theirs["drafts"],
        "target_passes_here": len(rounds),
        "accepted_length_in_vllm": 1 + theirs["accepted"] / theirs["drafts"],
        "accepted_length_here": sum(rounds) / len(rounds),
        "acceptance_by_depth_in_vllm": [n / theirs["drafts"] for n in theirs["accepted_by_depth"]],
        "acceptance_by_depth_here": acceptance(ours, depth)["acceptance_by_depth"],
        "guesses_compared": compared,
        "guesses_that_differ": differing,
        "prompts_with_the_same_tokens": sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True)),
        **provenance(),
    }  # fmt: skip


def row(name: str, entry: dict[str, Any]) -> list[str]:
    return [name, entry["speculative_config"]["method"], str(entry["speculative_config"]["num_speculative_tokens"]),
            str(entry["target_passes_in_vllm"]), str(entry["target_passes_here"]),
            f"{entry['guesses_that_differ']:,} of {entry['guesses_compared']:,}",
            f"{entry['prompts_with_the_same_tokens']} of {entry['prompts']}"]  # fmt: skip


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    cli.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    cli.add_argument("--prompts", type=int, help="as many as the run's own report, if not given")
    cli.add_argument("--new-tokens", type=int, help="likewise")
    cli.add_argument("--out", type=Path, default=RESULTS / "in_vllm.json", help="entries of other heads in it stay")
    args = cli.parse_args()
    console, table, wrong = Console(), Table(title="the same chains in vLLM and here", title_justify="left"), []
    for column in ("", "method", "guesses", "passes in vLLM", "here", "other guesses", "same tokens"):
        table.add_column(column, no_wrap=not column)
    for run in args.runs:
        console.print(f"{run} ...", highlight=False)
        try:
            name, entry = compare(run, args.vllm, args.prompts, args.new_tokens)
        except Exception as e:  # the other runs are still compared
            console.print(f"{run}: {e}", style="red", markup=False)
            wrong.append(run.name)
            continue
        table.add_row(*row(name, entry))
        same = entry["prompts_with_the_same_tokens"] == entry["prompts"] and entry["target_passes_in_vllm"] == entry["target_passes_here"]
        same = same and not entry["guesses_that_differ"]
        wrong += [] if same else [run.name]
        known = json.loads(args.out.read_text()) if args.out.is_file() else {}
        keep(args.out, known | {name: entry})
    console.print(table)
    if wrong:
        sys.exit(f"failed, or other tokens, passes or guesses: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
