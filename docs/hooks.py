"""A hook of MkDocs: makes a page for every drafter, from the docstring of its module, its YAML and its measured figures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "results" / "drafters.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add drafters/NAME.md for every conf/head/NAME.yaml, and the list of them."""
    rows = ["# The drafters", "", "Each is a file in `heads/` and a YAML in `conf/head/`; `head=NAME` chooses it.", ""]
    rows += ["| `head=` | what it is | accepted length, T = 0 | T = 1 |", "| --- | --- | ---: | ---: |"]
    measured = _measured()
    for name in names():
        files.append(File.generated(config, f"drafters/{name}.md", content=page(name, measured.get(name))))
        own = measured.get(name, {})
        lengths = [f"{own[key]:.2f}" if key in own else "not measured" for key in ("t0_tree", "t1_tree")]
        rows.append(f"| [`{name}`]({name}.md) | {first_sentence(docstring(name))} | {' | '.join(lengths)} |")
    rows += ["", f"Equal data and steps on the shipped target, a tree of 15 nodes: `python benchmarks/drafters.py`, commit {_commit()}."]
    files.append(File.generated(config, "drafters/index.md", content="\n".join(rows) + "\n"))
    return files


def names() -> list[str]:
    """The names of all drafters, sorted."""
    return sorted(path.stem for path in (ROOT / "conf" / "head").glob("*.yaml"))


def page(name: str, measured: dict[str, Any] | None) -> str:
    """The Markdown of a drafter's page: what it is, how it is trained, its settings, its figures (None: not measured)."""
    text = [f"# {name}", "", docstring(name), "", "```", f"python train.py head={name}", "```", "", "## Settings", ""]
    text += ["```yaml", (ROOT / "conf" / "head" / f"{name}.yaml").read_text().rstrip(), "```", "", "## Measured", ""]
    if measured is None:
        return "\n".join([*text, "Not measured yet: `python benchmarks/drafters.py`.", ""])
    kinds = {"t0_tree": "tree, T = 0", "t0_chain": "chain, T = 0", "t1_tree": "tree, T = 1", "t1_chain": "chain, T = 1"}
    text += ["| accepted length | tokens per target pass |", "| --- | ---: |"]
    text += [f"| {label} | {measured[key]:.2f} |" for key, label in kinds.items() if key in measured]
    text += ["", f"{measured['parameters'] / 1e6:.2f} million parameters, 350 steps on the shipped target. A level of drafting costs "
             f"{measured['c']:.2f} of a plain step on two CPU cores. `python benchmarks/drafters.py`, commit {_commit()}."]  # fmt: skip
    if depths := measured.get("acceptance_by_depth"):
        text += ["", "| depth | accepted, of the rounds that reached it |", "| ---: | ---: |"]
        before = 1.0
        for depth, kept in enumerate(depths, 1):
            text.append(f"| {depth} | {kept / before:.0%} |" if before else f"| {depth} | - |")
            before = kept
    return "\n".join(text) + "\n"


def docstring(name: str) -> str:
    """The docstring of the drafter's module. The file is parsed, not imported."""
    return ast.get_docstring(ast.parse((ROOT / "heads" / f"{name}.py").read_text())) or ""


def first_sentence(text: str) -> str:
    """The first paragraph of ``text`` on one line, with ``|`` escaped for a table cell."""
    first = " ".join(text.split("\n\n")[0].split())
    return first.replace("|", "\\|")


def _measured() -> dict[str, dict[str, Any]]:
    if not FIGURES.is_file():
        return {}
    return {row["name"]: row for row in json.loads(FIGURES.read_text())["drafters"]}


def _commit() -> str:
    """The commit at which the drafters' figures were measured; "unknown" if there are none."""
    if not FIGURES.is_file():
        return "unknown"
    found = json.loads(FIGURES.read_text())
    return str(found.get("drafters_of", found)["commit"])[:12]
