"""What needs no GPU to be seen: tensors that meet on two devices."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="this torch cannot pretend"),
]
MEET = """
import os, sys
from tests import pretended_gpu
pretended_gpu.pretend()
import torch
there, here = torch.ones(3, device="gpu"), torch.ones(3)
assert (there + 1).device.type == (there * torch.tensor(2.0)).device.type == there[torch.tensor([0, 2])].device.type == "gpu"
there[1:] += 1
assert there.tolist() == [1.0, 2.0, 2.0] and (there.cpu() + here).tolist() == [2.0, 3.0, 3.0]
for meet in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[torch.ones(1, dtype=torch.int64, device="gpu")]):
    try:
        meet()
    except RuntimeError as e:
        print("refused:", e)
sys.stdout.flush()
os._exit(0)
"""


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_tensors_of_two_devices_do_not_meet() -> None:
    done = ran("-c", MEET)
    assert done.returncode == 0 and done.stdout.count("refused:") == 3, done.stdout + done.stderr


def test_training_and_reports_keep_to_their_device() -> None:
    wanted = "two_steps or (tree and ((replayed_rounds and modules) or report_is_lossless)) or (llama and each_were_alone) or two_gpus"
    done = ran("-m", "tests.pretended_gpu", "tests/test_gpu.py", "-k", wanted)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
