"""A run as a job of a SLURM cluster: writes the sbatch script, and submits it.

Every task is one process of the run, with torchrun's variables. SLURM sends SIGTERM to the tasks before their time is over; the run then
ends its step, writes a checkpoint and exits with code 130, and the script requeues the job, which resumes. Jobs that are preempted, or lose
a node, are requeued by SLURM itself. A job that somebody cancels is not. The runs of a --multirun are submitted as arrays.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError
from headstart.heads.files import put_text

NAME = "job.sh"
JOB = "HEADSTART_JOB"  # set in the environment of a job, which must not submit itself again
TASK = (  # run in each task: sets torchrun's variables from SLURM's (not for a single task)
    'if [ "$SLURM_NTASKS" -gt 1 ]; then export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS '
    'LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)); fi; [ "$SLURM_PROCID" -eq 0 ] && exec "$@"; '
    # When rank 0 has ended, srun ends the other tasks; their exit codes must not hide rank 0's.
    'trap : TERM; "$@"; code=$?; [ $code -eq 143 ] || exit $code'
)


def script(launcher: Mapping[str, Any], command: Sequence[str], out: str) -> str:
    """The text of the job that runs ``command`` in every task."""
    return "\n".join([
        "#!/bin/bash",
        *_header(launcher, out, "slurm-%j.log"),
        *launcher["setup"],
        "export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        f"export {JOB}=1 OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}",
        '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun no longer takes over by itself',
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(TASK)} task {shlex.join(command)}",
        "code=$?",
        "# 130: the run was asked to end, and wrote a checkpoint. A cancelled job is not RUNNING here, and is not requeued.",
        "# 143: ended while it was loading, to make way for a job that goes first.",
        "# In an array, name this task: SLURM_JOB_ID of the last task is also the number of the whole array.",
        'job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}',
        'state=$(scontrol show job "$job")',
        'again=$code; [ $code -eq 143 ] && [[ $state =~ PreemptTime=[0-9] ]] && again=130',
        'if [ $again -eq 130 ] && [[ $state == *JobState=RUNNING* ]]; then',
        '    exec scontrol requeue "$job"',
        "fi",
        "exit $code",
        "",
    ])  # fmt: skip


def _header(launcher: Mapping[str, Any], out: str, log: str, *more: str) -> list[str]:
    """The #SBATCH lines of a script."""
    options = {
        "job-name": Path(out).name,
        "nodes": launcher["nodes"],
        "ntasks-per-node": launcher["processes"],
        "gpus-per-node": launcher["processes"] if launcher["gpus"] else None,
        "cpus-per-task": launcher["cpus"],
        "time": launcher["time"],
        "partition": launcher["partition"],
        "account": launcher["account"],
        "signal": f"TERM@{launcher['before']}",
        "output": f"{str(Path(out).absolute()).replace('%', '%%')}/{log}",
        "open-mode": "append",  # one log, however often the job is requeued
    }
    lines = [f"--{key}={_word(str(value))}" for key, value in options.items() if value is not None]
    return [f"#SBATCH {line}" for line in (*lines, "--requeue", *more, *launcher["options"])]


def _word(value: str) -> str:
    """A value quoted for sbatch, for which a word ends at a space."""
    return value if re.fullmatch(r"[\w./:@%+=,-]+", value) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def submit(launcher: Mapping[str, Any], command: Sequence[str], out: str, *, later: bool = False) -> None:
    """Write the script into the run folder and submit it (``later``: only write it, ``submit_all`` submits it), or print it
    (``launcher.submit=false``).

    Raises UserError where there is no sbatch, and with sbatch's own words where it refuses the job.
    """
    text = script(launcher, command, out)
    if not launcher["submit"]:
        print(text, end="")
        return
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm needs sbatch: run this where jobs are handed in; launcher.submit=false prints the script")
    _put(Path(out) / NAME, text)
    if not later:
        job = _sbatch(Path(out) / NAME)
        log = shlex.quote(f"{Path(out).absolute()}/slurm-{job}.log")
        print(f"job {job}: `squeue -j {job}`, `tail -F {log}`, `scancel {job}`; the run goes to {out}")


def submit_all(runs: Sequence[tuple[Mapping[str, Any], str]], folder: Path) -> None:
    """Submit the runs (launcher and out) of a --multirun, whose scripts are written, as job arrays: one for all runs with equal headers."""
    arrays: dict[str, list[str]] = {}
    for launcher, out in runs:
        arrays.setdefault("\n".join(_header(launcher, str(folder), "slurm-%A_%a.log")), []).append(out)
    for i, (header, outs) in enumerate(arrays.items()):
        jobs = "\n".join(shlex.quote(f"{Path(out).absolute()}/{NAME}") for out in outs)
        path = folder / f"jobs-{i}.sh"
        array = f"#SBATCH --array=0-{len(outs) - 1}"
        _put(path, f'#!/bin/bash\n{header}\n{array}\njobs=(\n{jobs}\n)\nexec bash "${{jobs[$SLURM_ARRAY_TASK_ID]}}"\n')
        job = _sbatch(path)
        logs = shlex.quote(f"{folder.absolute()}/slurm-{job}_") + "*.log"
        print(
            f"jobs {job}_0 to {job}_{len(outs) - 1}: `squeue -j {job}`, `tail -F {logs}`, `scancel {job}`; the runs go to {', '.join(outs)}"
        )


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_text(path, text)
    except OSError as e:
        raise UserError(f"out={path.parent}: the job's script cannot be written ({e})") from e


def _sbatch(path: Path) -> str:
    """Submit a script; returns the number of the job. Raises UserError where sbatch refuses it."""
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(re.sub(r"sbatch: (error: )?", "", done.stderr).split())
        raise UserError(f"sbatch refuses {path}: {said}")
    return done.stdout.strip().partition(";")[0]
