"""The text of a single token, as it stands in a longer text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

HALF = "\ufffd"  # what tokenizers write for a character whose bytes are not all there
KEPT = 1 << 16  # tokens whose texts are cached: with log-probabilities, an answer needs each of them several times


@functools.lru_cache(maxsize=KEPT)
def text_of_token(tokenizer: Any, token: int) -> str:
    """The token's text within a longer text. It is decoded twice in a row, because some tokenizers drop a space at the beginning."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False, clean_up_tokenization_spaces=False) for n in (1, 2))
    text: str = twice[len(once) :] if twice.startswith(once) and HALF not in once else once
    return text


def spelling_of(tokenizer: Any, lists: Iterable[Sequence[int]]) -> dict[int, str]:
    """The text of every token that occurs in the lists; empty without a tokenizer."""
    used = {token for tokens in lists for token in tokens}
    return {} if tokenizer is None else {token: text_of_token(tokenizer, token) for token in sorted(used)}
