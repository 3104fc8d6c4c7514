"""launcher=slurm: the script, handing it in, and a real SLURM where there is one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from headstart.door import slurm
from headstart.door.arguments import as_typed
from headstart.heads.errors import UserError
from headstart.heads.override import quoted
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


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(
    ("ends", "state", "again"),
    [(130, "RUNNING", True), (130, "CANCELLED", False), (0, "RUNNING", False), (2, "RUNNING", False),
     (143, "RUNNING PreemptTime=2026-11-22T15:25:11", True), (143, "RUNNING PreemptTime=None", False),
     (143, "CANCELLED PreemptTime=2026-11-22T15:25:11", False)],
)  # fmt: skip
def test_what_was_ended_by_the_clock_goes_back_into_the_queue(tmp_path: Path, ends: int, state: str, again: bool, array: bool) -> None:
    """By bash itself, with stand-ins for SLURM's commands that say what they were asked: of an array, for the task alone."""
    programs = {
        "srun": f'"${{@:2}}"; exit {ends}',
        "scontrol": f'[ "${{@: -1}}" = {"76_3" if array else "77"} ] || exit 1; case $1 in show) echo "JobState={state} node1";; '
        f'requeue) echo "requeue $2" >> {tmp_path}/asked;; esac',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    told = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SRUN_CPUS_PER_TASK")
    says = f"import os, sys; print(*(os.environ.get(k) for k in {told}), sys.argv)"
    text = slurm.script(launcher(), [sys.executable, "-c", says, "a b=$HOME'"], str(tmp_path))
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n"}
    here |= {"SLURM_NTASKS": "16", "SLURM_NNODES": "4", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    here |= {"SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "8"} if array else {}
    done = subprocess.run(["bash"], input=text, text=True, env=here, capture_output=True)
    assert done.stdout.splitlines()[0] == f"""9 1 16 4 20077 {"8" if array else None} ['-c', "a b=$HOME'"]""", done.stderr
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


@pytest.mark.parametrize("name", ["my runs", 'a, "b" (c)', "50%", "it's", "é"])
def test_any_name_of_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Is one word for sbatch, whose % is doubled, and in the job what it was for the door."""
    asked = ["launcher=slurm", "launcher.submit=false", f"out={quoted(name)}"]
    assert call("train", asked, tmp_path, monkeypatch) in (0, None)
    said = capsys.readouterr().out
    lines = [line.removeprefix("#SBATCH --") for line in said.splitlines() if line.startswith("#SBATCH --")]
    options = dict(shlex.split(line)[0].partition("=")[::2] for line in lines)
    assert options["job-name"] == name and Path(options["output"]).parent.name == name.replace("%", "%%")
    (srun,) = (line for line in said.splitlines() if line.startswith("srun"))
    word = as_typed(shlex.split(srun)[-1])  # as the door takes it
    assert OverridesParser.create().parse_override(word).value() == name


def test_a_job_does_not_hand_itself_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment may choose the launcher; it lies in a folder of the user's own, which the job is told, too."""
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /launcher: slurm}]\ntrainer: {steps: 3}\n")
    asked = [f"--config-dir={own.parent}", "experiment=mine", "out=x"]
    assert call("train", [*asked, "launcher.submit=false"], tmp_path, monkeypatch) in (0, None)
    assert f"-m headstart.door.train --config-dir={own.parent} experiment=mine out=x\n" in capsys.readouterr().out
    ran: list[int] = []
    monkeypatch.setattr("headstart.trainers.run.run", lambda **config: ran.append(config["trainer"]["steps"]))
    monkeypatch.setenv(slurm.JOB, "1")
    assert call("train", asked, tmp_path, monkeypatch) in (0, None)
    assert ran == [3]


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that numbers what it is given; the file says what that was."""
    folder.mkdir()
    given = folder / "given"
    (folder / "sbatch").write_text(f'#!/bin/bash\necho "$2" >> {given}; wc -l < {given}\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return given


def test_a_sweep_is_handed_in_as_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One for the runs that ask for the same; each of its jobs is the script of its run."""
    given = stand_in(tmp_path / "bin", monkeypatch)
    asked = ["--multirun", "launcher=slurm", "trainer.lr=4e-3,8e-3", "launcher.nodes=1,2", "launcher.time=2:00:00", f"out={tmp_path}/sweep"]
    assert call("train", asked, tmp_path, monkeypatch) in (0, None)
    said = capsys.readouterr().out
    scripts = [Path(line) for line in given.read_text().splitlines()]
    assert len(scripts) == 2 and "jobs 1_0 to 1_1: " in said and "jobs 2_0 to 2_1: " in said
    for nodes, path in enumerate(scripts, start=1):
        text = path.read_text()
        assert f"#SBATCH --nodes={nodes}\n" in text and "#SBATCH --array=0-1\n" in text and "#SBATCH --time=2:00:00\n" in text
        jobs = re.findall(r"^'?(/.*/job\.sh)'?$", text, re.MULTILINE)
        for i, (rate, job) in enumerate(zip(("0.004", "0.008"), jobs, strict=True)):
            assert f" trainer.lr={rate} out=" in Path(job).read_text()
            Path(job).write_text("echo this is $0")
            here = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(i)}
            assert subprocess.run(["bash", str(path)], env=here, capture_output=True, text=True).stdout == f"this is {job}\n"
    assert not list((tmp_path / "sweep").glob("comparison*"))  # nothing has run yet


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


def state_of(number: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True).stdout
    return next((word.removeprefix("JobState=") for word in shown.split() if word.startswith("JobState=")), "")


def wait(seen: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + 240
    while not seen():
        assert time.monotonic() < until, log.read_text() if log.exists() else "it has not begun"
        time.sleep(0.5)


def handed_in(out: Path, *words: str, processes: int = 2) -> tuple[str, str]:
    """The number of the job, and what was said."""
    python = f"export PYTHONPATH={os.environ.get('PYTHONPATH', '')} HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_WAIT_POLICY=PASSIVE"
    job = ["launcher=slurm", f"launcher.processes={processes}", "launcher.gpus=false", f'launcher.setup=["{python}"]', f"out={out}"]
    said = subprocess.run([sys.executable, str(ROOT / "train.py"), *SMOKE, *words, *job], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return re.findall(r"^jobs? (\d+)", said.stdout, re.MULTILINE)[0], said.stdout


def trained_until(run: Path, step: int) -> Callable[[], bool]:
    return lambda: (run / FILE).exists() and any(row["step"] >= step for row in read_metrics(run))


def start_again_soon(number: str) -> None:
    """Else what was requeued waits for minutes, as a courtesy. (What has ended, or begun again, cannot.) Not in the same second: SLURM,
    which counts whole ones, would take the new start for the one that was just ended ("Job credential revoked").
    """
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now+3seconds"], capture_output=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights of two processes that were left alone."""
    out = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(ROOT / "train.py"), *SMOKE, "launcher=processes", f"out={out / 'run'}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return weights(out / "run")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by the clock", "preempted"])
def test_a_job_that_is_ended_early_is_requeued_and_ends_like_another(
    how: str, cluster: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two tasks of a real SLURM get SIGTERM in the middle, as they do before their time is over, or make way for a job that goes first; the
    weights at the end are those of two processes that were left alone.
    """
    if how == "preempted" and "urgent" not in subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True).stdout.split():
        pytest.skip("no partition 'urgent' preempts here (PreemptType=preempt/partition_prio, PreemptMode=REQUEUE)")
    number, _ = handed_in(tmp_path / "job")
    log = tmp_path / "job" / f"slurm-{number}.log"
    wait(trained_until(tmp_path / "job", 10), log)
    if how == "by the clock":
        subprocess.run(["scancel", "--signal=TERM", number], check=True)
    else:
        subprocess.run(["sbatch", "-p", "urgent", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 1"], check=True, capture_output=True)
    wait(lambda: state_of(number) in ("PENDING", "FAILED"), log)
    start_again_soon(number)
    wait(lambda: state_of(number) in ("COMPLETED", "FAILED"), log)
    assert state_of(number) == "COMPLETED" and "resuming after step" in log.read_text(), log.read_text()
    assert equal(weights(tmp_path / "job"), request.getfixturevalue("alone"))


@pytest.mark.slow
def test_runs_of_a_sweep_are_an_array_of_jobs(cluster: None, tmp_path: Path) -> None:
    """Each by itself: one is ended early and goes on; both have the weights of runs on this machine."""
    number, said = handed_in(tmp_path / "sweep", "--multirun", "trainer.lr=4e-3,8e-3", "report=none", processes=1)
    runs = [tmp_path / "sweep" / f"lr={rate}" for rate in ("4e-3", "8e-3")]
    assert all(str(run) in said for run in runs) and len(re.findall(r"^jobs? \d+", said, re.MULTILINE)) == 1
    first = tmp_path / "sweep" / f"slurm-{number}_0.log"
    wait(trained_until(runs[0], 10), first)
    subprocess.run(["scancel", "--signal=TERM", f"{number}_0"], check=True)
    wait(lambda: state_of(f"{number}_0") in ("PENDING", "COMPLETED"), first)
    start_again_soon(f"{number}_0")
    for i in range(2):
        wait(lambda i=i: state_of(f"{number}_{i}") in ("COMPLETED", "FAILED"), first)  # type: ignore[misc]
    assert "resuming after step" in first.read_text()
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *SMOKE,
        "--multirun",
        "trainer.lr=4e-3,8e-3",
        "report=none",
        f"out={tmp_path / 'here'}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for run in runs:
        assert equal(weights(run), weights(tmp_path / "here" / run.name))
