"""The vocabulary of a language model that is to be a draft model: whether it is the target's, and giving it the target's.

Engines want draft models that have the target's tokens. A model of another family can get them. Its layers stay as they are. Each token of
the target gets a row in the embedding and one in the output head, made from the rows of the model's own tokens that spell it: a copy where
one token does, else the mean. (The tool transplant-vocab, by jukofyork, made such draft models known, for use without training.)
Guesses are poor at first wherever a token has no copy, and training mends them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.errors import UserError, first_line
from headstart.heads.spelling import BYTE, bytes_of

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is in every folder with a tokenizer
ROLES = ("pad_token_id", "bos_token_id", "eos_token_id")  # special tokens that correspond whatever their text; the last named counts most


def tokenizer_of(folder: str) -> Any:
    """The tokenizer of a model's folder, or of its name on the hub; None for a folder without one. Raises UserError if it is damaged."""
    from transformers import AutoTokenizer

    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as e:  # transformers and the tokenizers library raise a dozen kinds
        raise UserError(f"the tokenizer of {folder} cannot be loaded ({first_line(e)})") from e


def check_same(what: str, own: Any, theirs: Any, cure: str) -> None:
    """Raises UserError where two tokenizers give a token different ids. For the message: ``what`` names the first tokenizer, the second is
    the target's; ``cure``: what to do.
    """
    ids, other = own.get_vocab(), theirs.get_vocab()
    if ids != other:
        word = min(ids.items() ^ other.items())[0]
        raise UserError(f"{what} has another vocabulary ({word!r} is {ids.get(word)} there, {other.get(word)} in the target's): {cure}")


def resize(lm: Any, vocabulary: int) -> None:
    """Give embedding and output head ``vocabulary`` rows, in place: the first of the old ones, then rows that stand for no token."""
    before = lm.get_input_embeddings().num_embeddings
    lm.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad():
        for table in _tables(lm):
            table.weight[before:] = table.weight[:before].mean(0)  # a guess of such a row is improbable
    lm.get_input_embeddings().padding_idx = None  # torch would not train this row


def transplant(lm: Any, donor: Any, own: Any, theirs: Any) -> int:
    """Fill embedding and output head of ``lm`` for the target's tokens from those of ``donor``, the model before ``resize``. ``own`` and
    ``theirs``: the tokenizers of donor and target. Returns how many tokens of the target are copies of one token.
    """
    tables, before = _tables(lm), _tables(donor)
    parts = spelt(own, theirs, len(tables[0].weight), len(before[0].weight))
    with torch.no_grad():
        for table, old in zip(tables, before, strict=True):
            table.weight.copy_(means(old.weight, parts))
    return sum(len(each) == 1 for each in parts)


def spelt(own: Any, theirs: Any, vocabulary: int, rows: int) -> list[list[int]]:
    """For every id of the target's vocabulary, the own tokens that spell its token together, from left to right and each as long as
    possible. Empty for ids that stand for no token, and for tokens that cannot be spelt. Own tokens from ``rows`` on have no row.
    """
    # Of tokens with the same text the last one here is taken: a fallback to bytes is never trained where another token has that text.
    order = sorted(own.get_vocab().items(), key=lambda each: (BYTE.fullmatch(each[0]) is not None, each[1]), reverse=True)
    known = {bytes(raw): token for _, token in order if token < rows and (raw := bytes_of(own, token))}
    longest, found = max(map(len, known)), [list[int]() for _ in range(vocabulary)]
    for token in theirs.get_vocab().values():
        rest = bytes(bytes_of(theirs, token) or [])
        while rest and token < vocabulary:
            end = next((end for end in range(min(longest, len(rest)), 0, -1) if rest[:end] in known), 0)
            found[token] += [known[rest[:end]]] if end else []
            rest = rest[end or 1 :]
    for role in ROLES:
        ours, its = getattr(own, role), getattr(theirs, role)
        if ours is not None and its is not None and ours < rows and its < vocabulary:
            found[its] = [ours]
    return found


def means(rows_VD: Tensor, parts: list[list[int]]) -> Tensor:
    """For each list the mean of these rows, [len(parts), D]; of an empty list, that of all rows."""
    ids = torch.tensor([token for each in parts for token in each])
    counts = torch.tensor([len(each) for each in parts])
    found_VD = F.embedding_bag(ids, rows_VD, counts.cumsum(0) - counts, mode="mean")
    found_VD[counts == 0] = rows_VD.mean(0)
    return found_VD


def _tables(lm: Any) -> list[Any]:
    """Embedding and output head; one of them where they are tied."""
    embed, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    return [embed] if head.weight is embed.weight else [embed, head]
