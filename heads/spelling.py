"""The text and the bytes of a single token, as they stand in a longer text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

HALF = "\ufffd"  # what tokenizers write for a character whose bytes are not all there
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how vocabularies with a fallback to bytes write the tokens of single bytes
KEPT = 1 << 16  # tokens whose texts are cached: with log-probabilities, an answer needs each of them several times


@functools.lru_cache(maxsize=KEPT)
def text_of_token(tokenizer: Any, token: int) -> str:
    """The token's text within a longer text. It is decoded twice in a row, because some tokenizers drop a space at the beginning."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False, clean_up_tokenization_spaces=False) for n in (1, 2))
    text: str = twice[len(once) :] if twice.startswith(once) and HALF not in once else once
    return text


@functools.lru_cache(maxsize=KEPT)
def bytes_of(tokenizer: Any, token: int) -> list[int] | None:
    """The bytes that a token adds to a text in UTF-8, even where they are a part of a character; None where the tokenizer does not say."""
    text = text_of_token(tokenizer, token)
    if HALF not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := BYTE.fullmatch(piece):
        return [int(byte[1], 16)]
    letters = _letters()
    return [letters[c] for c in piece] if letters.keys() >= set(piece) else None


@functools.cache
def _letters() -> dict[str, int]:
    """The letter of byte-level vocabularies -> the byte that it stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def spelling_of(tokenizer: Any, lists: Iterable[Sequence[int]]) -> dict[int, str]:
    """The text of every token that occurs in the lists; empty without a tokenizer."""
    used = {token for tokens in lists for token in tokens}
    return {} if tokenizer is None else {token: text_of_token(tokenizer, token) for token in sorted(used)}
