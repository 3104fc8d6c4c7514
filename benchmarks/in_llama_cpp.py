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

import shlex
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chains import accepted_of, chains_of, compare_all, same_guesses
from benchmarks.frame import parser
from benchmarks.llama_cpp_side import Server, build_of, convert, guesses
from headstart.heads.serving import Command


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
        place += 1 + accepted_of(each, tokens[place:])
    return len(guessed) + max(len(tokens) - place, 0)


def setting(command: Command, flag: str) -> str:
    words = shlex.split(command.text)
    return words[words.index(flag) + 1]


def compare(run: Path, args: Namespace) -> tuple[str, dict[str, Any]]:
    """Compare one run. Returns the name of its entry, and the entry."""
    chains = chains_of(run, "llama.cpp", lambda command: int(setting(command, "--spec-draft-n-max")), args.prompts, args.new_tokens)
    kind = setting(chains.command, "--spec-type")
    theirs = ask(args.source, args.server, {
        "target": chains.target.name, "folder": str(chains.folder), "type": kind, "guesses": chains.depth,
        "new_tokens": chains.new_tokens, "prompts": chains.asked, "longest": chains.longest,
    })  # fmt: skip
    return chains.name, {
        "llama.cpp": theirs["version"],
        "type": kind,
        "guesses": chains.depth,
        "target_passes_in_llama_cpp": sum(map(passes, theirs["tokens"], theirs["guesses"])),
        "drafted_in_llama_cpp": theirs["drafted"],
        "accepted_in_llama_cpp": theirs["accepted"],
        "accepted_here": sum(chains.passes) - len(chains.passes),
        "prompts_with_the_tokens_of_plain_llama_cpp": sum(map(list.__eq__, theirs["plain"], theirs["tokens"])),
        **chains.beside(theirs["tokens"], theirs["guesses"]),
    }


def same(entry: dict[str, Any]) -> bool:
    """Whether tokens, passes and guesses are the same."""
    tokens = {entry["prompts"], entry["prompts_with_the_same_tokens"], entry["prompts_with_the_tokens_of_plain_llama_cpp"]}
    return len(tokens) == 1 and entry["target_passes_in_llama_cpp"] == entry["target_passes_here"] and not entry["guesses_that_differ"]


def row(entry: dict[str, Any]) -> list[str]:
    passes = (str(entry[f"target_passes_{where}"]) for where in ("in_llama_cpp", "here"))
    plain = f"{entry['prompts_with_the_tokens_of_plain_llama_cpp']} of {entry['prompts']}"
    return [entry["type"], str(entry["guesses"]), *passes, *same_guesses(entry), plain]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--source", type=Path, required=True, metavar="DIR", help="llama.cpp's source")
    cli.add_argument("--server", type=Path, required=True, metavar="PROGRAM", help="llama-server, built of it")
    columns = ("type", "guesses", "passes in llama.cpp", "here", "other guesses", "same tokens", "as plain")
    compare_all(cli, "llama.cpp", "in_llama_cpp.json", columns, compare, row, same)


if __name__ == "__main__":
    main()
