"""launcher=slurm: the script, handing it in, and a real SLURM where there is one."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.door import slurm
from headstart.heads.errors import UserError
from headstart.trainers.metrics import FILE, read_metrics
from tests.composed import composed
from tests.doors import ROOT, call
from tests.trainers.conftest import equal, weights

SMOKE = ["experiment=smoke", "trainer.steps=24", "trainer.save_every=1000", "trainer.batch_size=1", "decode.prompts=1"]


def launcher(*overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = composed("launcher=slurm", *overrides)["launcher"]
    return found


def test_the_script_says_what_was_asked_for_and_is_a_script(tmp_path: Path) -> None:
    asked = (
        "launcher.nodes=4",
        "launcher.processes=8",
        "launcher.partition=big",
        'launcher.options=["--mem=200G"]',
        'launcher.setup=["module load cuda"]',
    )
    text = slurm.script(launcher(*asked), ["python", "-m", "x", "a b=$HOME'"], str(tmp_path / "run"))
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=big", "--mem=200G", "--requeue", "--signal=TERM@180",
              "--time=24:00:00", f"--output={tmp_path}/run/slurm-%j.log", "--job-name=run", "--open-mode=append"}  # fmt: skip
    assert set(options) == wanted
    assert text.index("module load cuda") < text.index("srun")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("ends", "state", "again"), [(130, "RUNNING", True), (130, "CANCELLED", False), (0, "RUNNING", False), (2, "RUNNING", False)]
)
def test_what_was_ended_by_the_clock_goes_back_into_the_queue(tmp_path: Path, ends: int, state: str, again: bool) -> None:
    """By bash itself, with stand-ins for SLURM's commands that say what they were asked."""
    programs = {
        "srun": f'"${{@:2}}"; exit {ends}',
        "scontrol": f'case $1 in show) echo "JobState={state} node1";; requeue) echo "requeue $2" >> {tmp_path}/asked;; esac',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    told = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    says = f"import os, sys; print(*(os.environ.get(k) for k in {told}), sys.argv)"
    text = slurm.script(launcher(), [sys.executable, "-c", says, "a b=$HOME'"], str(tmp_path))
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n"}
    here |= {"SLURM_NTASKS": "16", "SLURM_NNODES": "4", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    done = subprocess.run(["bash"], input=text, text=True, env=here, capture_output=True)
    assert done.stdout.splitlines()[0] == """9 1 16 4 20077 ['-c', "a b=$HOME'"]""", done.stderr
    assert (tmp_path / "asked").exists() == again and (done.returncode == 0 if again else done.returncode == ends)


def test_without_sbatch_and_where_it_refuses_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs sbatch.*launcher\.submit=false prints the script"):
        slurm.submit(launcher(), ["x"], str(tmp_path / "run"))
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2\nexit 1\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match=r"sbatch refuses .*job\.sh: Batch job submission failed: Invalid partition name specified"):
        slurm.submit(launcher(), ["x"], str(tmp_path / "run"))


def test_the_door_hands_in_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["launcher=slurm", "trainer.lr=4e-3", "launcher.submit=false", "out=runs/x"]
    assert call("train", asked, tmp_path, monkeypatch) in (0, None)
    said = capsys.readouterr().out
    assert f"{sys.executable} -m headstart.door.train trainer.lr=4e-3 out=runs/x\n" in said and not (tmp_path / "runs").exists()


def _answers() -> bool:
    try:
        return shutil.which("sbatch") is not None and bool(subprocess.run(["sinfo", "-h"], capture_output=True, timeout=20).stdout.strip())
    except subprocess.TimeoutExpired:  # it is installed, and not at work
        return False


@pytest.fixture
def cluster() -> Iterator[None]:
    if not _answers():
        pytest.skip("no SLURM runs here")
    yield
    subprocess.run(["scancel", "--me"], timeout=20)


@pytest.mark.slow
def test_a_job_that_is_ended_early_is_requeued_and_ends_like_another(cluster: None, tmp_path: Path) -> None:
    """Two tasks of a real SLURM get SIGTERM in the middle; the weights at the end are those of two processes that were left alone."""
    command = [sys.executable, str(ROOT / "train.py"), *SMOKE]
    python = f"export PYTHONPATH={os.environ.get('PYTHONPATH', '')} HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_WAIT_POLICY=PASSIVE"
    job = ["launcher=slurm", "launcher.processes=2", "launcher.gpus=false", f'launcher.setup=["{python}"]', f"out={tmp_path / 'job'}"]
    said = subprocess.run([*command, *job], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    number = re.findall(r"^job (\d+): ", said, re.MULTILINE)[0]

    def state() -> str:
        shown = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True).stdout
        return next(word.removeprefix("JobState=") for word in shown.split() if word.startswith("JobState="))

    def wait(seen: Any) -> None:
        until = time.monotonic() + 240
        while not seen():
            assert time.monotonic() < until, (tmp_path / "job" / f"slurm-{number}.log").read_text()
            time.sleep(0.5)

    wait(lambda: (tmp_path / "job" / FILE).exists() and any(row["step"] >= 10 for row in read_metrics(tmp_path / "job")))
    subprocess.run(["scancel", "--signal=TERM", number], check=True)
    wait(lambda: state() == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)  # else it waits for minutes, as a courtesy
    wait(lambda: state() in ("COMPLETED", "FAILED"))
    log = (tmp_path / "job" / f"slurm-{number}.log").read_text()
    assert state() == "COMPLETED" and "resuming after step" in log, log
    subprocess.run([*command, "launcher=processes", f"out={tmp_path / 'alone'}"], cwd=ROOT, check=True, capture_output=True)
    assert equal(weights(tmp_path / "job"), weights(tmp_path / "alone"))
