"""Several processes of a run: signals reach each once, none outlives the others, and what is wrong is said once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headstart.door import launch as launching
from headstart.door.arguments import ERRORS, end
from headstart.door.launch import launch
from tests.doors import ROOT, call
from tests.starting import LONGEST

Launched = Callable[..., int]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """``launched(script, *signals)``: of three shells that run the script; the launcher gets the signals when all stand at ``ready``."""
    monkeypatch.setattr(launching, "POLL", 0.01)
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(script: str, *signals: int) -> int:
        def send() -> None:
            for number in signals:
                stand = time.monotonic() + 60
                while len(list(tmp_path.glob("ready-*"))) < 3 and time.monotonic() < stand:
                    time.sleep(0.01)
                for path in tmp_path.glob("ready-*"):
                    path.unlink()
                os.kill(os.getpid(), number)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return launch(["bash", "-c", f'ready() {{ touch "$OUT/ready-$RANK"; }}\n{script}'], 3)
        finally:
            sender.join()

    return run


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """Signals that end a process, whatever these tests were started by: nohup has them ignore SIGHUP. (Shells cannot trap what they were
    started to ignore, nor hear what was blocked.)
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [*before, signal.SIGINT])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


FOREVER = "ready; while :; do sleep 0.02; done"


def counted(folder: Path) -> list[str]:
    return [(folder / f"got-{rank}").read_text() for rank in range(3)]


@pytest.mark.parametrize("sent, heard", [("INT", "INT"), ("TERM", "TERM"), ("HUP", "TERM")])
def test_a_signal_reaches_each_once(sent: str, heard: str, launched: Launched, tmp_path: Path) -> None:
    traps = "\n".join(f"trap 'printf {name} >> \"$OUT/got-$RANK\"; sleep 0.1; exit 130' {name}" for name in ("INT", "TERM", "HUP"))
    before = signal.getsignal(signal.SIGINT)
    assert launched(f"{traps}\n{FOREVER}", getattr(signal, f"SIG{sent}")) == 130
    assert counted(tmp_path) == [heard] * 3 and signal.getsignal(signal.SIGINT) is before


def test_each_is_in_a_session_of_its_own(launched: Launched, tmp_path: Path) -> None:
    """So a terminal's Ctrl-C, which goes to a whole group of processes, reaches it through the launcher alone."""
    assert launched('[ "$(cut -d" " -f6 /proc/$$/stat)" = $$ ] || exit 1') == 0  # its session, without the program ps


def test_a_second_and_a_third_ctrl_c_are_passed_on_too_and_then_it_ends(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even what hears nothing. Until then nobody is in a haste: a checkpoint may be on its way."""
    monkeypatch.setattr(launching, "PATIENCE", 1.0)
    deaf = "trap 'printf . >> \"$OUT/got-$RANK\"; ready' INT"
    assert launched(f"{deaf}\n{FOREVER}", signal.SIGINT, signal.SIGINT, signal.SIGINT) == 130
    assert counted(tmp_path) == ["..."] * 3


def test_an_ignored_signal_stays_ignored(launched: Launched) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        assert launched("ready; sleep 0.2", signal.SIGHUP) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "script, code",
    [
        pytest.param('[ $RANK = 1 ] && exit 3; trap "exit 1" TERM; ' + FOREVER, 3, marks=pytest.mark.slow),  # the others are told
        ('[ $RANK = 1 ] && exit 3; trap "" TERM; ' + FOREVER, 3),  # and killed where they do not listen
        ('[ $RANK = 2 ] && kill -KILL $$; trap "" TERM; ' + FOREVER, 137),
        ('[ $RANK = 0 ] && exit 0; trap "" TERM; ' + FOREVER, 0),  # the first has done everything when it ends
    ],
)
def test_none_outlives_the_others(
    script: str, code: int, launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "PATIENCE", 1.0)
    monkeypatch.setattr(launching, "LAST", 1.0)
    started = list[subprocess.Popen[bytes]]()
    wait = launching._wait
    monkeypatch.setattr(launching, "_wait", lambda children, signals: started.extend(children) or wait(children, signals))
    assert launched(script) == code
    assert len(started) == 3 and all(child.returncode is not None for child in started)
    killed = "processes 1, 2 were killed, 1 seconds after process 0 had ended: what they were writing may be incomplete\n"
    assert capsys.readouterr().err == ("" if code else killed)


def test_what_others_still_write_when_the_first_has_ended_is_waited_for(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last shard of a capture, for example: that takes longer than a process that hangs is given."""
    monkeypatch.setattr(launching, "PATIENCE", 0.1)
    assert launched("[ $RANK = 0 ] || { sleep 0.5; touch $OUT/written-$RANK; }") == 0
    assert len(list(tmp_path.glob("written-*"))) == 2 and capsys.readouterr().err == ""


def test_the_one_that_writes_what_was_trained_is_waited_for(launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C the others go; the first waits for its disk, longer than one waits for the hung."""
    monkeypatch.setattr(launching, "PATIENCE", 0.1)
    script = f'trap "[ $RANK = 0 ] || exit 0; sleep 0.5; touch $OUT/written; exit 130" INT; {FOREVER}'
    assert launched(script, signal.SIGINT) == 130
    assert (tmp_path / "written").is_file()


def test_where_the_launcher_is_killed_none_goes_on(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("prctl is Linux'")
    script = f'trap \'touch "{tmp_path}/told-$RANK"; exit 1\' TERM; touch "{tmp_path}/ready-$RANK"; while :; do sleep 0.02; done'
    code = f"from headstart.door.launch import launch; launch(['bash', '-c', {script!r}], 2)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
    while len(list(tmp_path.glob("told-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(list(tmp_path.glob("told-*"))) == 2


# ---- what is said ----


def test_what_several_say_is_said_once(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    tell = f'tell() {{ printf \'[%d, "%s"]\\n\' $RANK "$1" >&${ERRORS}; }}\n'
    all_deaf = "trap '' TERM; ready; until [ -f $OUT/ready-0 ] && [ -f $OUT/ready-1 ] && [ -f $OUT/ready-2 ]; do sleep 0.02; done"
    mine_first = "if [ $RANK = 2 ]; then tell mine; touch $OUT/told; fi; until [ -f $OUT/told ]; do sleep 0.02; done"
    assert launched(f"{tell} {all_deaf}; {mine_first}; tell ours; [ $RANK = 0 ] || tell theirs; exit 2") == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["error (process 2): mine", "error: ours", "error (processes 1, 2): theirs"]


def test_a_door_leaves_it_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "errors").open("wb+") as errors:
        monkeypatch.setenv(ERRORS, str(errors.fileno()))
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(SystemExit) as ended:
                end("one\ntwo")
            assert ended.value.code == 2 and capsys.readouterr().err == ""
        launching._say(errors)
        assert capsys.readouterr().err == "error: one\nerror: two\n"
    with pytest.raises(SystemExit):
        end("its file is closed")  # the launcher has gone
    assert capsys.readouterr().err == "error (process 1): its file is closed\n"


@pytest.mark.parametrize("rank, said", [("0", "interrupted\n"), ("1", "")])
def test_one_of_several_says_that_it_was_interrupted(
    rank: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.door.train.main", stop)
    monkeypatch.setenv("RANK", rank)
    assert call("train", [], tmp_path, monkeypatch) == 130 and capsys.readouterr().err == said


def test_what_the_launcher_returns_is_the_doors_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for code in (0, 130, 137):
        monkeypatch.setattr("headstart.door.train.launch", lambda command, processes, code=code: code)
        assert call("train", ["launcher=processes"], tmp_path, monkeypatch) == code


MASKED = """
import runpy, signal, sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import ConfigCompositionException

def load(*_, **__):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ConfigCompositionException from None  # as OmegaConf's own clean-up does

ConfigLoaderImpl.load_configuration = load
sys.argv = ["train.py"]
runpy.run_path("train.py", run_name="__main__")
"""


def test_ctrl_c_while_settings_are_composed() -> None:
    done = subprocess.run([sys.executable, "-c", MASKED], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_is_usual_again_when_a_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr("headstart.door.train.main", lambda config: found.append(signal.getsignal(signal.SIGINT)))
    monkeypatch.setattr("headstart.door.train.compare_runs", lambda *_: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert call("train", [], tmp_path, monkeypatch) == 0
        assert call("train", ["--multirun", "trainer.seed=1,2"], tmp_path, monkeypatch) == 0
        assert found == [signal.default_int_handler] * 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["a weak reference", "an object", "both"])
def test_ctrl_c_where_nothing_can_be_raised_is_heard(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints "Exception ignored in" there, and goes on."""
    gone: list[object] = []

    class Thing:
        def __del__(self) -> None:
            if how != "a weak reference":
                signal.raise_signal(signal.SIGINT)

    def callback(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def run(*_: object) -> None:
        thing = Thing()
        if how != "an object":
            gone.append(weakref.ref(thing, callback))
        del thing
        time.sleep(1)
        raise AssertionError("nobody has heard it")

    monkeypatch.setattr("headstart.door.train.main", run)
    hook = sys.unraisablehook
    assert call("train", [], tmp_path, monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted\n" and sys.unraisablehook is hook


@pytest.mark.parametrize("name", ["hydra", "omegaconf", "pydantic"])
@pytest.mark.parametrize("door", ["train.py", "inference/__main__.py"])
def test_ctrl_c_while_the_door_itself_is_imported(name: str, door: str) -> None:
    """A third of a second in which there is nobody to catch it."""
    code = f"""
import runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_path({door!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
