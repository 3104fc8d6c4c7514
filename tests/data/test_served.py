"""A target that a server reads for says what it says in this process; and what a server may do wrong is told in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from headstart.data import endpoint, engine, served
from headstart.data.live import look
from headstart.data.pack import pack
from headstart.data.packed import Document, Packed
from headstart.data.served import ServedTarget, open_served
from headstart.heads import native_flash
from headstart.heads.errors import UserError
from headstart.inference.decoding.layerwise import every_state
from headstart.inference.decoding.probe import apart, rounding
from headstart.inference.settings import open_target
from tests.fake_engine import FakeEngine, Written, serving
from tests.trainers.conftest import save_target

LAYERS, LENGTH = (1, 3, 4), 64  # of a target of four layers


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST", 0.001)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its norms scale, so that a state behind two of them is not that behind one."""
    folder = save_target(tmp_path_factory.mktemp("target"))
    tensors = load_file(folder / "model.safetensors")
    for i, name in enumerate(name for name in sorted(tensors) if "norm" in name):
        tensors[name] = torch.rand(tensors[name].shape, generator=torch.Generator().manual_seed(i)) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def states(tmp_path: Path) -> Path:
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


@pytest.fixture
def server(model: Path, states: Path) -> FakeEngine:
    return FakeEngine(model, states, LAYERS)


Opened = Callable[..., ServedTarget]


@pytest.fixture
def opened(model: Path, states: Path, server: FakeEngine) -> Iterator[Opened]:
    """``opened(taps)``: the target of that server; ``expect`` is said."""
    targets = list[ServedTarget]()

    def open_it(taps: Collection[int] = (1, 3), length: int = LENGTH, **more: Any) -> ServedTarget:
        settings = {"url": url, "folder": str(states), "layers": None, "key": None, "retries": 2, **more}
        targets.append(open_served(where(model), settings))
        targets[-1].expect(taps, length)
        return targets[-1]

    with serving(server.app) as url:
        yield open_it
        for target in targets:
            target.close()


def where(model: Path) -> dict[str, Any]:
    return {"name": "toy", "path": str(model), "dtype": "float32", "device": "cpu", "attention": "sdpa", "config": None}


@pytest.fixture(scope="module")
def rows() -> Packed:
    """Of several documents each, and some padding."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 320, size).astype(np.int32) for size in (64, 30, 20, 9, 41, 8, 12, 50, 33)]
    return pack([Document(tokens, np.ones(len(tokens), dtype=np.bool_)) for tokens in documents], LENGTH)


# ---- what it says ----


def test_its_states_are_those_of_the_target_in_this_process(
    opened: Opened, model: Path, states: Path, rows: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer that is asked for, the last one among them; and nothing is left in the folder."""
    monkeypatch.setattr(native_flash, "takes", lambda q: False)  # transformers' attention here too, which rounds as the engine's
    here, batch = open_target(where(model)), rows.batch(slice(0, 4))
    assert (batch.documents_BT.max(dim=1).values >= 1).any() and rows.padding
    for taps in ((1, 3), (3, 4), ()):
        found, wanted = (look(batch, target, taps) for target in (opened(taps, layers=LAYERS), here))
        assert found.states.keys() == wanted.states.keys() == {*taps}
        for k in taps:
            torch.testing.assert_close(found.states[k], wanted.states[k], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.final_BTD, wanted.final_BTD, rtol=0, atol=1e-5)
    assert list(states.iterdir()) == []


def test_what_it_is_are_its_files(opened: Opened, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, here = opened(), open_target(where(model))
    assert there.fingerprint == here.fingerprint and there.layers == LAYERS
    assert "layers [1, 3, 4]: " in capsys.readouterr().out.splitlines()[-1]


def test_the_next_batch_is_asked_for_ahead(opened: Opened, server: FakeEngine, rows: Packed) -> None:
    """And not twice."""
    target = opened()
    first, second = rows.batch([0]), rows.batch([1])
    before = server.count
    documents = [len(set(batch.documents_BT[0].tolist())) for batch in (first, second)]
    for batch in (first, second):
        target.begin(batch.tokens_BT, batch.positions_BT)
    for batch in (first, second):
        look(batch, target, (1, 3))
    assert server.count - before == sum(documents)


def test_another_process_does_not_read_the_weights(opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    opened()
    assert "by the weights" not in capsys.readouterr().out


# ---- what is refused at the start ----


def other_layers(server: FakeEngine) -> None:
    server.layers = (1, 2, 4)


def no_last_layer(server: FakeEngine) -> None:
    server.layers = (1, 2, 3)


def behind_the_norm(server: FakeEngine) -> None:
    states = server.states
    server.states = lambda tokens: (normed(server, states(tokens)[0]), states(tokens)[1])  # type: ignore[method-assign]


def normed(server: FakeEngine, states: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([states[:, :-1], server.model.model.norm(states[:, -1:])], dim=1)


def slightly_trained(server: FakeEngine) -> None:
    """One matrix of one layer: the next tokens may well be the same."""
    with torch.no_grad():
        server.model.model.layers[0].mlp.down_proj.weight.mul_(1.02)


def another_model(server: FakeEngine) -> None:
    with torch.no_grad():
        server.model.lm_head.weight.copy_(server.model.lm_head.weight.roll(1, 0))


def one_layer_less(server: FakeEngine) -> None:
    server.layers = (1, 4)


def in_half_precision(server: FakeEngine) -> None:
    server.spoil = lambda n, s, answer, t: (s, answer, t | {"hidden_states": t["hidden_states"].bfloat16()})


def no_extraction(server: FakeEngine) -> None:
    server.spoil = lambda n, s, answer, t: (s, answer | {"kv_transfer_params": None}, None)


def no_tokens(server: FakeEngine) -> None:
    server.spoil = lambda n, s, answer, t: (s, answer | {"choices": [{"text": "x"}]}, t)


def somebody_elses_file(server: FakeEngine) -> None:
    (server.folder / "precious.safetensors").write_bytes(b"mine")
    path = f"{server.folder}/precious.safetensors"
    server.spoil = lambda n, s, answer, t: (s, answer | {"kv_transfer_params": {"hidden_states_path": path}}, t)


def short(server: FakeEngine) -> None:
    server.longest = LENGTH


def refusing(server: FakeEngine) -> None:
    server.spoil = lambda n, s, answer, t: (400, {"error": {"message": "no such field"}}, None)


def in_another_folder(server: FakeEngine) -> None:
    server.spoil = lambda n, s, answer, t: (s, answer, None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            other_layers,
            r"state 2 of 3 should be that after 3 layers of \S+, it is that after 2 layers \(\d+% off\): .*data engine",
        ),
        (no_last_layer, "it serves another model, or other layers than"),
        (behind_the_norm, "its last states and the output head of .*: it serves another model, or other layers than"),
        (slightly_trained, "state 1 of 3 should be that after 1 layers of .* it is another model's"),
        (another_model, "it serves another model, or other layers than"),
        (one_layer_less, r"gives states of \[2, 32\], not of \[3, 32\]"),
        (in_half_precision, "computes in torch.bfloat16, target.dtype is torch.float32: start it with --dtype float32"),
        (no_extraction, "answers without hidden states and a token: .*python -m data engine"),
        (no_tokens, "answers without hidden states and a token"),
        (somebody_elses_file, "names precious.safetensors, which is not the file of request"),
        (short, r"takes 64 tokens, .*--max-model-len 65, or set trainer.length=63"),
        (refusing, "refuses: status 400: no such field"),
        (in_another_folder, r"failed 3 times \(served.retries=2\), the last time: .* does the server write to served.folder="),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_refused_at_the_start(
    wrong: Callable[[FakeEngine], None], says: str, server: FakeEngine, opened: Opened, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(server)
    if wrong is in_another_folder:  # its files never come; those of the others may come late, on a busy machine
        monkeypatch.setattr(engine, "LATE", 0.3)
    with pytest.raises(UserError, match=says) as error:
        opened()
    assert "\n" not in str(error.value) and "served." in str(error.value)
    if wrong is somebody_elses_file:
        assert (states / "precious.safetensors").read_bytes() == b"mine"


def test_a_server_that_is_not_there(model: Path, states: Path) -> None:
    settings = {"url": "http://127.0.0.1:9/v1", "folder": str(states), "layers": None, "key": None, "retries": 2}
    with pytest.raises(UserError, match=r"^served.url=http://127.0.0.1:9/v1 does not answer: "):
        open_served(where(model), settings)
    with pytest.raises(UserError, match=r"^served.key=NOSUCH: there is no such environment variable"):
        open_served(where(model), settings | {"key": "NOSUCH"})
    with pytest.raises(UserError, match=r"served.folder=\S+/nowhere is no folder"):
        open_served(where(model), settings | {"folder": str(states / "nowhere")})


def test_layers_that_lack_a_tap(opened: Opened) -> None:
    with pytest.raises(UserError, match=r"served.layers=\[1, 4\] must rise, and hold \[1, 3, 4\]"):
        opened(layers=[1, 4])
    with pytest.raises(UserError, match=r"served.layers=\[4, 3, 1\] must rise"):
        opened(layers=[4, 3, 1])
    with pytest.raises(UserError, match="has 4 layers, layer 5 was tapped"):
        opened((1, 5))


# ---- what goes wrong later ----


def truncated(n: int, status: int, answer: Any, tensors: Any) -> Written:
    return status, answer, save({k: v.contiguous() for k, v in tensors.items()})[:-100]


def not_finite(n: int, status: int, answer: Any, tensors: Any) -> Written:
    tensors["hidden_states"][0, 2, 5] = float("nan")
    return status, answer, tensors


def other_tokens(n: int, status: int, answer: Any, tensors: Any) -> Written:
    return status, answer, tensors | {"token_ids": tensors["token_ids"] ^ 1}


def fewer_tokens(n: int, status: int, answer: Any, tensors: Any) -> Written:
    return status, answer, {k: v[:-1] for k, v in tensors.items()}


def without_tokens(n: int, status: int, answer: Any, tensors: Any) -> Written:
    return status, answer, {"hidden_states": tensors["hidden_states"]}


def overloaded(n: int, status: int, answer: Any, tensors: Any) -> Written:
    return 503, {"error": {"message": "busy"}}, None


def link(folder: Path) -> Callable[..., Written]:
    def a_link(n: int, status: int, answer: Any, tensors: Any) -> Written:
        name = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        (folder / name).symlink_to(folder.parent / "elsewhere")
        (folder / f"{name}.lock").touch()
        return status, answer, None

    return a_link


BROKEN = {
    truncated: "is truncated or damaged",
    not_finite: r"holds numbers that are not finite, first in column 2\b",
    other_tokens: "holds the states of another text",
    fewer_tokens: "holds the states of another text",
    without_tokens: "is truncated or damaged",
    overloaded: "status 503: busy",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_may_pass_is_asked_again(broken: Any, opened: Opened, server: FakeEngine, model: Path, states: Path, rows: Packed) -> None:
    """One broken answer in between changes nothing; one that stays broken ends in a line that says what and how often."""
    target, batch, begun = opened(), rows.batch([0, 1]), server.count
    server.spoil = lambda n, *rest: broken(n, *rest) if n == begun + 1 else rest
    found, wanted = (look(batch, each, (1, 3)) for each in (target, open_target(where(model))))
    torch.testing.assert_close(found.final_BTD, wanted.final_BTD, rtol=0, atol=1e-5)

    server.spoil = broken
    with pytest.raises(UserError, match=rf"failed 3 times \(served.retries=2\), the last time: .*{BROKEN[broken]}.*: run again to go on$"):
        look(rows.batch([2]), target, (1, 3))
    target.close()
    assert list(states.iterdir()) == []


def test_a_folder_on_a_file_system_without_locks(opened: Opened, states: Path, rows: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    target = opened()
    monkeypatch.setattr(engine, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": without}))
    with pytest.raises(UserError, match=rf"served.folder={states} cannot be locked \(no locks here\).*: choose a folder on another"):
        look(rows.batch([0]), target, (1, 3))


def test_a_link_is_not_followed(opened: Opened, server: FakeEngine, states: Path, rows: Packed) -> None:
    target = opened()
    elsewhere = states.parent / "elsewhere"
    elsewhere.write_bytes(save({"hidden_states": torch.zeros(64, 3, 32), "token_ids": rows.batch([0]).tokens_BT[0]}))
    server.spoil = link(states)
    with pytest.raises(UserError, match="is no file"):
        look(rows.batch([0]), target, (1, 3))
    target.close()
    assert elsewhere.exists() and list(states.iterdir()) == []


@pytest.mark.slow
def test_files_of_answers_under_way_are_removed_too(opened: Opened, server: FakeEngine, states: Path, rows: Packed) -> None:
    """The next batch is asked for ahead: when a run ends, the server still writes for it."""
    target, begun = opened(), server.count
    server.late = 0.6
    batch = rows.batch([0])
    target.begin(batch.tokens_BT, batch.positions_BT)
    while server.count == begun:
        time.sleep(0.01)
    target.close()
    time.sleep(1.0)
    assert list(states.iterdir()) == []


def test_a_server_that_comes_back_with_other_weights(opened: Opened, server: FakeEngine, rows: Packed) -> None:
    target, begun = opened(), server.count
    server.spoil = lambda n, *rest: overloaded(n, *rest) if n == begun else rest
    look(rows.batch([0]), target, (1, 3))  # as before
    begun = server.count
    slightly_trained(server)
    with pytest.raises(UserError, match=r"came back as another: its state after 1 layers is \d+% off what it was"):
        look(rows.batch([1]), target, (1, 3))


def test_a_server_that_is_replaced_between_two_requests(
    opened: Opened, server: FakeEngine, rows: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "AGAIN", 2)
    target = opened()
    slightly_trained(server)
    look(rows.batch([0]), target, (1, 3))
    with pytest.raises(UserError, match="came back as another"):
        look(rows.batch([1]), target, (1, 3))


@pytest.mark.parametrize("layers", [(1, 3, 4), (1, 2, 4)])
def test_neighbours_that_are_close_in_half_precision(layers: tuple[int, ...], tmp_path: Path, states: Path) -> None:
    """Layers that change a state by less than what rounding may, and a server that rounds otherwise."""
    folder = save_target(tmp_path / "calm")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.02
    save_file({k: v.bfloat16() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    server = FakeEngine(folder, states, layers, torch.bfloat16)
    noise = torch.Generator().manual_seed(0)

    def rounded(n: int, status: int, answer: Any, t: Any) -> Written:
        hidden = t["hidden_states"]
        off = 1 + 0.004 * torch.randn(hidden.shape, generator=noise)
        return status, answer, t | {"hidden_states": (hidden * off).bfloat16()}

    server.spoil = rounded
    with serving(server.app) as url:
        settings = {"url": url, "folder": str(states), "layers": [1, 3, 4], "key": None, "retries": 0}
        target = open_served(where(folder) | {"dtype": "bfloat16"}, settings)
        every = every_state(target, torch.arange(100, 148))
        assert 0.01 < apart(every[2], every[3], torch.bfloat16) < rounding(torch.bfloat16)
        with contextlib.nullcontext() if layers == (1, 3, 4) else pytest.raises(UserError, match="it is that after 2 layers"):
            target.expect((1, 3), LENGTH)
        target.close()


def test_a_server_that_dies(model: Path, states: Path, server: FakeEngine, rows: Packed) -> None:
    with serving(server.app) as url:
        target = open_served(where(model), {"url": url, "folder": str(states), "layers": None, "key": None, "retries": 1})
        target.expect((1, 3), LENGTH)
    with pytest.raises(UserError, match=r"failed 2 times \(served.retries=1\), the last time: .*: run again to go on"):
        look(rows.batch([0]), target, (1, 3))
    target.close()
