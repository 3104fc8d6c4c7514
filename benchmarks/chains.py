"""Chains that an engine drafts from our folders, beside our own: what benchmarks/in_vllm.py and in_llama_cpp.py share."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.frame import RESULTS, keep
from headstart.data.source import open_source
from headstart.heads.base import Drafter
from headstart.heads.serving import Command, serving
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance
from headstart.inference.reports.figures import rounds_of
from headstart.inference.settings import open_decode, open_target
from headstart.inference.speculator import open_speculator


@dataclass
class Chains:
    """A run's speculator, decoded here in fp32 by chains at temperature 0, as long as the engine drafts them."""

    target: Target
    drafter: Drafter
    folder: Path  # of the speculator
    command: Command  # the card's, for the engine
    depth: int
    asked: list[list[int]]
    new_tokens: int
    train_steps: int
    ours: list[Generation]

    @property
    def passes(self) -> list[int]:
        """Tokens of each of the target's passes here, but for those over prompts."""
        return [n for made in self.ours for n in made.emitted]

    @property
    def longest(self) -> int:
        """A length limit for the engine: near its limit it drafts less."""
        return min(max(map(len, self.asked)) + self.new_tokens + 64, self.target.shape.max_positions)

    @property
    def name(self) -> str:
        """The head, and its variant: a trimmed vocabulary, other norms."""
        said = self.drafter.config
        trimmed = said.get("draft_vocab")
        other = "".join(f"_{key}" for key in ("norm_before_fc", "norm_before_residual") if said.get(key))
        return said["head"] + (f"_vocabulary_{len(trimmed)}" if trimmed else "") + other

    def beside(self, tokens: Sequence[list[int]], guesses: Sequence[list[list[int]]]) -> dict[str, Any]:
        """The keys of an entry that all engines have. ``tokens``, ``guesses``: of the engine, per prompt; guesses after each pass."""
        pairs = zip(self.ours, tokens, guesses, strict=True)
        compared, differing = map(sum, zip(*(compare_guesses(*each) for each in pairs), strict=True))
        return {
            "prompts": len(self.asked),
            "new_tokens": sum(map(len, tokens)),
            "train_steps": self.train_steps,
            "target_passes_here": len(self.passes),
            "guesses_compared": compared,
            "guesses_that_differ": differing,
            "prompts_with_the_same_tokens": sum(a.tokens == b for a, b in zip(self.ours, tokens, strict=True)),
            **provenance(),
        }


def chains_of(run: Path, engine: str, depth_of: Callable[[Command], int], prompts: int | None, new_tokens: int | None) -> Chains:
    """Decode a run's prompts here. ``depth_of``: the number of guesses in a command for the engine. ``prompts``, ``new_tokens``: None: as
    the run's own report. Raises RuntimeError where the card has no command for the engine.
    """
    settings = json.loads((run / "config.json").read_text())
    target = open_target(settings["target"] | {"dtype": "float32"})
    drafter, folder = open_speculator(run / "speculator", target), (run / "speculator").resolve()
    made = serving(drafter, target.name, str(folder), settings["decode"]["depth"])
    command = next((c for c in made.commands if c.engine == engine), None)
    if command is None:
        raise RuntimeError(f"{engine} does not load this folder: {made.unserved or made.otherwise or 'another engine does'}")
    given = {"prompts": prompts, "new_tokens": new_tokens}
    decoding = open_decode(settings["decode"] | {key: value for key, value in given.items() if value is not None})
    trainer = settings["trainer"]
    source = open_source(settings["data"], target, length=trainer["length"], seed=trainer["seed"])
    asked, depth = source.prompts(decoding.prompts, decoding.new_tokens), depth_of(command)
    how: dict[str, Any] = {"policy": TreePolicy("chain", depth=depth), "sampling": decoding.sampling, "new_tokens": decoding.new_tokens}
    ours = [generate(target, Drafting(drafter), prompt, **how) for prompt in asked]
    return Chains(target, drafter, folder, command, depth, asked, decoding.new_tokens, trainer["steps"], ours)


def compare_guesses(made: Generation, tokens: list[int], guesses: list[list[int]]) -> tuple[int, int]:
    """(guesses compared, those that differ) of one prompt, over the rounds that begin at the same token here and in the engine.
    ``guesses``: of the engine, after each pass. The length of ours is compared, which ends where the text does.
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
        place += 1 + accepted_of(theirs, tokens[place:])
    return compared, differing


def accepted_of(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of a chain's guesses are the tokens that follow."""
    return next((i for i, (guess, token) in enumerate(zip(guesses, tokens, strict=False)) if guess != token), len(guesses))


def same_guesses(entry: dict[str, Any]) -> list[str]:
    """Cells of a table: guesses that differ, and prompts with the same tokens."""
    return [f"{entry['guesses_that_differ']:,} of {entry['guesses_compared']:,}",
            f"{entry['prompts_with_the_same_tokens']} of {entry['prompts']}"]  # fmt: skip


def compare_all(
    cli: ArgumentParser, engine: str, file: str, columns: Sequence[str], compare: Callable[[Path, Namespace], tuple[str, dict[str, Any]]],
    row: Callable[[dict[str, Any]], list[str]], same: Callable[[dict[str, Any]], bool],
) -> None:  # fmt: skip
    """Compare the runs of the command line, print the table and keep the entries in benchmarks/results/FILE. ``compare`` returns a run's
    name and entry, ``row`` its cells after the name, ``same`` whether nothing differs. Exits with an error if a run failed or differs.
    """
    cli.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    cli.add_argument("--prompts", type=int, help="as many as the run's own report, if not given")
    cli.add_argument("--new-tokens", type=int, help="likewise")
    cli.add_argument("--out", type=Path, default=RESULTS / file, help="entries of other heads in it stay")
    args = cli.parse_args()
    console, table, wrong = Console(), Table(title=f"the same chains in {engine} and here", title_justify="left"), []
    for column in ("", *columns):
        table.add_column(column, no_wrap=not column)
    for run in args.runs:
        console.print(f"{run} ...", highlight=False)
        try:
            name, entry = compare(run, args)
        except Exception as e:  # the other runs are still compared
            console.print(f"{run}: {e}", style="red", markup=False)
            wrong.append(run.name)
            continue
        table.add_row(name, *row(entry))
        wrong += [] if same(entry) else [run.name]
        known = json.loads(args.out.read_text()) if args.out.is_file() else {}
        keep(args.out, known | {name: entry})
    console.print(table)
    if wrong:
        sys.exit(f"failed, or other tokens, passes or guesses: {', '.join(wrong)}")
