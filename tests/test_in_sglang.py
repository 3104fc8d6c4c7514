"""benchmarks/in_sglang.py without SGLang: a stand-in that computes what we compute, or something else; and the attention that is ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import in_sglang
from benchmarks.sglang_side import Absent, Attention
from headstart.inference.decoding.target import Target
from headstart.inference.speculator import load_attached


class StandIn:
    """Says our logits. Of a drafter of two layers it says others; that of a DSpark has a parameter which nothing fills."""

    version = "0.0"

    def __init__(self, target: Path, place: Path) -> None:
        self.classes: list[str] = []

    def load(self, folder: Path, tensors: dict[str, Tensor], draft: bool = True) -> Any:
        config = json.loads((folder / "config.json").read_text())
        self.classes += config["architectures"]
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
        hole = torch.full((1,), torch.nan if "markov_rank" in config else 0.0)
        return SimpleNamespace(folder=folder, config=config, hot_token_id=ids, named_parameters=lambda: [("hole", hole)])

    def capture(self, target: Any, folder: Path, served: Path, algorithm: str) -> list[int]:
        return []

    def share(self, model: Any, target: Any, algorithm: str) -> None:
        model.target = target.folder

    def read(self, model: Any, *_: Any) -> Any:
        return SimpleNamespace(hidden_states=None)

    def unread(self, folder: Path, tensors: dict[str, Tensor]) -> list[str]:
        return []

    def autoregressive(self, model: Any, text: Tensor, *_: Any) -> dict[tuple[int, int], Tensor]:
        target = Target.load(str(model.target), dtype="float32", device="cpu")
        rows = in_sglang.ours(load_attached(model.folder, target), target, text)
        return {(7, d): row[7] + (model.config["num_hidden_layers"] == 2 and d == 3) for d, row in enumerate(rows, start=1)}

    def blocks(self, model: Any, target: Any, text: Tensor, *_: Any) -> dict[tuple[int, int], Tensor]:
        return self.autoregressive(SimpleNamespace(**vars(model) | {"config": {"num_hidden_layers": 1}}), text)


@pytest.mark.slow
def test_what_differs_or_stays_unfilled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("eagle, 1,024 tokens", "eagle, two layers", "eagle, Qwen3", "dspark")
    monkeypatch.setattr(in_sglang, "KINDS", {name: in_sglang.KINDS[name] for name in few})
    monkeypatch.setattr(in_sglang, "Sglang", StandIn)
    out = tmp_path / "in_sglang.json"
    monkeypatch.setattr(sys, "argv", ["in_sglang.py", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"^not completely loaded, or other logits: eagle, two layers, dspark$"):
        in_sglang.main()
    made = json.loads(out.read_text())
    assert made["sglang"] == "0.0" and made["commit"] and str(tmp_path) not in out.read_text()
    assert {name: e["algorithm"] for name, e in made["kinds"].items()} == dict.fromkeys(few, "EAGLE3") | {"dspark": "DSPARK"}
    assert [e["unfilled"] for e in made["kinds"].values()] == [[], [], [], ["hole"]]
    assert [round(e["largest_difference"], 3) for e in made["kinds"].values()] == [0, 1, 0, 0]
    assert made["kinds"]["dspark"]["depths"] == 8 and made["kinds"]["eagle, Qwen3"]["compared"] == in_sglang.DEPTH


@pytest.mark.parametrize("kind", ["decoder", "encoder_only"])
def test_attention_over_what_is_kept(kind: str) -> None:
    """In pieces as at once; what is cut off is not seen."""
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=8, scaling=0.3)
    layer.attn_type = SimpleNamespace(value=kind)
    q, k, v = torch.randn(7, 32), torch.randn(7, 16), torch.randn(7, 16)
    whole, pieces = Attention().forward(q, k, v, layer, None), Attention()
    pieces.forward(q[:4], k[:4], v[:4], layer, None)
    pieces.forward(torch.zeros(2, 32), torch.ones(2, 16), torch.ones(2, 16), layer, None)
    pieces.cut(4)
    torch.testing.assert_close(pieces.forward(q[4:], k[4:], v[4:], layer, None), whole[4:])
    keys, values = (x.view(7, 2, 8).repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.view(7, 4, 8), keys) * 0.3
    if kind == "decoder":
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(whole, torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1))


def test_only_packages_that_are_never_called_seem_to_be_there() -> None:
    assert Absent().find_spec("sgl_kernel.ops") is not None
    assert Absent().find_spec("torch") is None
