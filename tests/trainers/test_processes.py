"""Several processes of a run end together, however one of them ends: soon, with one line, and without a hang."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.door.launch import free_port
from headstart.heads.errors import UserError
from headstart.trainers import checkpoint
from headstart.trainers.interrupt import AFTER
from headstart.trainers.processes import open_accelerator, together
from tests.starting import LONGEST
from tests.trainers.conftest import ROOT, TORCHRUN, save_target
from tests.trainers.two_endings import WAYS

LOST = "error (process 0): another process of this run has ended: if it left a message, that says why\n"
CODES = {
    "the second fails": [2, 1],
    "the second is killed": [2, -9],
    "the second sleeps": [2, 2],
    "the first refuses": [2, 2],
    "both refuse an arm": [130, 130],  # the other arm is trained to the end
    "the first refuses an arm": [2, 2],
    "both are stopped": [130, 130],
    "both are stopped twice": [130, 130],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, port = tmp_path_factory.mktemp("ends"), free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.trainers.two_endings"]
    both = [subprocess.Popen([*command, str(rank), str(port), str(folder)], cwd=ROOT, env=environment) for rank in (0, 1)]
    try:
        assert [process.wait(timeout=800) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_end_when_one_does(way: str, ended: Path) -> None:
    assert [json.loads((ended / f"left-{rank}.json").read_text())[way] for rank in (0, 1)] == CODES[way]
    folder = ended / str(list(WAYS).index(way))
    first, second = ((folder / f"err-{rank}").read_text() for rank in (0, 1))
    assert "Traceback" not in first and ("Traceback" in second) == (way == "the second fails")  # a bug is not hidden
    saved = [checkpoint.step_of(p) for p in checkpoint.folders(folder / "run")]
    other = checkpoint.folders(folder / "other")
    if way == "both refuse an arm":
        assert (first, second, saved, checkpoint.step_of(other[-1])) == ("", "", [3], 8)
    elif way == "the second sleeps":
        said, who = (first + second).splitlines(), r"process 1 \(\S+, pid \d+\) at step 4, target, two_endings\.py:\d+ <lambda>"
        stuck = r"error: nothing has moved for 6 seconds \(trainer\.timeout\): the others wait for it: "
        if any(re.fullmatch(f"{stuck}process 0, which does not answer any more", line) for line in said):
            # the second looked only when the first had said it and gone: torch notes on stderr that its store has
            said = ["", *(line for line in said if re.fullmatch(stuck + who, line))]
        (line,) = said[1:]
        assert re.fullmatch(stuck + who, line)
        assert saved == [3]
    elif "stopped" in way:
        assert (first.strip(), second) == (AFTER, "") and saved == ([3, 4] if way == "both are stopped" else [3])
    else:
        assert first == ("error (process 0): the fourth batch is not to its taste\n" if way.startswith("the first") else LOST)
        assert second == "" or way == "the second fails"
        assert saved == [3]


def test_the_drafter_is_trained_where_its_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for; that tensors get there, a machine with two GPUs shows."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    second = torch.device("cuda:1")
    assert open_accelerator("fp32", second).device == second and current == [second]
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ
    assert open_accelerator("fp32", torch.device("cpu")).device.type == "cpu" and current == [second]


def test_one_gpu_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match=r"target.device=cuda:1 is .* 2 processes: take auto"):
        open_accelerator("fp32", torch.device("cuda:1"))


@pytest.mark.parametrize(("device", "how"), [
    (torch.device("cuda:1"), {"backend": "nccl", "device_id": torch.device("cuda:1")}),
    (torch.device("cpu"), {"backend": "gloo"}),
])  # fmt: skip
def test_the_group_of_the_processes_is_bound_to_their_gpus(
    device: torch.device, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then NCCL has one communicator, made when they meet. Otherwise the first checkpoint would make one for each pair of processes."""
    asked: list[dict[str, Any]] = []

    def met(**given: Any) -> None:
        asked.append(given)
        raise InterruptedError

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **given: met(**given))
    with pytest.raises(InterruptedError):
        open_accelerator("fp32", device, 5000.0)
    shared = {"init_method": "headstart://", "timeout": timedelta(seconds=10000)}
    assert asked == [how | shared]


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "NCCL error\nncclSystemError: ... \nLast error:\n/dev/shm/nccl-x, error: No space left",
            r"together: NCCL .*/nccl-x, error: No space",
        ),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12", "another process of this run has ended"),
        ("NCCL error\nncclRemoteError: a remote process exited", "another process of this run has ended"),
    ],
)
def test_what_fails_here_is_said_here(rank: str, error: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that knows it; that another one has ended, the first says for all."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    silent = says.startswith("another") and rank != "0"
    with pytest.raises(SystemExit if silent else UserError, match="2" if silent else says), together():
        raise torch.distributed.DistBackendError(error)


@pytest.mark.slow
def test_one_that_never_comes_is_not_waited_for_silently(tmp_path: Path) -> None:
    """Of two processes the second was not started."""
    code = "import torch\nfrom headstart.trainers import processes\nprocesses.LONGEST = 1.0\n"
    code += "try: processes.open_accelerator('fp32', torch.device('cpu'))\nexcept processes.UserError as e: print(e)"
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | world, capture_output=True, text=True, timeout=LONGEST)
    says = rf"2 processes were to meet at 127\.0\.0\.1:{world['MASTER_PORT']}, and not all came in 0:00:01 \(1/2 clients joined\)\n"
    assert re.fullmatch(says, done.stdout), done.stdout + done.stderr


@pytest.mark.slow
def test_the_same_processes_meet_again_for_the_next_run(tmp_path: Path) -> None:
    """Under one torchrun, whose store lives on; the first process comes late, as it does where it reports."""
    (tmp_path / "twice.py").write_text(
        "import os, time, torch\nfrom headstart.trainers.processes import leave, open_accelerator\n"
        "for run in range(3):\n"
        "    time.sleep(2 * (os.environ['RANK'] == '0'))\n"
        "    accelerator = open_accelerator('fp32', torch.device('cpu'))\n"
        "    assert accelerator.reduce(torch.tensor(1.0 + run), 'sum') == 2 + 2 * run\n"
        "    leave(accelerator, [])\n"
    )
    command = [*TORCHRUN, "--nproc-per-node", "2", str(tmp_path / "twice.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_processes_that_share_a_target_meet_again_after_a_restart(tmp_path: Path) -> None:
    """The second one dies, torchrun starts both again with the same store, and the first one comes late: its old address is in there."""
    folder, script = save_target(tmp_path / "target"), tmp_path / "again.py"
    script.write_text(
        "import os, time, torch, transformers\nfrom headstart.inference.decoding.target import Target\n"
        "rank, restarts = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "time.sleep(8 * (restarts == '1' and rank == '0'))\n"
        f"Target.load({str(folder)!r}, device='fsdp')\n"
        "if restarts == '0':\n"
        "    time.sleep(100 * (rank == '0'))\n"
        "    os._exit(1)\n"
        "print('loaded again')\n"
    )
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0 and done.stdout.count("loaded again") == 2, done.stdout + done.stderr[-3000:]
