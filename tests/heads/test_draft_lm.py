"""An independent small model as drafter: from a folder, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import hub
from heads.errors import UserError
from tests.tiny_targets import tiny_target

SMALL: dict[str, Any] = dict(model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


def test_a_folder_wins_over_a_config_and_is_kept_bit_for_bit(tmp_path: Path) -> None:
    small, target = tiny_target(seed=3, num_hidden_layers=2), tiny_target()
    small.model.save_pretrained(tmp_path / "small")
    drafter = hub.build("draft_lm", target.shape, config=SMALL, folder=str(tmp_path / "small"))
    assert all(torch.equal(drafter.state_dict()[f"lm.{k}"], v) for k, v in small.model.state_dict().items())
    hub.save(drafter, tmp_path / "s", {}, torch.float32)
    (tmp_path / "small" / "config.json").unlink()  # a saved drafter stands alone
    loaded = hub.load(tmp_path / "s", target.shape)
    assert all(torch.equal(loaded.state_dict()[f"lm.{k}"], v) for k, v in small.model.state_dict().items())


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shape = tiny_target().shape
    for config, message in (
        (None, "head.config or head.folder"),
        (SMALL | {"vocab_size": 90}, "a vocabulary of 90, the target 96"),
        (SMALL | {"model_type": "no_such"}, "cannot be made"),
        (SMALL | {"hidden_size": "wide"}, "cannot be made"),
        (SMALL | {"model_type": "gemma3_text", "head_dim": 8}, "only full attention is supported"),
        (SMALL | {"model_type": "gemma", "final_logit_softcapping": 30.0}, "caps its logits"),
    ):
        with pytest.raises(UserError, match=message) as e:
            hub.build("draft_lm", shape, config=config)
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match=r"the draft model .*nowhere cannot be made"):
        hub.build("draft_lm", shape, folder=str(tmp_path / "nowhere"))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=1)
    target.model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        hub.build("draft_lm", target.shape, folder=str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be made"):
        hub.build("draft_lm", target.shape, folder=str(tmp_path))
