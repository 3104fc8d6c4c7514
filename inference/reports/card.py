"""README.md of an exported folder: a model card, as the hub shows it. It tells what the drafter is, what it gains, and how it is served.

The card is written after a report, and again after every later one. Text between two of our marks is generated, and replaced each time;
all other text, the front matter included, stays as the user has changed it. A block of figures carries the digest of the weights it was
measured with, and is removed when these are replaced; reports on other prompts stand side by side. A README without our marks was written
by hand, and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from headstart.heads.base import Drafter
from headstart.heads.errors import counted
from headstart.heads.files import put, put_text, sha256
from headstart.heads.serving import OURS, near, serving
from headstart.heads.stored import read_json
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.reports.render import figures_table, serving_lines
from headstart.inference.reports.report import Report
from headstart.inference.reports.summary import summary

NAME = "README.md"
ASKED = 6  # most guesses a round in an engine's command for decode=auto, which varies its number: an engine's is fixed
BLOCK = re.compile(r"<!-- headstart: ([^\n]+?) -->\n(.*?)<!-- headstart: end -->\n?", re.DOTALL)
LICENCE = "# license: yours to choose; the licences of the target and of the data may bind you\n"


def serving_keys(drafter: Drafter, target: Target, folder: str | Path, policy: TreePolicy, path: str | None = None) -> dict[str, Any]:
    """The keys of a report on serving the drafter of ``folder``: ``serving``, the commands; ``unserved``, why no engine loads it; and
    ``otherwise``, what would let one more load it. Empty for a folder that was not exported by this package, unless it holds a language
    model.

    ``path``: where the target is, if not where it was loaded from.
    """
    if drafter.format != "causal_lm" and "headstart" not in read_json(Path(folder) / "config.json"):
        return {}
    depth = min(policy.depth, ASKED) if policy.kind == "auto" else policy.depth
    attention = getattr(target.config, "_attn_implementation", None) or "sdpa"
    made = serving(drafter, near(path or hub_id(target.name) or target.name), near(folder), depth, attention, target.typed)
    return {"serving": [asdict(command) for command in made.commands], "unserved": made.unserved, "otherwise": made.otherwise}


def hub_id(name: str) -> str | None:
    """``owner/name`` of a model that was loaded by its name on the hub, or from the hub's cache; None where only a folder is known."""
    if cached := re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", name):
        return f"{cached[1]}/{cached[2]}"
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def write_card(folder: str | Path, report: Report, target: Target, settings: Mapping[str, Any] | None = None) -> str:
    """Write or renew ``folder/README.md``, whole or not at all. ``settings``: of the training that made the drafter, where they are known.

    Returns a line for people: where the card is, or why it was not written; "" for a folder that this package did not export. Errors of
    reading and writing end up in this line: they are not raised.
    """
    path = Path(folder) / NAME
    try:
        block = read_json(path.with_name("config.json")).get("headstart")
        earlier = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not isinstance(block, dict):
            return ""
        if earlier and not BLOCK.search(earlier):
            return f"card: {path} was written by hand: left as it is"
        base = hub_id(target.name.removesuffix("+lora"))  # a target that a training changed is named by its base model
        put_text(path, renewed(earlier, report, block, digest(path.parent), base, settings))
    except (OSError, ValueError) as e:
        return f"{path} cannot be written ({' '.join(str(e).split())})"
    return f"card: {path}"


@contextmanager
def kept_card(folder: Path) -> Iterator[None]:
    """A context for an export that replaces ``folder``. A card of ours is kept if the same kind of drafter is exported for the same target;
    a README written by hand is kept in any case.
    """

    def of_whom() -> Any:
        try:
            block = read_json(folder / "config.json").get("headstart")
        except ValueError:
            return None
        return {k: block.get(k) for k in ("head", "target")} if isinstance(block, dict) else None

    path = folder / NAME
    earlier, whose = path.read_bytes() if path.is_file() else b"", of_whom()
    yield
    try:
        if earlier and (whose == of_whom() or not BLOCK.search(earlier.decode(errors="replace"))):
            put(path, lambda beside: beside.write_bytes(earlier))
    except OSError as e:
        print(f"{path}: {e}")


def digest(folder: Path) -> str:
    """The digest of the weights: 12 digits of the sha256 of the safetensors files."""
    return sha256(*sorted(folder.glob("*.safetensors")))[:12]


def renewed(
    earlier: str, report: Report, block: Mapping[str, Any], weights: str, base: str | None, settings: Mapping[str, Any] | None
) -> str:
    """The card's text: ``earlier`` with our blocks renewed. ``block``: ``headstart`` of config.json; ``weights``: their digest; ``base``:
    the target's name on the hub, if it is known.
    """
    title, figures = "about", f"figures of {weights}: {_plain(report['prompts_from'])}"
    ours = {figures: _figures(report), "serving": _serving(report)}
    if settings is not None or not earlier:
        ours = {title: _about(report, block, settings or {})} | ours
    keys, head, body = _front_matter(earlier)
    library = "transformers" if block.get("format") == "causal_lm" else OURS.lower()  # the library that can load the folder alone
    wanted = {"base_model": base or report["target"], "library_name": library, "pipeline_tag": "text-generation",
              "tags": ["speculative-decoding", OURS.lower(), str(block.get("head"))]}  # fmt: skip
    if added := {key: value for key, value in wanted.items() if key not in keys}:
        head += yaml.safe_dump(added, sort_keys=False, allow_unicode=True)
    head += LICENCE * ("license" not in keys and LICENCE not in head)

    def renew(found: re.Match[str]) -> str:
        name = found[1]
        if name.startswith("figures of ") and not name.startswith(f"figures of {weights}:"):  # measured with weights that were replaced
            return ""
        return _marked(name, ours.pop(name, found[2]))

    body = BLOCK.sub(renew, body)
    if figures in ours and (at := body.find("<!-- headstart: serving -->")) >= 0:  # figures go before this block
        body = body[:at] + _marked(figures, ours.pop(figures)) + "\n" + body[at:]
    body = "\n".join([body.strip("\n"), *(_marked(name, text) for name, text in ours.items())]).strip("\n")
    return f"---\n{head}---\n\n{body}\n"


def _marked(name: str, text: str) -> str:
    return f"<!-- headstart: {name} -->\n{text.strip()}\n<!-- headstart: end -->\n"


def _front_matter(text: str) -> tuple[dict[str, Any], str, str]:
    """The YAML at the head of a card, read and as it stands, and the rest of the card's text. Raises ValueError where the YAML cannot be
    read.
    """
    found = re.match(r"---\n(.*?)^---\n", text, re.DOTALL | re.MULTILINE)
    if not found:
        return {}, "", text
    try:
        front = yaml.safe_load(found[1]) or {}
    except yaml.YAMLError as e:
        raise ValueError(f"its front matter is no YAML: {e}") from e
    if not isinstance(front, dict):
        raise ValueError("its front matter is no dictionary")
    return front, found[1], text[found.end() :]


def _plain(text: str) -> str:
    """``text`` with only characters that may stand in a mark."""
    return re.sub(r"[^\w .,+/()'-]", "_", text).replace("--", "-_")


def _about(report: Report, block: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    head, loss, trainer, data = (settings.get(k) or {} for k in ("head", "loss", "trainer", "data"))
    shape = block.get("target") or {}
    given = {k: v for k, v in (head or block.get("arguments", {})).items() if v is not None and k != "name"}
    path = f"; path `{Path(str(data['path'])).name}`" if data.get("path") else ""
    facts = {
        "drafter": f"`{report['head']}`, {report['drafter_parameters']:,} weights" + (f"; {_short(given)}" if given else ""),
        "target": f"`{report['target']}`: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in shape.items() if k != "tokenizer"),
        "data": f"`{data['name']}`{path}" if data else "",
        "objective": _objective(loss),
        "training": _training(report, trainer),
    }
    alone = "" if block.get("format") == "causal_lm" else "is no language model to be used alone, and "
    lines = [
        f"# {report['head']} for {report['target']}",
        "",
        "A drafter for speculative decoding: it guesses the next tokens of its target, which verifies them in one pass, so that the "
        f"output is exactly the target's own. It {alone}fits this target and its tokenizer only.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {text} |" for name, text in facts.items() if text),
    ]
    return "\n".join(lines)


def _objective(loss: Mapping[str, Any]) -> str:
    if not loss:
        return ""
    terms = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in (loss.get("terms") or {}).items() if weight)
    more = {k: loss[k] for k in ("depth", "decay", "weighting", "base_until") if loss.get(k) not in (None, 0, 0.0, "decay")}
    policy = loss.get("on_policy")
    return "; ".join([f"`{terms}`", *([_short(more)] if more else []), *([f"on policy: {policy.get('kind')}"] if policy else [])])


def _training(report: Report, trainer: Mapping[str, Any]) -> str:
    if "train_steps" not in report:
        return ""
    parts = [f"{counted(report['train_steps'], 'step')}, {report['train_tokens']:,} tokens, {report['train_seconds']:,.0f} seconds"]
    if trainer:
        parts.append(_short({k: trainer[k] for k in ("optimizer", "lr", "schedule", "batch_size", "length") if trainer.get(k) is not None}))
    if "exported_step" in report:  # trainer.keep=best
        parts.append(f"exported: step {report['exported_step']:,} ({report['exported_tokens']:,} tokens), which decoded best")
    if trainer.get("start"):
        parts.append(f"from `{Path(str(trainer['start'])).name}`")
    return "; ".join(parts)


def _short(settings: Mapping[str, Any]) -> str:
    """Settings on one line. Long lists (a trimmed vocabulary has thousands of ids) are replaced by their length."""

    def of(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"({_short(value)})"
        return f"{len(value)} tokens" if isinstance(value, list) and len(value) > 16 else str(value)

    return ", ".join(f"{k} {of(v)}" for k, v in settings.items())


def _figures(report: Report) -> str:
    lines = [f"## What it gains: {report['prompts_from']}", "", *figures_table(report), "", *(f"- {line}" for line in summary(report))]
    each = f" of up to {report['new_tokens']} new tokens" if "new_tokens" in report else ""
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if k in ("torch", "transformers", "cuda"))
    lines.append(f"- {counted(report['prompts'], 'prompt')}{each}, one after the other; {versions}; commit {report['commit']} of {OURS}")
    return "\n".join(lines)


def _serving(report: Report) -> str:
    where = "Paths are those of the machine where this was written: elsewhere give yours, or names on the hub."
    return "\n".join(["## How it is served", "", where, "", *serving_lines(report)])
