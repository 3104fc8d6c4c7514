"""Does llama.cpp draft the same? Compares its tokens, target passes and guesses with ours: chains at temperature 0, on the same prompts.

    python benchmarks/in_llama_cpp.py RUN [RUN ...] --source DIR --server PROGRAM

Each RUN is the folder of a finished run (or of one of its arms). DIR is llama.cpp's source, which has the converter; PROGRAM is the
llama-server that was built from it. llama.cpp is not a dependency: both run in processes of their own (llama_cpp_side.py). The converter
needs only packages that ``make install`` installs. Target and drafter are converted to fp32, and the server keeps its cache in fp32, on one
thread. It gets the kind of drafting and the number of guesses from the exported folder's model card (heads/serving.py).

Every prompt is also decoded by the same server without a drafter: a difference from that is llama.cpp's own. What each pass verified is
read from the server's log.

Writes benchmarks/results/in_llama_cpp.json, one entry per head (variants with a trimmed vocabulary or other norms have their own), each
with its commit. Exit status 1 if a run failed, or if tokens, passes or guesses differ. (Where two tokens are tied but for rounding, a guess
may differ, and with it the rest of its chain or block.)
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.frame import RESULTS, keep, parser
from benchmarks.in_vllm import compare_guesses
from benchmarks.llama_cpp_side import Server, build_of, convert, guesses
from headstart.data.source import open_source
from headstart.heads.serving import serving
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.provenance import provenance
from headstart.inference.settings import open_decode, open_target
from headstart.inference.speculator import open_speculator


def ask(source: Path, program: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp makes of the prompts: ``tokens`` and ``plain`` (the tokens without a drafter), ``guesses`` per pass, ``drafted`` and
    ``accepted`` as it counts them, and its ``version``.
    """
    with tempfile.TemporaryDirectory() as place:
        model, draft = Path(place) / "target.gguf", Path(place) / "draft.gguf"
        convert(source, Path(request["target"]), model)
        reads = None if request["type"] == "draft-simple" else Path(request["target"])
        convert(source, Path(request["folder"]), draft, reads)
        drafting = ["-md", str(draft), "--spec-type", request["type"], "--spec-draft-n-max", str(request["guesses"])]
        answers, logs = [], []
        for words in ([], drafting):
            with Server(program, model, request["longest"], words) as server:
                answers.append([server.complete(prompt, request["new_tokens"]) for prompt in request["prompts"]])
            logs.append(server.log())
    plain, drafted = answers
    timings = [answer["timings"] for answer in drafted]
    return {
        "tokens": [answer["tokens"] for answer in drafted],
        "plain": [answer["tokens"] for answer in plain],
        "guesses": guesses(logs[1]),
        "drafted": sum(each.get("draft_n", 0) for each in timings),
        "accepted": sum(each.get("draft_n_accepted", 0) for each in timings),
        "version": build_of(program),
    }


def passes(tokens: Sequence[int], guessed: Sequence[Sequence[int]]) -> int:
    """The target's passes over one answer, without that over the prompt. Where one token is missing, llama.cpp verifies no guesses."""
    place = 1  # the first token comes from the prompt's own pass
    for each in guessed:
        place += 1 + next((i for i, (guess, token) in enumerate(zip(each, tokens[place:], strict=False)) if guess != token), len(each))
    return len(guessed) + max(len(tokens) - place, 0)


def asked_for(folder: Path, drafter: Any, target: str, depth: int) -> tuple[str, int]:
    """The kind of drafting and the number of guesses, as the card has them. Raises RuntimeError where it has no command for llama.cpp."""
    found = next((c for c in serving(drafter, target, str(folder), depth).commands if c.engine == "llama.cpp"), None)
    if found is None:
        raise RuntimeError("the card has no command for llama.cpp")
    words = shlex.split(found.text)
    return words[words.index("--spec-type") + 1], int(words[words.index("--spec-draft-n-max") + 1])


def compare(run: Path, source: Path, program: Path, prompts: int | None, new_tokens: int | None) -> tuple[str, dict[str, Any]]:
    """Compare one run. Returns the name of its entry, and the entry."""
    settings = json.loads((run / "config.json").read_text())
    target = open_target(settings["target"] | {"dtype": "float32"})
    drafter, folder = open_speculator(run / "speculator", target), (run / "speculator").resolve()
    kind, depth = asked_for(folder, drafter, target.name, settings["decode"]["depth"])
    given = {"prompts": prompts, "new_tokens": new_tokens}
    settings["decode"] |= {key: value for key, value in given.items() if value is not None}
    decoding, trainer = open_decode(settings["decode"]), settings["trainer"]
    data = open_source(settings["data"], target, length=trainer["length"], seed=trainer["seed"])
    asked = data.prompts(decoding.prompts, decoding.new_tokens)
    how: dict[str, Any] = {"new_tokens": decoding.new_tokens, "policy": TreePolicy("chain", depth=depth), "sampling": decoding.sampling}
    ours = [generate(target, Drafting(drafter), p, **how) for p in asked]
    rounds = [n for g in ours for n in g.emitted]
    longest = max(map(len, asked)) + decoding.new_tokens + 64  # llama.cpp drafts less near its length limit
    theirs = ask(source, program, {
        "target": target.name, "folder": str(folder), "type": kind, "guesses": depth, "new_tokens": decoding.new_tokens, "prompts": asked,
        "longest": min(longest, target.shape.max_positions),
    })  # fmt: skip
    pairs = zip(ours, theirs["tokens"], theirs["guesses"], strict=True)
    compared, differing = map(sum, zip(*(compare_guesses(*each) for each in pairs), strict=True))
    trimmed = drafter.config.get("draft_vocab")
    other = "".join(f"_{key}" for key in ("norm_before_fc", "norm_before_residual") if drafter.config.get(key))
    return drafter.config["head"] + (f"_vocabulary_{len(trimmed)}" if trimmed else "") + other, {
        "llama.cpp": theirs["version"],
        "type": kind,
        "guesses": depth,
        "prompts": len(asked),
        "new_tokens": sum(map(len, theirs["tokens"])),
        "train_steps": trainer["steps"],
        "target_passes_in_llama_cpp": sum(map(passes, theirs["tokens"], theirs["guesses"])),
        "target_passes_here": len(rounds),
        "drafted_in_llama_cpp": theirs["drafted"],
        "accepted_in_llama_cpp": theirs["accepted"],
        "accepted_here": sum(rounds) - len(rounds),
        "guesses_compared": compared,
        "guesses_that_differ": differing,
        "prompts_with_the_same_tokens": sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True)),
        "prompts_with_the_tokens_of_plain_llama_cpp": sum(map(list.__eq__, theirs["plain"], theirs["tokens"])),
        **provenance(),
    }  # fmt: skip


def same(entry: dict[str, Any]) -> bool:
    """Whether tokens, passes and guesses are the same."""
    tokens = {entry["prompts"], entry["prompts_with_the_same_tokens"], entry["prompts_with_the_tokens_of_plain_llama_cpp"]}
    return len(tokens) == 1 and entry["target_passes_in_llama_cpp"] == entry["target_passes_here"] and not entry["guesses_that_differ"]


def row(name: str, entry: dict[str, Any]) -> list[str]:
    return [name, entry["type"], str(entry["guesses"]), str(entry["target_passes_in_llama_cpp"]), str(entry["target_passes_here"]),
            f"{entry['guesses_that_differ']:,} of {entry['guesses_compared']:,}",
            f"{entry['prompts_with_the_same_tokens']} of {entry['prompts']}",
            f"{entry['prompts_with_the_tokens_of_plain_llama_cpp']} of {entry['prompts']}"]  # fmt: skip


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    cli.add_argument("--source", type=Path, required=True, metavar="DIR", help="llama.cpp's source")
    cli.add_argument("--server", type=Path, required=True, metavar="PROGRAM", help="llama-server, built of it")
    cli.add_argument("--prompts", type=int, help="as many as the run's own report, if not given")
    cli.add_argument("--new-tokens", type=int, help="likewise")
    cli.add_argument("--out", type=Path, default=RESULTS / "in_llama_cpp.json", help="entries of other heads in it stay")
    args = cli.parse_args()
    console, table, wrong = Console(), Table(title="the same chains in llama.cpp and here", title_justify="left"), []
    for column in ("", "type", "guesses", "passes in llama.cpp", "here", "other guesses", "same tokens", "as plain"):
        table.add_column(column, no_wrap=not column)
    for run in args.runs:
        console.print(f"{run} ...", highlight=False)
        try:
            name, entry = compare(run, args.source, args.server, args.prompts, args.new_tokens)
        except Exception as e:  # the other runs are still compared
            console.print(f"{run}: {e}", style="red", markup=False)
            wrong.append(run.name)
            continue
        table.add_row(*row(name, entry))
        wrong += [] if same(entry) else [run.name]
        known = json.loads(args.out.read_text()) if args.out.is_file() else {}
        keep(args.out, known | {name: entry})
    console.print(table)
    if wrong:
        sys.exit(f"failed, or other tokens, passes or guesses: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
