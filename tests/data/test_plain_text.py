"""A user's own text: what is held out is never trained on, whole documents where there are some, parts of one file where there are not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data import arrow, plain, regenerated, source
from headstart.data import text as text_module
from headstart.data.capture import capture
from headstart.data.packed import Packed
from headstart.data.source import open_source
from headstart.data.text import texts
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from tests.data.conftest import NEW, lines, text
from tests.data.test_arrow import same

GIVEN: dict[str, Any] = {"split": "train", "subset": "", "field": "text", "suffixes": [".txt", ".md", ".jsonl"], "on_bad": "error"}


def settings(path: Path, **more: Any) -> dict[str, Any]:
    return {"name": "text", "path": str(path), **GIVEN, **more}


def read(path: Path | str, seed: int = 0, **more: Any) -> tuple[list[Any], list[Any]]:
    return texts(seed, path=str(path), **{**GIVEN, **more})


def words(seed: int, count: int) -> str:
    """Numbers in paragraphs: no two texts share a line."""
    dice = random.Random(seed)
    said = [f"{seed}/{i} " + " ".join(str(dice.randrange(40)) for _ in range(20)) + ("\n\n" if i % 3 == 2 else "\n") for i in range(count)]
    return "".join(said)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Thirty texts in several folders and forms, and what is not to be read."""
    root = tmp_path / "texts"
    for i in range(24):
        path = root / f"part{i % 3}" / f"{i:02}.{'md' if i % 2 else 'txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(i, 12))
    (root / "rows.jsonl").write_text("".join(json.dumps({"id": i, "text": words(i, 12)}) + "\n" for i in range(24, 30)))
    (root / ".git").mkdir()
    (root / ".git" / "hidden.txt").write_text(words(90, 12))
    (root / "code.py").write_text(words(91, 12))
    (root / "empty.txt").write_text("\n\n")
    return root


def test_conversations_are_told_their_own_choice(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(UserError, match=r"no text in 'text', it has 'messages'.*; conversations are data=chat"):
        read(str(tmp_path / "talks.jsonl"))


def test_a_folder_is_read_in_the_order_of_its_names(corpus: Path) -> None:
    train, held = read(corpus)
    names = [t.name for t in train] + [t.name for t in held]
    files = [f"part{i % 3}/{i:02}.{'md' if i % 2 else 'txt'}" for i in range(24)]
    assert sorted(names) == sorted([*files, *(f"rows.jsonl:{n}" for n in range(1, 7))])
    assert [t.name for t in train] == sorted(t.name for t in train)
    assert {t.text for t in train} | {t.text for t in held} == {words(i, 12).strip("\n") + "\n" for i in range(30)}
    assert all(t.ends for t in (*train, *held))


def test_what_is_held_out_is_drawn_by_the_seed(corpus: Path) -> None:
    draws = [read(corpus, seed)[1] for seed in range(8)]
    assert draws[3] == read(corpus, 3)[1]
    assert len({held[0].name for held in draws}) > 3
    for seed, held in enumerate(draws):
        train = read(corpus, seed)[0]
        assert len(held) == 2 and not {t.name for t in train} & {t.name for t in held}  # a twentieth of the characters, in whole documents


@pytest.mark.parametrize("characters", [[1, 1000], [3, 1, 1000, 2]])
def test_something_is_always_left_to_train_on(characters: list[int]) -> None:
    """Although all documents but one are less than a twentieth of the text, whichever are drawn first."""
    held = [text_module._held("corpus", characters, seed) for seed in range(40)]
    assert all(0 < len(each) < len(characters) for each in held) and any(2 in each or 1 in each for each in held)


def test_of_a_large_corpus_no_more_is_held_out_than_is_of_use(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of it would be two texts."""
    whole = read(corpus)[1]
    monkeypatch.setattr(text_module, "MOST_HELD", len(whole[0].text) // 2)
    train, held = read(corpus)
    assert len(held) == 1 and held[0] in whole and len(train) == 29


@pytest.mark.parametrize("layout", ["paragraphs", "lines", "one line", "no spaces"])
@pytest.mark.parametrize("size", [3_000, 400_000])
def test_a_single_file_is_cut_into_parts(layout: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    whole = words(1, size // 50)[:size].strip("\n") + "\n"
    whole = {"paragraphs": whole, "lines": whole.replace("\n\n", "\n"), "one line": whole.replace("\n", " "), "no spaces": "x" * size}[
        layout
    ]
    path.write_text(whole)
    train, held = read(path)
    parts = sorted([*train, *held], key=lambda t: int(t.name.rpartition(":")[2]))
    assert "".join(t.text for t in parts) == whole.strip("\n") + "\n"  # nothing is lost, nothing comes twice
    assert [t.ends for t in parts] == [False] * (len(parts) - 1) + [True]
    assert len({t.name for t in parts}) == len(parts)
    ending = {"paragraphs": "\n\n", "lines": "\n", "one line": " ", "no spaces": "x"}[layout]
    assert all(t.text.endswith(ending) for t in parts[:-1])
    share = sum(len(t.text) for t in held) / len(whole)
    assert 0.03 < share < (0.45 if size < 10_000 else 0.15)


def test_a_large_file_among_small_ones_is_cut(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text(words(0, 2000))
    for i in range(5):
        (tmp_path / f"small{i}.txt").write_text(words(i + 1, 10))
    train, held = read(tmp_path)
    assert sum(t.name.startswith("large") for t in train) > 1 and not any(":" in t.name for t in (*train, *held) if "small" in t.name)


def test_a_dataset_and_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = {}
    rows = datasets.Dataset.from_list([{"body": words(i, 5)} for i in range(20)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: asked.update(name=name, split=split) or rows)
    monkeypatch.chdir(tmp_path)
    train, held = read("someone/pages", split="train[:20]", field="body", subset="english")
    assert asked == {"name": ("someone/pages", "english"), "split": "train[:20]"} and len(train) + len(held) == 20
    with pytest.raises(UserError, match=r"someone/pages row 1: no text in 'text', it has 'body': data\.field=NAME"):
        read("someone/pages")


def rows_of(packed: Packed) -> set[str]:
    return {str(row.tolist()) for laid in packed.blocks() for row in laid.tokens}


def test_it_trains_and_its_prompts_are_held_out(corpus: Path, target: Any, capsys: Any) -> None:
    made = open_source(settings(corpus), target, length=64, seed=0)
    said = capsys.readouterr().out
    assert made.packed is not None and made.held_out is not None
    assert said.startswith("data: 28 documents, ") and f" in {len(made.packed)} rows of 64; held out: 2 documents, " in said
    assert made.packed.loss_mask_RT.sum() == made.packed.tokens_RT.size - made.packed.padding
    held, train = (" ".join(t.text for t in part) for part in reversed(read(corpus)))
    prompts = made.prompts(6, 8)
    assert len(prompts) == 6 and prompts == made.prompts(6, 8)
    for prompt in prompts:
        assert text(target, prompt) in held and text(target, prompt) not in train
    batch = next(made.stream((2,), 4, 0, 0, 0, 1))
    assert made.observe(batch, (2,)).states[2].shape == (4, 64, target.shape.hidden_size)


def test_short_texts_have_short_prompts(tmp_path: Path, target: Any) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} {i + 1} {i + 2} {i + 3} {i + 4} {i + 5}"}) + "\n" for i in range(100)))
    made = open_source(settings(path), target, length=64, seed=0)
    assert [len(p) in (8, 16) for p in made.prompts(3, 8)] == [True] * 3


def test_a_prompt_begins_as_texts_do(tmp_path: Path, target: Any) -> None:
    """With the token that the target's tokenizer puts in front of every text, and without the one it puts behind them."""
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    from headstart.data.plain import PARAGRAPHS, asked

    both = deepcopy(target.tokenizer)
    both.backend_tokenizer.post_processor = TemplateProcessing(single="1 $A <end>", special_tokens=[("1", 17), ("<end>", 0)])
    (prompt,) = asked(both, {"a": [("a", words(0, 20))]}, 1, 0, (PARAGRAPHS,))
    assert prompt[0] == 17 and prompt[-1] != 0 and len(prompt) == 65


def test_it_is_captured_as_the_same_rows(corpus: Path, target: Any, tmp_path: Path) -> None:
    made = open_source(settings(corpus), target, length=64, seed=0)
    assert made.packed is not None
    shards = capture(made.packed, target, (2,), tmp_path / "shards")
    assert {str(row.tolist()) for row in shards.batch(np.arange(len(shards))).tokens_BT} == rows_of(made.packed)
    again = open_source({"name": "shards", "path": str(tmp_path / "shards"), "prompts_file": None}, target, length=64, seed=0)
    assert bool((again.counts() == made.counts()).all())


def test_its_prefixes_are_continued_and_held_out_text_is_not(corpus: Path, door: Any, target: Any) -> None:
    made = lines(door("data=text", f"path={corpus}", "limit=30", "prefix=10", "temperature=0"))
    train, held = read(corpus)
    texts = {t.name: t.text for t in train}
    assert len(made) == 30 and {m["document"] for m in made} <= texts.keys() and len({m["document"] for m in made}) > 10
    for record in made[:4]:
        (document,) = record["documents"]
        said = generate(target, None, document["tokens"][:10], new_tokens=NEW).tokens
        assert document == {"tokens": document["tokens"][:10] + said, "answers": [[10, 10 + len(said)]]}
        assert record["prompt"] in texts[record["document"]]


def test_what_was_continued_trains_and_asks_for_prefixes_that_are_held_out(corpus: Path, door: Any, target: Any) -> None:
    path = door("data=text", f"path={corpus}", "prefix=10", "limit=200")
    made = open_source({"name": "regenerated", "path": str(path)}, target, length=32, seed=0)
    groups, of, _ = regenerated.read(str(path), target.tokenizer, target.shape.vocab_size)
    assert of == "text" and made.packed is not None
    prompts = made.prompts(3, 8)
    prefixes = {str(m["documents"][0]["tokens"][:10]): m["document"] for m in lines(path)}
    assert len(prompts) == 3
    documents = {prefixes[str(p)] for p in prompts}
    inside = str(made.packed.tokens_RT.tolist())
    for record in lines(path):
        if record["document"] in documents:
            assert str(record["documents"][0]["tokens"])[1:-1] not in inside


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "EMPTY"}, r"path=.*: no file in it ends in \.jsonl, \.md, \.txt: data\.suffixes="),
        ({"suffixes": [".rst"]}, r"no file in it ends in \.rst"),
        ({"suffixes": "txt"}, r"data\.suffixes must be a list of words, found 'txt'"),
        ({"suffixes": None}, r"data\.suffixes must have a value, found null"),
        ({"field": "body"}, r"rows\.jsonl line 1: no text in 'body', it has 'id', 'text': data\.field=NAME"),
        ({"path": "FOLDER/code.txt"}, r"path=.*code\.txt: no such file"),
        ({"path": None}, r"data\.path must have a value, found null"),
        ({"path": ["a"]}, r"data\.path must be a word, found \['a'\]"),
        ({"path": "FOLDER/empty.txt"}, "0 characters of text are too few"),
        ({"length": 600}, r"longer than the target's context of 512: set trainer\.length .*to 512 or less"),
        ({"turns": "all"}, r"data=text has no setting data\.turns: it has path, split, field, suffixes, on_bad, subset"),
        ({"name": "texts"}, "no data is called 'texts': there are chat, mix, regenerated, shards, stdlib, text, tokenized"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(change: dict[str, Any], says: str, corpus: Path, tmp_path: Path, target: Any) -> None:
    (tmp_path / "empty").mkdir()
    length, change = change.get("length", 64), {k: v for k, v in change.items() if k != "length"}
    given = settings(corpus) | {k: v.replace("FOLDER", str(corpus)) if isinstance(v, str) else v for k, v in change.items()}
    given["path"] = str(tmp_path / "empty") if given["path"] == "EMPTY" else given["path"]
    with pytest.raises(UserError, match=says) as error:
        open_source(given, target, length=length, seed=0)
    assert "\n" not in str(error.value)


def test_files_that_are_no_text_are_named_or_passed_over(corpus: Path, caplog: Any) -> None:
    (corpus / "part0" / "picture.txt").write_bytes(b"\x89PNG\0\0")
    (corpus / "gone.txt").symlink_to(corpus / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: .*no such file \(data\.on_bad=skip passes such files over\)"):
        read(corpus)
    train, held = read(corpus, on_bad="skip")
    assert len(train) + len(held) == 30 and "passed over 2 of 28 files" in caplog.text and "picture.txt: not UTF-8" in caplog.text


def test_what_can_be_told_before_a_target_is_loaded(corpus: Path, tmp_path: Path) -> None:
    source.check_source(settings(corpus))
    for given, says in (
        (settings(tmp_path / "gone.txt"), r"gone\.txt: no such file"),
        ({"name": "chat", "path": str(tmp_path / "gone.jsonl"), "split": "", "on_bad": "error"}, r"gone\.jsonl: no such file"),
        ({"name": "regenerated", "path": str(tmp_path / "gone.jsonl")}, "no such file: make it with"),
        ({"name": "regenerated", "path": str(corpus / "rows.jsonl")}, r"rows\.jsonl line 1 was not written by .*data=chat"),
        ({"name": "shards", "path": str(corpus), "prompts_file": None}, r"index\.json does not exist: no target outputs"),
    ):
        with pytest.raises(UserError, match=says):
            source.check_source(given)


def test_a_path_of_digits_is_a_name(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus.rename(tmp_path / "5")
    assert source.find(settings(corpus) | {"path": 5})[1]["path"] == "5"


@pytest.mark.parametrize("workers", [1, 2])
def test_from_disk_rows_are_those_of_memory(
    corpus: Path, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, caplog: Any
) -> None:
    """To the bit, held-out rows, prompts and what is said of files passed over too; the second start tokenises nothing."""
    pytest.importorskip("datasets")
    monkeypatch.setattr(arrow, "SHARE", 10)
    (corpus / "part0" / "picture.txt").write_bytes(b"\x89PNG\0\0")
    (corpus / "large.txt").write_text("\n\n".join(f"paragraph {i} of a large file" for i in range(2000)))
    with (corpus / "rows.jsonl").open("a") as file:
        file.write('{"no": "text"}\n')
    given = settings(corpus) | {"on_bad": "skip"}
    for seed in (0, 5):
        inside = open_source(given, target, length=64, seed=seed)
        said = caplog.messages[:]
        caplog.clear()
        assert any("passed over 1 of" in line for line in said) and any("dropped 1 of" in line for line in said)
        with monkeypatch.context() as patched:
            for _ in range(2):
                on_disk = open_source(given | {"cache": str(tmp_path / "cache"), "workers": workers}, target, length=64, seed=seed)
                same(inside, on_disk)
                assert caplog.messages == said
                caplog.clear()
                patched.setattr(plain, "encode_texts", lambda *_: pytest.fail("tokenised again"))
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.glob("tokens*.arrow"))) == workers
    (folder / "texts.json").write_text("{}")
    with pytest.raises(UserError, match=r"texts\.json is not what was written there: delete"):
        open_source(given | {"cache": str(tmp_path / "cache")}, target, length=64, seed=0)
    given["field"] = "other"
    with pytest.raises(UserError, match="no texts in it"):
        open_source(given | {"cache": str(tmp_path / "cache")}, target, length=64, seed=0)
