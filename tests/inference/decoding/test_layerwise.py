"""A text read by the files, one layer at a time, is what the loaded model says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.inference.decoding.layerwise import every_state, final_norm
from headstart.inference.decoding.stored import NotStored, StoredTarget
from headstart.inference.decoding.target import Target
from tests.inference.decoding.test_stored_target import FAMILIES, save

TOKENS = torch.tensor([5, 0, 17, 95, 3, 3, 40, 8, 61, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_state_is_the_loaded_models(family: str, tmp_path: Path) -> None:
    """Those of transformers itself; and the norm is what makes the last of them of what the last layer gives."""
    from transformers import AutoModelForCausalLM

    folder = str(save(tmp_path, family))
    target = StoredTarget(folder, device="cpu", attention="eager")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    before = []
    children = (child for module in model.get_decoder().modules() for child in module.named_children())
    norm = next(m for name, m in children if name in ("norm", "ln_f"))
    norm.register_forward_pre_hook(lambda _, args: before.append(args[0][0]))
    with torch.no_grad():
        wanted = [state[0] for state in model(TOKENS[None], output_hidden_states=True, use_cache=False).hidden_states]
        found = every_state(target, TOKENS)
        assert [*found] == list(range(len(wanted))) and len(wanted) == target.shape.layers + 1
        for k, state in found.items():
            assert torch.equal(state, wanted[k]), k
        assert torch.equal(final_norm(target)(before[0]), wanted[-1])


def test_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer reads, the others hold nothing; and the target itself is never loaded."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    alive, layers = list[int](), list[LlamaDecoderLayer]()
    init, forward = LlamaDecoderLayer.__init__, LlamaDecoderLayer.forward

    def made(self: LlamaDecoderLayer, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        layers.append(self)

    def counted(self: LlamaDecoderLayer, *args: Any, **more: Any) -> Any:
        alive.append(sum(not any(p.is_meta for p in layer.parameters()) for layer in layers))
        return forward(self, *args, **more)

    target = StoredTarget(str(save(tmp_path)), device="cpu")
    monkeypatch.setattr(LlamaDecoderLayer, "__init__", made)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    monkeypatch.setattr(Target, "load", load)
    every_state(target, TOKENS)
    assert len(layers) == 6 and alive == [1] * 6


def test_files_that_lack_a_weight(tmp_path: Path) -> None:
    folder = save(tmp_path)
    target = StoredTarget(str(folder), device="cpu")
    lost = next(name for name in target.files.sources if "layers.3.mlp" in name)
    del target.files.sources[lost]
    with pytest.raises(NotStored, match=f"its files lack {lost}"):
        every_state(target, TOKENS)
