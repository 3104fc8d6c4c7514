"""What a killed process leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FORKS = """
import os, time
from contextlib import nullcontext
os.register_at_fork(after_in_child=lambda: time.sleep({late}))
from headstart.heads.parent import forks_end_with_it
with {inside}():
    child = os.fork() or (time.sleep(60), os._exit(0))
late = os.fork() or (time.sleep(60), os._exit(0))
print(child, late, flush=True)
time.sleep(60)
"""


def alive(process: int) -> bool:
    """Not a zombie that nobody has waited for either."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not end children with their parents")
@pytest.mark.parametrize(("inside", "late"), [("forks_end_with_it", 0.0), ("forks_end_with_it", 0.5), ("nullcontext", 0.0)])
def test_what_is_forked_inside_ends_with_its_parent(inside: str, late: float) -> None:
    """Also where the parent was killed before the system was asked for that: ``late`` seconds after the fork."""
    process = subprocess.Popen([sys.executable, "-c", FORKS.format(inside=inside, late=late)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, outside = map(int, process.stdout.readline().split())
    try:
        assert alive(child) and alive(outside)
        process.kill()
        process.wait()
        for _ in range(100 if inside == "forks_end_with_it" else 5):
            time.sleep(0.05)
            if not alive(child):
                break
        assert alive(child) == (inside == "nullcontext") and alive(outside)  # what is forked behind it goes on
    finally:
        for left in (child, outside):
            if alive(left):
                os.kill(left, 9)
