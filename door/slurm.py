"""A run as a job of a SLURM cluster: the sbatch script, and handing it in.

Every task is one process of the run, with torchrun's variables. SLURM sends SIGTERM to the tasks before their time is over; the run
then ends its step, writes a checkpoint and ends with 130, and the script puts the job back into the queue, where it resumes. Jobs that are
preempted, or lose a node, are put back by SLURM itself. A job that somebody cancels stays away.
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
TASK = (  # of each process: torchrun's names for what SLURM says (a single one is on its own)
    'if [ "$SLURM_NTASKS" -gt 1 ]; then export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS '
    'LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)); fi; exec "$@"'
)


def script(launcher: Mapping[str, Any], command: Sequence[str], out: str) -> str:
    """The text of the job that runs ``command`` in every task."""
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
        "output": f"{Path(out).absolute()}/slurm-%j.log",
        "open-mode": "append",  # one log over all stays in the queue
    }
    lines = [f"--{key}={value}" for key, value in options.items() if value is not None] + ["--requeue", *launcher["options"]]
    threads = "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}"
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in lines),
        *launcher["setup"],
        "export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        threads,
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(TASK)} task {shlex.join(command)}",
        "code=$?",
        '# 130: asked to end, with a checkpoint. By the clock, that is: of a job that was cancelled the state is another.',
        'if [ $code -eq 130 ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then',
        '    exec scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
        "",
    ])  # fmt: skip


def submit(launcher: Mapping[str, Any], command: Sequence[str], out: str) -> None:
    """Write the script into the run folder and hand it in, or print it (``launcher.submit=false``).

    Raises UserError where there is no sbatch, and with its own words where it refuses the job.
    """
    text = script(launcher, command, out)
    if not launcher["submit"]:
        print(text, end="")
        return
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm needs sbatch: run this where jobs are handed in; launcher.submit=false prints the script")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_text(folder / NAME, text)
    except OSError as e:
        raise UserError(f"out={out}: the job's script cannot be written ({e})") from e
    done = subprocess.run(["sbatch", "--parsable", str(folder / NAME)], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(re.sub(r"sbatch: (error: )?", "", done.stderr).split())
        raise UserError(f"sbatch refuses {folder / NAME}: {said}")
    job = done.stdout.strip().partition(";")[0]
    print(f"job {job}: `squeue -j {job}`, `tail -F {folder.absolute()}/slurm-{job}.log`, `scancel {job}`; the run goes to {out}")
