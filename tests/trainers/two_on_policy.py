"""Run by torchrun from test_on_policy.py: an on-policy arm, trained at once and in two halves. The results are left in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from headstart.trainers import checkpoint
from headstart.trainers.processes import leave, open_accelerator
from tests.tiny_targets import tiny_target
from tests.trainers.small import group_threads
from tests.trainers.test_on_policy import REJECTED, arm_of, trained


def main(name: str, out: Path) -> None:
    torch.set_num_threads(1)
    accelerator, target = open_accelerator("fp32", torch.device("cpu")), tiny_target()
    for part in ("at_once", "again"):
        arm = arm_of(name, target, out / part, REJECTED)
        trained([arm], target, accelerator, keep=9)
        if part == "again":  # lose the last checkpoint, and go on from step 3, between two collections
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                checkpoint.remove(checkpoint.folders(out / part)[-1])
            accelerator.wait_for_everyone()
            arm = arm_of(name, target, out / part, REJECTED)
            trained([arm], target, accelerator, keep=9)
        assert arm.on_policy is not None and arm.on_policy.kept is not None
        weights = {k: v.contiguous().clone() for k, v in arm.drafter.state_dict().items()}
        save_file(weights | {"rows": arm.on_policy.kept["tokens"]}, out / f"{part}-{accelerator.process_index}")
    leave(accelerator, [arm])
    assert not group_threads()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
