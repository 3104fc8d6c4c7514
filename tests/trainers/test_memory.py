"""Where memory ends, a line says which setting to lower and what that frees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.heads.errors import UserError
from headstart.trainers import memory
from headstart.trainers.arm import Arm
from headstart.trainers.memory import advice, asked_for
from headstart.trainers.plan import plan
from headstart.trainers.resume import Batch, shared_out
from headstart.trainers.run import fit, prepare
from tests.trainers.conftest import Composed

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total max_length of 79.10 GiB of which 1.03 GiB is"
)


def test_what_was_asked_for() -> None:
    """As torch and numpy say it themselves."""
    assert asked_for(CUDA) == 2.5 * 2**30
    with pytest.raises(RuntimeError) as e:
        torch.empty(1 << 55)
    assert asked_for(e.value) == 4 << 55
    with pytest.raises(MemoryError) as n:
        np.empty(1 << 55, dtype=np.float32)
    assert asked_for(n.value) == 4 << 55
    assert asked_for(MemoryError()) == 0 and asked_for(RuntimeError("shapes differ")) is None


def of_a_plan(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"nodes": 1, "gpus": 1, "gpu": "h100"}


@pytest.mark.slow
def test_the_advice_frees_as_much_as_was_wanted(composed: Composed, overrides: list[str]) -> None:
    """By the plan itself, of the settings that it names: the smallest step that does, and as many rows a step."""
    settings = of_a_plan(composed(*overrides, "trainer.batch_size=12", "trainer.accumulate=1"))
    before = plan(settings).needed

    def with_rows(rows: int, accumulate: int) -> float:
        return plan(settings | {"trainer": settings["trainer"] | {"batch_size": rows, "accumulate": accumulate}}).needed

    frees = {rows: before - with_rows(rows, 12 // rows) for rows in (6, 3, 1)}
    for wanted, rows in ((0, 6), (int(frees[6]) - 9, 6), (int(frees[6]) + 9, 3), (int(frees[3]) + 9, 1)):
        said = advice(settings, wanted)
        assert said.startswith(f"trainer.batch_size={rows} trainer.accumulate={12 // rows} takes {frees[rows] / 1e9:.2g} GB less")
        assert said.endswith(f"; with out={settings['out']} the run goes on")
    one = of_a_plan(composed(*overrides, "trainer.batch_size=1", "loss.chunk=1"))
    assert advice(one, 0).startswith("trainer.length=32 takes ") and "out=" not in advice(one, 0), "other rows are another run"
    assert "no smaller batch frees that" in advice(settings, 1 << 50)


@pytest.mark.parametrize("loss", [["loss=dpace"], ["loss=on_policy_rejected"]])
def test_what_is_advised_is_said_to_go_on_only_where_it_does(
    loss: list[str], composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = of_a_plan(composed(*overrides, "trainer.batch_size=4", *loss))
    with pytest.raises(UserError, match=r"go on with trainer\.batch_size=4, as the run began"):
        shared_out(Batch(2, 2, 1), Batch(4, 1, 1), [settings["loss"]])
    for said in (advice(settings, 0), monkeypatch.setattr(memory, "plan", lambda _: 1 // 0) or advice(settings, 0)):
        assert re.match(r"trainer\.batch_size=2 trainer\.accumulate=2 .*; in a run of its own \(out=DIR\), as loss\.", said), said


def test_where_there_is_no_plan_half_the_rows_are_advised(
    composed: Composed, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "plan", lambda _: 1 // 0)
    assert advice(of_a_plan(composed(*overrides, "trainer.batch_size=4")), 9).startswith("trainer.batch_size=2 trainer.accumulate=2 halves")


@pytest.mark.parametrize("how", ["a GPU", "a CPU"])
def test_a_run_says_it_in_one_line(
    how: str, composed: Composed, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the third step; the run then goes on with what it was told to."""
    settings = composed(*overrides, "trainer.batch_size=4", *(["trainer.epochs=0.25"] if how == "a GPU" else [])) | {"report": "none"}
    start = Arm.start

    def ended(self: Arm, *rest: Any) -> Any:
        if self.fitted.steps == 2:
            if how == "a GPU":
                raise CUDA
            torch.empty(1 << 55)
        return start(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Arm, "start", ended)
        if how == "a CPU":
            patch.setattr("headstart.trainers.run.asked_for", lambda _: 1 << 14)  # what a batch can free
        else:
            patch.setattr("headstart.trainers.run.asked_for", lambda e: 1 << 14 if e is CUDA else None)
        with prepare(**settings) as job, pytest.raises(UserError, match=r"memory has ended \(.*\): trainer\.batch_size=") as e:
            fit(job)
    assert "\n" not in str(e.value) and " GB less (of " in str(e.value) and f"; with out={tmp_path / 'run'} the run goes on" in str(e.value)
    told = {key: int(value) for key, value in re.findall(r"trainer\.(batch_size|accumulate)=(\d+)", str(e.value))}
    assert told == {"batch_size": 2, "accumulate": 2}
    with prepare(**settings | {"trainer": settings["trainer"] | told}) as job:
        assert not fit(job) and job.arms[0].fitted.steps == 4
