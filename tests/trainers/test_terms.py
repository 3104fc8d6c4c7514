"""What a loss is made of: its constants, and a new one, which is one file and one YAML."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from headstart.door import values
from headstart.door.frame import checked
from headstart.heads.errors import UserError
from headstart.trainers import divergences
from headstart.trainers.divergences import Teacher
from headstart.trainers.run import prepare, run
from headstart.trainers.terms import check_loss, term, weighting_of
from tests.trainers.conftest import small_run

SQUARED = '''"""Brier's score."""

from torch import Tensor

from headstart.trainers.divergences import Teacher


def squared(log_q_RV: Tensor, teacher: Teacher, power: float = 2.0) -> Tensor:
    """sum |p - q|^power."""
    return (teacher.p_CV - log_q_RV.exp()).abs().pow(power).sum(-1)
'''
CONF = values.CONF


def test_another_loss_is_one_file_and_one_yaml(target_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Listed, checked by the door, trained with and reported without another line of code."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "squared.py").write_text(SQUARED)
    conf = shutil.copytree(CONF, tmp_path / "conf")
    (conf / "loss" / "squared.yaml").write_text("terms: {squared: 2.0} # weights\nconstants: {squared: {power: 1.5}}\n")
    monkeypatch.setattr(divergences, "__path__", [*divergences.__path__, str(tmp_path / "code")])
    monkeypatch.setattr(values, "CONF", conf)
    with initialize_config_dir(str(conf), version_base="1.3"):
        config = compose("config", [*small_run(target_folder, conversations, tmp_path / "run"), "loss=squared"])
    settings = checked(config, "config")
    assert "squared" in divergences.names() and settings["loss"]["constants"] == {"squared": {"power": 1.5}}
    own = inspect.signature(prepare).parameters  # the others are the door's
    report = run(**{key: value for key, value in settings.items() if key in own})[""]
    assert report["lossless"] and report["loss"]["terms"] == {"squared": 2.0}
    said = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < said[0]["train/loss"] < 4  # 2 sum |p - q|^1.5 is no more


def test_a_loss_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over all rows would be added to each of them, and the gradient would depend on loss.chunk."""
    (tmp_path / "summed.py").write_text(SQUARED.replace("squared", "summed").replace(".sum(-1)", ".sum()"))
    monkeypatch.setattr(divergences, "__path__", [*divergences.__path__, str(tmp_path)])
    with pytest.raises(UserError, match=r"loss\.terms\.summed: .* of shape \[\], not one value for each of 3 rows"):
        term("summed")(*rows())


def rows() -> tuple[torch.Tensor, Teacher]:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 9, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    return q, Teacher.of(p.clone(), torch.zeros(3, dtype=torch.int64), None)


def test_constants_are_those_of_the_formula() -> None:
    log_q, teacher = rows()
    p, q = teacher.p_CV, log_q.exp()
    likeliest = [row.argsort(descending=True)[:4].tolist() for row in p]
    expected = [-sum(p[i, v] * log_q[i, v] for v in some) for i, some in enumerate(likeliest)]
    torch.testing.assert_close(term("top_k", {"top_k": {"k": 4}})(log_q, teacher), torch.stack(expected))
    share, kl, tv = (-7.0 * torch.minimum(p, q).sum(-1)).exp(), (p * (p / q).log()).sum(-1), (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(term("lk_hybrid", {"lk_hybrid": {"eta": 7.0}})(log_q, teacher), share * kl + (1 - share) * tv)
    true, supervised = torch.tensor([0.2, 0.9]).view(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.bool)
    dpace = weighting_of("dpace", {"dpace": {"a": 0.0}})
    assert dpace is not None
    first, both = 0.2, 0.2 * 0.9  # without smoothing; the mean is 1
    torch.testing.assert_close(dpace(true, true, supervised).flatten(), torch.tensor([first + both, both]) * 2 / (first + 2 * both))


@pytest.mark.parametrize(
    ("terms", "weighting", "constants", "said"),
    [
        ({"kl": 1.0}, "decay", {"top_k": {"k": 3}}, "loss.constants.top_k is of nothing in this loss: it has kl, decay"),
        ({"top_k": 1.0}, "decay", {"top_k": {"kk": 3}}, "loss.constants.top_k has no 'kk': it has k"),
        ({"top_k": 1.0}, "decay", {"top_k": {"k": 2.5}}, "loss.constants.top_k.k must be a whole number from 1 on, found 2.5"),
        ({"kl": 1.0}, "decay", {"kl": {"k": 3}}, "loss.constants.kl has no 'k': it has none"),
        ({"kl": 1.0, "feature": 1.0}, "decay", {"feature": {"k": 3}}, "loss.constants.feature: it has none"),
        ({"kl": 1.0}, "dpace", {"dpace": {"b": 0.1}}, "loss.constants.dpace has no 'b': it has a"),
        ({"kll": 1.0}, "decay", None, "loss.terms has no 'kll'"),
    ],
)
def test_constants_that_are_not_there(terms: dict[str, float], weighting: str, constants: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        check_loss(terms, weighting, constants)
    assert str(error.value).startswith(said)


def test_a_file_that_imports_what_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.setattr(divergences, "__path__", [*divergences.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        term("broken")
