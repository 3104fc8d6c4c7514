"""The adversary finds nothing, and would: a few of its attacks on what there is, and on doors that were made worse."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adversary, faults
from benchmarks.attacks import doors, folders, killing, runs
from benchmarks.attacks.outcome import TRACE, Called, Outcome, judged
from benchmarks.attacks.world import World, build, equal, weights
from headstart.data.index import open_file


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("adversary"))


def came(found: Iterator[Outcome]) -> set[str]:
    """Of some attacks; what is found is shown."""
    outcomes = list(found)
    assert outcomes
    for outcome in outcomes:
        print(outcome.came, outcome.name, outcome.said)
    return {outcome.came for outcome in outcomes}


def attacks(world: World) -> dict[str, Iterator[Outcome]]:
    """A few, of every kind but for commands that take long to start."""
    return {
        "lines": doors.lines(world, every=144),
        "names": islice(doors.names(world, every=70), 4),
        "files": doors.files(world, every=90),
        "folders": doors.inside(world, every=250),
        "typed": doors.typed(world, every=8),
        "requests": doors.sent(world, every=25),
        "kills": runs.kills(world, count=1, seed=1),
        "disks": runs.full(world, count=1, seed=1),
        "checkpoints": folders.checkpoints(world, every=80, seed=1),
        "speculators": folders.speculators(world, every=9, seed=1),
        "shards": folders.shards(world, every=20, seed=1),
    }


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


DEAR = ("kills", "disks", "lines", "checkpoints", "folders")


@pytest.mark.parametrize("kind", [slow(kind) if kind in DEAR else kind for kind in attacks(World(Path()))])
def test_it_finds_nothing(kind: str, world: World) -> None:
    assert came(attacks(world)[kind]) <= {"refused", "same", "runs"}


# ---- and would find ----


def until(finds: str, found: Generator[Outcome, None, None]) -> Iterator[Outcome]:
    """Up to the first that has come to this: the clock decides where a run is killed."""
    with closing(found):
        for outcome in found:
            yield outcome
            if outcome.came == finds:
                return


def unhashed(folder: Any, index: Any, file: Any, digest: bool = True) -> Any:
    """A file of captured states that is held against nothing."""
    return open_file(folder, index, file, digest=False)


def broken(*_: Any, **__: Any) -> Any:
    return 1 // 0


@pytest.mark.parametrize(
    ("kind", "place", "worse", "finds"),
    [
        slow("lines", "headstart.door.train.check_places", broken, "traceback"),
        slow("lines", "headstart.door.frame.DOORS", {}, "traceback"),
        ("speculators", "headstart.heads.seal._check_digests", lambda *_: None, "silent"),
        slow("checkpoints", "headstart.trainers.checkpoint.check_files", lambda *_: None, "silent"),
        slow("shards", "headstart.data.shards.open_file", unhashed, "silent"),
        slow("kills", "headstart.trainers.arm.resumable", lambda *_: None, "lost"),
    ],
)
def test_it_finds_what_is_worse(kind: str, place: str, worse: Any, finds: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"checkpoints": folders.checkpoints(world, every=10, seed=1), "shards": folders.shards(world, every=1, seed=1),
            "kills": until(finds, runs.kills(world, count=10, seed=2)), "lines": doors.lines(world, every=11)}  # fmt: skip
    monkeypatch.setattr(place, worse)
    assert finds in came((attacks(world) | more)[kind])


def test_what_a_refusal_is() -> None:
    assert judged(Called(2, "", "error: out='' must be a path\n"), "out") == "refused"
    assert judged(Called(2, "", "error: out='' must be a path\n"), "lr") == "traceback"  # it does not say what is wrong
    assert judged(Called(2, "", "")) == judged(Called(1, "", "error: x\n")) == judged(Called(2, "", "error: " + "x" * 3000)) == "traceback"
    assert judged(Called(0, "done\n", "")) == "runs"
    assert judged(Called(0, "Traceback (most recent call last)\n", "")) == "traceback"


def test_it_is_no_root_among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "a").chmod(0)

    def reads(world: World) -> Iterator[Outcome]:
        with pytest.raises(PermissionError):
            (world.folder / "a").read_text()
        yield Outcome("a", "refused")

    monkeypatch.setattr(adversary, "build", World)
    monkeypatch.setattr(adversary, "sections", lambda quick: {"it": reads})
    assert [*adversary.tried(["it"], True, tmp_path)] == [("it", Outcome("a", "refused")), ("it", None)]


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"one": [Outcome("a", "refused"), Outcome("b", "silent", "it said")], "two": [Outcome("c", "same"), Outcome("d", "lost")]}

    def few(only: list[str], quick: bool, scratch: Path, jobs: int) -> Iterator[tuple[str, Outcome | None]]:
        for name, outcomes in made.items():
            yield from ((name, outcome) for outcome in outcomes)
            yield name, None

    monkeypatch.setattr(adversary, "side_by_side", few)
    assert adversary.main(["--out", str(tmp_path / "it.json")]) == 1
    found = json.loads((tmp_path / "it.json").read_text())
    assert [found[key] for key in ("tried", "tracebacks", "silent", "lost")] == [4, 0, 1, 1] and len(found["commit"]) >= 7
    assert found["sections"] == {"one": {"tried": 2, "refused": 1, "silent": 1}, "two": {"tried": 2, "lost": 1, "same": 1}}
    assert [(each["section"], each["name"], each["came"]) for each in found["failures"]] == [("one", "b", "silent"), ("two", "d", "lost")]
    made = {"one": [Outcome("a", "refused")]}
    assert adversary.main(["--quick"]) == 0 and '"tried": 1' in capsys.readouterr().out


def test_it_tries_enough() -> None:
    """What the whole table must have at least, counted without trying it."""
    names = len(doors.NAMES) * len(doors.places(World(Path()), "a"))
    files = (len(doors.TEXTS) + len(doors.THINGS)) * len(doors.readers(World(Path()), Path("a")))
    assert len(doors.HOSTILE) + names + files >= 250
    sections = adversary.sections(quick=False)
    assert sections["kills"].keywords["count"] + sections["commands killed"].keywords["count"] >= 20  # type: ignore[attr-defined]
    assert len(folders.MUTATIONS) >= 40 and all(part.keywords.get("every", 1) == 1 for part in sections.values())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_kills_cost_nothing_and_it_would_be_seen(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of ``benchmarks/faults.py``, and one that takes everything for another."""
    out = tmp_path / "faults.json"
    monkeypatch.setattr(faults, "build", lambda _: World(tmp_path / "world"))
    (tmp_path / "world").symlink_to(world.folder)
    assert faults.main(["--kills", "3", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (
        found["kills"] >= 3 and found["lost"] == 0 and found["bit_equal"] and sum(row["kills"] for row in found["rows"]) == found["kills"]
    )
    monkeypatch.setattr(killing.Thing, "same", lambda *_: False)
    assert faults.main(["--kills", "1", "--out", str(out)]) == 1 and json.loads(out.read_text())["lost"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("door", ["train", "data"])
def test_a_disk_that_is_full_for_one_of_two_processes(door: str, rank: int, world: World, tmp_path: Path) -> None:
    """It says so in a line, all end, and with the same command both go on to what one process alone makes."""
    out = tmp_path / "out"
    words = world.run(out, "report=none") if door == "train" else world.shards(out)
    ended = killing.started(door, words, tmp_path, 2, before={rank: partial(runs.refuse, 2, out)})
    lines = re.findall(r"error(?: \(process \d\))?: .*", ended.said)  # maybe behind the bar of one that was ended
    assert TRACE not in ended.said and {*ended.codes} <= {*killing.ENDS}, ended
    if door == "data":
        assert ended.codes[rank] == 2 and len(lines) == 1 and "No space left on device" in lines[0], ended
    elif rank:  # which writes nothing
        assert ended.codes == [0, 0] and not lines, ended
    else:
        assert ended.codes[0] == 2 and "No space left on device" in " ".join(ended.said.split()) and len(lines) == 1, ended
    again = killing.started(door, words, tmp_path, 2)
    assert again.codes == [0, 0] and not killing.left_over(out), again
    if door == "data":
        files = [{path.name: path.read_bytes() for path in place.iterdir()} for place in (out, world.folder / "shards")]
        assert files[0] == files[1]
    else:
        assert killing.started(door, world.run(tmp_path / "whole", "report=none"), tmp_path, 2).codes == [0, 0]
        assert equal(weights(out), weights(tmp_path / "whole"))
