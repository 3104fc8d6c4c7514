"""Do SGLang's own model classes load our folders, and compute our logits? No server and no GPU: the classes alone, on a CPU.

    python -m pip install --no-deps --target DIR sglang==0.5.23 triton==3.6.0 apache-tvm-ffi==0.1.11 compressed-tensors gguf loguru \\
        msgspec openai orjson partial-json-parser pybase64 sentencepiece starlette
    PYTHONPATH=DIR python benchmarks/in_sglang.py

SGLang is not a dependency: DIR is an empty folder, and the Python is that of ``make install``. (0.5.23 asks for transformers 5.19; if
another version is installed, add it to the command.) Its packages for CUDA, images, audio and its server are imported but never
called, so empty modules replace them.

Each drafter of KINDS gets random weights and is saved, in fp32, for a small target. SGLang then reads both folders (sglang_side.py). Its
``ModelConfig`` reads config.json. The class named there is built and loads the tensors by its own ``load_weights``. The functions of
SGLang's server determine which target layers the drafter reads. Then SGLang's target reads a text and its drafter guesses. Two parts are
ours: the attention over keys and values, which in a server depends on the device (here torch's), and the order of the calls, which in a
server the workers make. The logits (and DSpark's confidence) are compared with those of our drafter, which reads our target's states.
Both are fed the true tokens. EAGLE drafters are compared at every root for depth 1 and at some roots for all depths; block drafters and
draft models at some roots.

Writes benchmarks/results/in_sglang.json. ``unfilled``: parameters that no tensor of the folder or the target fills; ``unread``: tensors
that change nothing. Exits with status 1 if any parameter is unfilled, or if logits differ by more than 1e-5 of the largest.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import ROOT, keep, parser
from benchmarks.sglang_side import Attention, Sglang
from headstart.heads import hub
from headstart.heads.base import Drafter, Roots
from headstart.heads.files import put_text
from headstart.heads.formats.eagle1 import ARCHITECTURES
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance
from headstart.inference.speculator import load_attached

TOKENS, DEPTH, WITHIN = 96, 5, 1e-5
ROOTS = (TOKENS - 9, TOKENS // 2, 7, 0)
OLD = {"fc_norm": False, "norm_output": False}
BLOCK = {"layers": 2, "block": 8, "mask_token": 4095}
DRAFT = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {  # name -> head, its settings, target
    "eagle": ("eagle", {}, "tiny"),
    "eagle, without 3.1": ("eagle", OLD, "tiny"),
    "eagle, norm_before_fc": ("eagle", OLD | {"norm_before_fc": True}, "tiny"),
    "eagle, 1,024 tokens": ("eagle", {"draft_vocab": list(range(0, 4096, 4))}, "tiny"),
    "eagle, two layers": ("eagle", {"layers": 2}, "tiny"),
    "eagle, four other taps": ("eagle", {"taps": [1, 4, 7, 11]}, "tiny"),
    "eagle, Llama 3's rope": ("eagle", {}, "roped"),
    "eagle, Qwen3": ("eagle", {"taps": [2, 5, 7]}, "qwen3"),
    "eagle1": ("eagle1", {}, "tiny"),
    "dflash": ("dflash", BLOCK, "tiny"),
    "dflash, Qwen3": ("dflash", BLOCK, "qwen3"),
    "jetspec": ("jetspec", BLOCK, "tiny"),
    "dflash2": ("dflash2", BLOCK | {"rank": 32}, "tiny"),
    "dspark": ("dspark", BLOCK | {"rank": 32}, "tiny"),
    "dspark, gated": ("dspark", BLOCK | {"rank": 32, "markov": "gated"}, "tiny"),
    "dspark, rnn": ("dspark", BLOCK | {"rank": 32, "markov": "rnn"}, "tiny"),
    "domino": ("domino", BLOCK | {"rank": 32, "gru": 96}, "tiny"),
    "draft_lm": ("draft_lm", {"config": DRAFT}, "tiny"),
}
ALGORITHMS = {"eagle": "EAGLE3", "eagle1": "EAGLE", "draft_lm": "STANDALONE", "dspark": "DSPARK"}  # all others: DFLASH
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
QWEN3 = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 48}


def targets(place: Path) -> dict[str, Path]:
    """The targets: assets/tiny, the same with another rope, and a Qwen3 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny, roped, qwen3 = ROOT / "assets" / "tiny", place / "roped", place / "qwen3"
    shutil.copytree(tiny, roped)
    config = json.loads((tiny / "config.json").read_text())
    config["rope_parameters"] |= LLAMA3
    put_text(roped / "config.json", json.dumps(config))
    torch.manual_seed(0)
    keys = QWEN3 | {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **keys), dtype=torch.float32).save_pretrained(qwen3)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(qwen3)
    return {"tiny": tiny, "roped": roped, "qwen3": qwen3}


def export(name: str, target: Target, folder: Path) -> Drafter:
    """Export a drafter and load it back. Noise is added to all weights, so that none keeps a special initial value such as 0."""
    head, settings, _ = KINDS[name]
    torch.manual_seed(0)
    drafter = hub.build(head, target.shape, **settings)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    hub.save(drafter, folder, target.card, torch.float32, target.tokenizer)
    return load_attached(folder, target)


@torch.no_grad()
def ours(drafter: Drafter, target: Target, text: Tensor) -> list[Tensor]:
    """Our logits per depth, each [roots, vocabulary]. A drafter with a confidence has it as one more column."""
    places = torch.arange(TOKENS)[None]
    states, _ = target.read(text[None, :-1], places, drafter.taps)
    drafts = unroll(drafter, Roots(text[None, :-1], text[None, 1:], states, places), None, drafter.max_depth or DEPTH)
    rows = [drafter.unembedding(d).logits(draft.hidden_BNH)[0] for d, draft in enumerate(drafts, start=1)]
    sure = [draft.confidence_BN for draft in drafts]
    return [row if x is None else torch.cat([row, x[0, :, None]], dim=1) for row, x in zip(rows, sure, strict=True)]


def compare(sglang: Sglang, name: str, served: Path, folder: Path) -> dict[str, Any]:
    """The result for one kind of drafter. ``served``: the target's folder; ``folder``: where the drafter is exported to."""
    target = Target.load(str(served), dtype="float32", device="cpu")
    drafter, algorithm = export(name, target, folder), ALGORITHMS.get(KINDS[name][0], "DFLASH")
    if algorithm == "EAGLE":  # as the exported model card says
        path = folder / "config.json"
        put_text(path, path.read_text().replace(f'"{ARCHITECTURES[0]}"', f'"{ARCHITECTURES[1]}"'))
    text = torch.randint(3, 4000, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    tensors = load_file(folder / "model.safetensors")
    base, model = sglang.load(served, load_file(served / "model.safetensors"), draft=False), sglang.load(folder, tensors)
    captured = sglang.capture(base, folder, served, algorithm)
    sglang.share(model, base, algorithm)
    states = sglang.read(base, Attention(), text[:-1], 0).hidden_states
    if algorithm in ("EAGLE3", "EAGLE"):
        theirs = sglang.autoregressive(model, text, states, ROOTS, DEPTH)
    elif algorithm == "STANDALONE":
        theirs = sglang.independent(model, text, ROOTS, DEPTH)
    else:
        theirs = sglang.blocks(model, base, text, states, ROOTS)
    ids = [drafter.unembedding(1).ids_V, getattr(model, "hot_token_id", None)]
    if len({None if x is None else tuple(x.tolist()) for x in ids}) > 1:
        raise RuntimeError(f"{name}: SGLang reads another draft vocabulary")
    own = ours(drafter, target, text)
    pairs = [(row, own[d - 1][t]) for (t, d), row in theirs.items()]
    return {
        "class": type(model).__name__,
        "algorithm": algorithm,
        "target": type(base).__name__,
        "layers_of_the_target": captured,
        "tensors": len(tensors),
        "unfilled": sorted(n for n, x in model.named_parameters() if x.isnan().any()),
        "unread": sglang.unread(folder, tensors),
        "compared": len(pairs),
        "depths": max(d for _, d in theirs),
        "largest_logit": max(b[b.isfinite()].abs().max().item() for _, b in pairs),
        "largest_difference": max(torch.where(a == b, 0.0, (a - b).abs()).max().item() for a, b in pairs),  # equal infinities do not differ
    }


def main() -> None:
    cli = parser(__doc__, "in_sglang.json")
    args = cli.parse_args()
    console, table = Console(), Table(title="our folders in SGLang's model classes", title_justify="left")
    for column in ("", "unfilled", "unread", "logits", "largest", "off by"):
        table.add_column(column, no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        served = targets(place)
        sglang = Sglang(served["tiny"], place)
        found = {name: compare(sglang, name, served[KINDS[name][2]], place / str(i)) for i, name in enumerate(KINDS)}
    wrong = [name for name, e in found.items() if e["unfilled"] or not e["largest_difference"] <= WITHIN * e["largest_logit"]]
    for name, e in found.items():
        numbers = (str(e["compared"]), f"{e['largest_logit']:.3g}", f"{e['largest_difference']:.1e}")
        table.add_row(name, *(str(len(e[key])) for key in ("unfilled", "unread")), *numbers)
    console.print(table)
    versions = {"sglang": sglang.version} | provenance()
    keep(args.out, {"command": "PYTHONPATH=DIR python benchmarks/in_sglang.py"} | versions | {"kinds": found})
    if wrong:
        sys.exit(f"not completely loaded, or other logits: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
