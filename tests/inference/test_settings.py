"""Settings that cannot be meant are one line of an error that names the key, before anything is loaded or decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from heads.errors import UserError
from inference.__main__ import check, say_limit, writable
from inference.placement import check_device
from inference.settings import check_given, open_decode, open_target

CONF = Path(__file__).resolve().parents[2] / "conf"


def settings(group: str, name: str, **changes: Any) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    return found | changes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"new_tokens": 0}, "decode.new_tokens must be at least 1, found 0"),
        ({"prompts": -1}, "decode.prompts must be at least 1, found -1"),
        ({"new_tokens": None}, "decode.new_tokens must have a value, found null"),
        ({"rule": None}, "decode.rule must have a value, found null"),
        ({"rule": "best"}, "no verification rule 'best'"),
        ({"seed": 1 << 63}, "decode.seed must fit 64 bits"),
        ({"kind": "fixed", "paths": [1]}, r"paths must be lists of child ranks, .* found \[1\]"),
        ({"kind": "fixed", "paths": [["a"]]}, "paths must be lists of child ranks"),
        ({"kind": "fixed"}, "paths are needed"),
    ],
)
def test_what_decode_cannot_be(change: dict[str, Any], says: str) -> None:
    open_decode(settings("decode", "dynamic", expand=None))
    with pytest.raises(UserError, match=says):
        open_decode(settings("decode", "dynamic", **change))


def test_what_a_target_cannot_be() -> None:
    for change, says in (({"path": None}, "target.path must have a value"), ({"path": 5}, "target folder 5 does not exist")):
        with pytest.raises(UserError, match=says):
            open_target(settings("target", "tiny", **change))
    for device in ("nonsense", "map"):
        with pytest.raises(UserError, match=f"drafter_device={device} is not usable here"):
            check_device(device, "drafter_device")
    check_given({"a": 0, "b": None}, "b")


def test_names_are_words() -> None:
    check(config := {"speculator": 7, "out": None, "prompts": "a.jsonl", "count": None})
    assert config == {"speculator": "7", "out": None, "prompts": "a.jsonl", "count": None}
    for wrong, says in (({"out": ["a"]}, r"out must be one word, found \['a'\]"), ({"rows": None}, "rows must have a value")):
        with pytest.raises(UserError, match=says):
            check(wrong)


def test_a_folder_that_cannot_be_written_is_noticed_at_once(tmp_path: Path) -> None:
    assert writable(tmp_path / "a" / "b").is_dir() and not [*(tmp_path / "a" / "b").iterdir()]
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"file.* cannot be written \(.*\): give out=DIR"):
            writable(folder)


def test_a_limit_of_prompts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_limit([[1], [2]], "decode.prompts", 3)
    say_limit([[1], [2]], "count", None)
    assert not capsys.readouterr().out
    say_limit([[1], [2]], "decode.prompts", 2)
    assert capsys.readouterr().out == "the first 2 prompts of the file, as decode.prompts says\n"
