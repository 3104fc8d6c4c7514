"""Tests of Triton's kernels on a CPU. They need triton and TRITON_INTERPRET=1, which must be set when triton is imported. If this process
lacks it, ``in_its_own`` runs a file of tests in a process that has it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.starting import LONGEST

TRITON, INTERPRETED = importlib.util.find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not (TRITON and INTERPRETED), reason="triton interpreted on a CPU: TRITON_INTERPRET=1")


def in_its_own(file: str) -> Callable[[], None]:
    """A test that runs all tests of ``file`` in a process in which kernels are interpreted."""

    @pytest.mark.skipif(not TRITON or INTERPRETED, reason="triton is not installed, or interpreted here already")
    def test() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
        env, root = os.environ | {"TRITON_INTERPRET": "1"}, Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:]

    return test
