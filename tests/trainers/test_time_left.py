"""The lines of a training in a log file."""

import pytest

from headstart.trainers import progress
from headstart.trainers.progress import Progress


def test_the_time_left_goes_by_the_later_half(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress(40, show=True) as shown:
        for step in range(1, 41):
            now += 60 if step <= 10 else 10  # seconds: an epoch that is captured, then those that are read again
            if step in (1, 10, 20, 30, 40):
                shown.numbers(step, "loss 1.0", {})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.rpartition("loss 1.0")[2].strip() for line in lines] == ["", "0:30:00 left", "0:03:20 left", "0:01:40 left", ""]
