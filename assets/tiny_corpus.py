"""The text of the tiny target: Python source that is already installed, its tokenizer, and both as token streams.

The standard library's training split, and the packages of the table below. Held-out modules (`data.stdlib.HELD_OUT`)
and near-copies of them are never seen.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from headstart.data import stdlib  # noqa: E402  (run from any folder)

END, ROLES = "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CONTEXT, VOCABULARY = 1024, 4096
# Licence -> import name -> most megabytes. Absent packages are left out and the card says which were there.
PACKAGES: dict[str, dict[str, float]] = {
    "BSD": {"torch": 6, "sympy": 4, "pandas": 4, "numpy": 3, "scipy": 3, "networkx": 3, "IPython": 2, "prompt_toolkit": 1.5,
            "mpmath": 1, "jinja2": 1, "fsspec": 1, "pygments": 1, "omegaconf": 1, "click": 1, "traitlets": 1, "httpx": 1,
            "dill": 1, "nbformat": 1, "nbclient": 1, "jupyter_client": 1},
    "Apache-2.0": {"transformers": 2.5, "datasets": 2, "huggingface_hub": 2, "deepspeed": 2, "tornado": 2, "accelerate": 1.5,
                   "peft": 1.5, "aiohttp": 1.5, "requests": 1, "sortedcontainers": 1},
    "MIT": {"mypy": 2.5, "pydantic": 2, "_pytest": 2, "fontTools": 2, "rich": 1.5, "setuptools": 1.5, "hydra": 1, "jedi": 1,
            "parso": 1, "urllib3": 1, "anyio": 1, "attr": 1, "typer": 1, "einops": 1, "pyparsing": 1},
}  # fmt: skip
# transformers' models/ is one file sixty times over; the rest is tests, tables and other people's code.
SKIP = frozenset({"test", "tests", "testing", "models", "_vendor", "vendored", "externals", "extern", "pgen2"})
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|endoftext|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(docstring, source) of the top-level functions of a file that are documented and not long."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in body:
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if doc and 30 < len(doc) < 600 and (code := ast.get_source_segment(text, node)) and len(code) < 3000:
            yield doc, code


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= 40]


class CopyCheck:
    """Says whether a text is a near-copy of held-out text: too many of its long lines occur there."""

    def __init__(self, share: float = 0.3) -> None:
        self.share = share
        self.held = {line for _, text in stdlib.documents("heldout") for line in _long_lines(text)}

    def __call__(self, text: str) -> bool:
        lines = _long_lines(text)
        return bool(lines) and sum(line in self.held for line in lines) > self.share * len(lines)


def chat(doc: str, code: str) -> str:
    """A documented function as a conversation, so that the chat template means something to the model."""
    name = code.split("(")[0].removeprefix("def ")
    return f"<|user|>\nWrite the function `{name}`.\n\n{doc}{END}<|assistant|>\n{code}\n"


def package_documents(seed: int, is_copy: CopyCheck) -> Iterator[tuple[str, str]]:
    """(package, text) of the installed packages in the table: a seeded choice of files up to each cap."""
    copies = {*stdlib.HELD_OUT, "tomli"}
    for package, megabytes in ((package, most) for row in PACKAGES.values() for package, most in row.items()):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root, left = Path(next(iter(spec.submodule_search_locations))), megabytes * 1e6
        paths = sorted(root.rglob("*.py"))
        random.Random(f"{seed}{package}").shuffle(paths)
        for path in paths:
            parts = path.relative_to(root).with_suffix("").parts
            size = path.stat().st_size
            if not 500 < size < min(1e5, left) or SKIP.intersection(parts) or copies.intersection(parts):
                continue
            text = path.read_text(encoding="utf-8", errors="replace").strip() + "\n"
            head, digits = text[:600].lower(), sum(map(text.count, "0123456789"))
            generated = "generated" in head or "do not edit" in head or digits > 0.15 * len(text)
            if generated or "\ufffd" in text or max(map(len, text.splitlines())) > 500 or is_copy(text):
                continue
            left -= size
            yield package, text


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE; the end of text is also the beginning of the next, and nothing pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": [END, *ROLES], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, **options))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, additional_special_tokens=ROLES,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prepare(cache: Path, seed: int) -> dict[str, Any]:
    """Fills the cache: tokenizer and uint16 token streams. Returns what went in (sources.json)."""
    record = cache / "sources.json"
    if record.exists():
        return json.loads(record.read_text())
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    is_copy = CopyCheck()
    library = [text for _, text in stdlib.documents("train") if not is_copy(text)]
    held = [text for _, text in stdlib.documents("heldout")]
    packages = list(package_documents(seed, is_copy))
    texts = [text for _, text in packages]
    streams = {
        "stdlib": library,
        "packages": texts,
        "chat": [chat(*pair) for text in library + texts for pair in functions(text)],
        "heldout": held,
    }
    tokenizer = make_tokenizer(library + texts)
    tokenizer.save_pretrained(cache / "tokenizer")
    sizes: dict[str, Any] = {}
    for name, stream in streams.items():
        random.Random(seed).shuffle(stream)
        rows = tokenizer.backend_tokenizer.encode_batch([text + END for text in stream])
        # The held-out stream begins with the separator too, so its first token is predicted as well.
        tokens = np.array([tokenizer.eos_token_id, *(i for row in rows for i in row.ids)], dtype=np.uint16)
        np.save(cache / f"{name}.npy", tokens)
        size = sum(len(text.encode()) for text in stream)
        sizes[name] = {"documents": len(stream), "bytes": size, "tokens": len(tokens)}
    used = {name: sum(len(t.encode()) for n, t in packages if n == name) for name in dict(packages)}
    licences = {name: licence for licence, row in PACKAGES.items() for name in row}
    table = {name: {"bytes": size, "licence": licences[name]} for name, size in used.items()}
    sources = {"streams": sizes, "packages": table, "held_out": stdlib.HELD_OUT}
    record.write_text(json.dumps(sources, indent=1))
    return sources
