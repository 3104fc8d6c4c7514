"""The held-out modules stay held out, and prompts come from them alone."""

import re

import pytest

from assets.tiny_corpus import CopyCheck
from headstart.data import stdlib


class Words:
    """A stand-in tokenizer: a word with the blanks before it is a token."""

    def __init__(self) -> None:
        self.vocabulary: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = []
        for word in re.findall(r"\s*\S+|\s+", text):
            if word not in self.vocabulary:
                self.vocabulary.append(word)
            ids.append(self.vocabulary.index(word))
        return {"input_ids": ids}

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)


def modules(split: str) -> set[str]:
    return {name.split("/")[0].removesuffix(".py") for name, _ in stdlib.documents(split)}


def test_no_held_out_module_in_train() -> None:
    assert not modules("train") & set(stdlib.HELD_OUT)
    assert modules("heldout") == set(stdlib.HELD_OUT)


def test_splits_are_disjoint_and_of_the_right_size() -> None:
    assert not modules("train") & modules("heldout")
    size = {split: sum(len(text) for _, text in stdlib.documents(split)) for split in ("train", "heldout")}
    assert 0.03 < size["heldout"] / sum(size.values()) < 0.09
    with pytest.raises(ValueError):
        next(stdlib.documents("test"))


def test_train_leaves_out_what_is_not_source_to_learn_from() -> None:
    for name, _ in stdlib.documents("train"):
        assert not {"site-packages", "test", "tests", "encodings", "_bundled"} & set(name.split("/")[:-1])


def test_near_copies_are_recognised() -> None:
    is_copy = CopyCheck()
    held = dict(stdlib.documents("heldout"))
    assert all(is_copy(text) for name, text in held.items() if len(text) > 5000)
    train = [is_copy(text) for _, text in stdlib.documents("train")]
    assert sum(train) <= 0.01 * len(train)


def test_prompts_are_deterministic_and_held_out() -> None:
    made = stdlib.prompts(60, seed=3, tokenizer=Words(), tokens=24)
    assert made == stdlib.prompts(60, seed=3, tokenizer=Words(), tokens=24)
    assert made != stdlib.prompts(60, seed=4, tokenizer=Words(), tokens=24)
    assert len({prompt["id"] for prompt in made}) == len(made) == 60
    texts = dict(stdlib.documents("heldout"))
    for prompt in made:
        name, line = prompt["id"].rsplit(":", 1)
        assert "\n".join(texts[name].split("\n")[int(line) - 1 :]).startswith(prompt["text"])
        assert len(Words()(prompt["text"])["input_ids"]) == 24


def test_prompts_reach_most_modules_and_start_at_definitions() -> None:
    made = stdlib.prompts(60, seed=0, tokenizer=Words(), tokens=24)
    reached = {prompt["id"].split("/")[0].split(":")[0].removesuffix(".py") for prompt in made}
    assert len(reached) >= 0.9 * len(stdlib.HELD_OUT)
    assert sum(prompt["text"].startswith(("def ", "class ", "async def ")) for prompt in made) > 45
