"""What cannot be read, from every side: one line that says which file and why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.stored import DEEPEST, check_model, check_weights, finite, read_json, read_tensors
from headstart.inference.decoding.placement import check_folder

SHAPE = TargetShape("llama", 32, 6, 2, 1, 16, 48, 96, 256, 1e-6, {"rope_type": "default", "rope_theta": 1e4}, "float32")
READERS: list[Callable[[Path], Any]] = [read_json, read_tensors]


@contextmanager
def nobody() -> Iterator[None]:
    """Permissions bind everybody but root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """Pytest's own folders are their owner's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_may_not_be_read_is_not_called_damaged(read: Callable[[Path], Any], open_to_all: Path) -> None:
    path = open_to_all / "file"
    path.write_text("{}")
    path.chmod(0)
    with nobody(), pytest.raises(UserError, match=r"file cannot be read \(Permission denied\)"):
        read(path)
    path.chmod(0o644)
    open_to_all.chmod(0)
    with nobody(), pytest.raises(UserError, match=r"file cannot be read \(Permission denied\)"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_readable_file(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, says in {
        "nowhere": "nowhere does not exist",
        "nowhere/file": "nowhere/file does not exist",
        "folder": "folder is not a file",
        "pipe": "pipe is not a file",  # nobody waits for its other end
        "loop": r"loop cannot be read \(Too many levels of symbolic links\)",
        "x" * 300: r"x\.\.\.x+ cannot be read \(File name too long\)",
        "\ud800": r"\\ud800 cannot be read \(.*surrogates not allowed\)",
        "a\0b": "cannot be read .*embedded null",
    }.items():
        with pytest.raises(UserError, match=says) as e:
            read(tmp_path / name)
        assert "\n" not in str(e.value) and str(e.value).encode() and len(str(e.value)) < 500


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails")
@pytest.mark.parametrize("read", READERS)
def test_a_disk_that_fails(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"file cannot be read|not valid JSON"):
        read(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "is not valid JSON: maximum recursion depth"),
        ('{"a":' * 100_000, "is not valid JSON: maximum recursion depth"),
        (
            '{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1),
            f"is not a config: more than {DEEPEST} dictionaries and lists lie within each other",
        ),
        ('{"a": 1' + "0" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ("[]", "must hold a JSON object"),
        ("5", "must hold a JSON object"),
        ("", "is not valid JSON"),
        (b"\xff{}", "is not valid JSON: 'utf-8' codec"),
        (b" " * (17 << 20), "is larger than 16 MiB"),
    ],
)
def test_json_that_is_no_config(text: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (read_json, lambda path: hub.load(path.parent, SHAPE), lambda path: hub.is_language_model(path.parent)):
        with pytest.raises(UserError, match=f"config.json {says}") as e:
            read(tmp_path / "config.json")
        assert "\n" not in str(e.value) and len(str(e.value)) < 500
    deepest = '{"a":' * DEEPEST + "1" + "}" * DEEPEST
    (tmp_path / "config.json").write_text(deepest)
    assert read_json(tmp_path / "config.json")


def test_words_that_nobody_can_print_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["\\ud800"], "model_type": "\\ud800", "\\ud800": 1}')
    with pytest.raises(UserError, match="neither saved by Headstart nor a known speculator format") as e:
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
        hub.load(tmp_path, SHAPE)
    assert str(e.value).encode()


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "a\0b"])
def test_folders_of_such_names(name: str) -> None:
    for door in (hub.is_language_model, lambda folder: hub.load(folder, SHAPE), check_folder):
        with pytest.raises(UserError, match=r"cannot be read|does not exist") as e:
            door(name)  # type: ignore[operator]
        assert "\n" not in str(e.value) and str(e.value).encode() and len(str(e.value)) < 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 65)])
def test_a_number_that_is_none_is_found_wherever_it_stands(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=dtype)
    assert finite(tensor) and finite(torch.empty(0, 3)) and finite(torch.full((2,), torch.finfo(dtype).max, dtype=dtype))
    for place in {0, tensor.numel() // 2, tensor.numel() - 1, min(17, tensor.numel() - 1)}:
        for value in (float("nan"), float("inf"), -float("inf")):
            planted = tensor.clone()
            planted.view(-1)[place] = value
            assert not finite(planted)
            with pytest.raises(UserError, match="model: a holds NaN or infinite values"):
                check_weights({"a": planted}, Path("model"))


def test_weights_that_cannot_be_mapped_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, a file of a file system that maps none."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("headstart.heads.stored.safe_open", refuse)
    for read in (check_model, lambda folder: read_tensors(folder / "model.safetensors")):
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read \(No such device\)$"):
            read(tmp_path)
