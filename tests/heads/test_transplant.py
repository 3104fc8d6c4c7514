"""A draft model of another family gets the target's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.spelling import bytes_of
from headstart.heads.transplant import means, resize, spelt
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from headstart.inference.speculator import open_speculator
from tests.drafters import random_tokens, roots_of
from tests.inference.serving.speech import SPECIAL, spaced, tokenizer
from tests.tiny_targets import tiny_target

SIZE = 96


def shuffled(extra: int = 0) -> PreTrainedTokenizerFast:
    """The tokens of ``tokenizer`` under other ids, from ``extra`` on: a model with it has other rows for the same tokens."""
    known = sorted(tokenizer().get_vocab(), key=lambda token: (token in SPECIAL, hash_of(token)))
    known = [*(f"unused{i}" for i in range(extra)), *known]
    return byte_level(known, pad_token="<pad>", bos_token="<s>", eos_token="<end>")


def byte_level(known: list[str], **special: str) -> PreTrainedTokenizerFast:
    fast = Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, []))
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def hash_of(token: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(token)) * 7919 % 10007


def donor(folder: Path, own: Any, **changes: Any) -> Any:
    model = tiny_target(seed=5, num_hidden_layers=2, **changes).model
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return model


def target() -> Target:
    return Target(tiny_target().model, tokenizer())


def started(folder: Path, target: Target, head: str = "draft_lm", **settings: Any) -> Drafter:
    drafter = hub.build(head, target.shape, folder=str(folder), **settings)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.eval()


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [96, 128, 160])
def test_the_same_tokens_under_other_ids_are_guessed_with_the_same_probabilities(tied: bool, size: int, tmp_path: Path) -> None:
    """Where every token has a copy, the draft model says of the target's tokens what the donor said of its own."""
    own, whole = shuffled(extra=size - SIZE), target()
    model = donor(tmp_path / "donor", own, vocab_size=size, tie_word_embeddings=tied)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
        model.config.tie_word_embeddings = True
        model.save_pretrained(tmp_path / "donor")
    drafter = started(tmp_path / "donor", whole, transplant=True)
    its = own.convert_tokens_to_ids(whole.tokenizer.convert_ids_to_tokens(list(range(SIZE))))  # target's id -> donor's
    tokens = random_tokens(30, 1)
    (draft,) = unroll(drafter, roots_of(whole, drafter, torch.tensor([tokens])), None, 1)
    found = drafter.unembedding(1).logits(draft.hidden_BNH)[0, :-1]
    expected = model(torch.tensor([[its[t] for t in tokens]])).logits[0, 1:, its]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    hub.save(drafter, tmp_path / "s", whole.card, torch.float32, whole.tokenizer)
    loaded = hub.load(tmp_path / "s", whole.shape)  # stands alone, with the target's vocabulary
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True))
    assert loaded.config["config"]["vocab_size"] == SIZE and loaded.config["config"]["eos_token_id"] is None  # as the target's


def test_a_token_is_spelt_by_the_longest_tokens_of_the_other_tokenizer() -> None:
    for own, theirs in ((tokenizer(), spaced()), (tokenizer(), tokenizer()), (tokenizer(), shuffled())):
        found, special = spelt(own, theirs, 200, 200), {theirs.convert_tokens_to_ids(token) for token in SPECIAL}
        raw = {token: bytes(bytes_of(own, token) or []) for token in own.get_vocab().values()}
        for token, parts in enumerate(found):
            if token >= len(theirs):
                assert parts == []  # an id without a token
            elif token not in special:
                whole = bytes(bytes_of(theirs, token) or [])
                assert b"".join(raw[part] for part in parts) == bytes(byte for byte in whole if bytes([byte]) in raw.values())
                assert whole not in raw.values() or len(parts) == 1
    known = spaced()
    pieces = spelt(known, byte_level(["Ġabb", "Ġcde", "xa"]), 3, len(known))
    assert [known.convert_ids_to_tokens(parts) for parts in pieces] == [["▁a", "b", "b"], ["▁cd", "e"], []]  # it has no x and no bare a


def test_special_tokens_correspond_by_their_role() -> None:
    other = byte_level(["q", "</s>", "<bos>"], eos_token="</s>", bos_token="<bos>")
    assert spelt(tokenizer(), other, 3, SIZE)[1:] == [[2], [1]]  # <end> and <s>


def test_a_fallback_to_bytes_is_taken_only_for_what_no_other_token_spells() -> None:
    """It stands before the letters in vocabularies made by SentencePiece, whose texts never hold it where a letter spells the same."""
    pieces = {piece: i for i, piece in enumerate(["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "A", "é"])}
    fast = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=fast)
    found = spelt(own, byte_level(["A", "ĠA", "Ã©", "ÃŁ"]), 4, len(pieces))
    assert [own.convert_ids_to_tokens(parts) for parts in found] == [["A"], ["▁", "A"], ["é"], ["<0xC3>", "<0x9F>"]]


def test_tokens_without_a_row_are_left_out(tmp_path: Path) -> None:
    """Such as a pad token that was added to a tokenizer alone, the target's or the other model's. Both were a traceback."""
    for theirs, own in ((1, 0), (0, 2), (1, 2)):
        more, whole, extra = tokenizer(), target(), shuffled(extra=4)
        more.add_special_tokens({"pad_token": "<added>"})
        whole.tokenizer = more if theirs else whole.tokenizer
        folder = tmp_path / f"{theirs}{own}"
        model = donor(folder, extra, vocab_size=100 - own)
        drafter = started(folder, Target(whole.model, whole.tokenizer), transplant=True)
        letter, known = whole.tokenizer.convert_tokens_to_ids("a"), extra.convert_tokens_to_ids("a")
        assert known < 100 - own
        assert torch.equal(drafter.lm.get_input_embeddings().weight[letter], model.get_input_embeddings().weight[known])


def test_rows_are_means() -> None:
    rows = torch.randn(7, 5, dtype=torch.float64)
    parts = [[3], [1, 2, 2], [], [6, 0]]
    expected = torch.stack([rows[3], (rows[1] + 2 * rows[2]) / 3, rows.mean(0), (rows[6] + rows[0]) / 2])
    torch.testing.assert_close(means(rows, parts), expected)


def test_all_new_rows_are_trained(tmp_path: Path) -> None:
    """Also that of the id which pads the donor's texts: torch leaves it out."""
    model = donor(tmp_path, tokenizer(), pad_token_id=0).requires_grad_(True)
    assert model.get_input_embeddings().padding_idx == 0
    for size in (SIZE, SIZE + 8):
        resize(model, size)
        embed = model.get_input_embeddings()
        embed(torch.arange(size)).sum().backward()
        assert embed.weight.grad is not None and (embed.weight.grad != 0).all()
        embed.weight.grad = None


def test_another_vocabulary_is_refused_or_replaced(tmp_path: Path) -> None:
    """It was taken in silence where both have equally many ids."""
    whole = target()
    donor(tmp_path / "other", shuffled())
    with pytest.raises(
        UserError, match=r"the tokenizer of .*other has another vocabulary \('.*head\.transplant=true gives its model the t"
    ):
        started(tmp_path / "other", whole)
    donor(tmp_path / "larger", shuffled(extra=4), vocab_size=100)
    with pytest.raises(
        UserError, match=r"a vocabulary of 100, the target 96: head\.transplant=true gives the model of .*larger the target's"
    ):
        started(tmp_path / "larger", whole)
    for settings, words in (
        (dict(folder=None, config={}, transplant=True), "is for the model of head.folder: set head.folder"),
        (dict(transplant=True, lora=dict(rank=2, alpha=4)), "head.lora would not train the rows that head.transplant makes"),
    ):
        with pytest.raises(UserError, match=words):
            hub.build("draft_lm", whole.shape, **{"folder": str(tmp_path / "other"), **settings})
    with pytest.raises(UserError, match="needs two tokenizers: the target has none"):
        started(tmp_path / "other", Target(tiny_target().model), transplant=True)
    (tmp_path / "other" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer of .*other cannot be loaded \("):
        started(tmp_path / "other", whole, transplant=True)
    (tmp_path / "other" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"needs two tokenizers: .*other has none"):
        started(tmp_path / "other", whole, transplant=True)


def test_a_parallel_draft_model_takes_another_mask(tmp_path: Path) -> None:
    """The mask that the donor's config names is a token of its own vocabulary."""
    model = donor(tmp_path, shuffled())
    model.config.pard_token = 7
    model.save_pretrained(tmp_path)
    assert started(tmp_path, target(), "pard", transplant=True).mask_token == SIZE - 1


def test_models_of_a_family_may_have_more_ids_than_tokens(tmp_path: Path) -> None:
    """The same tokenizer, other numbers of unused ids behind its tokens: such a folder drafts as it is."""
    for size in (112, 96):
        whole = Target(tiny_target(vocab_size=208 - size).model, tokenizer())
        donor(tmp_path / str(size), tokenizer(), vocab_size=size)
        drafter = open_speculator(tmp_path / str(size), whole)
        said = [generate(whole, each, [5, 6, 7], new_tokens=20, policy=TreePolicy(depth=3)).tokens for each in (None, Drafting(drafter))]
        assert said[0] == said[1]
