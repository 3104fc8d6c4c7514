"""Plain text from any source: every token is supervised, documents end with the end-of-text token, and prompts are held-out text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from headstart.data.pack import encode
from headstart.data.packed import Document
from headstart.data.source import Source, live
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target

LENGTHS = (64, 32, 16, 8)  # tokens of a prompt; the shorter lengths are for short held-out texts
LINES = re.compile(r"^(?=\S)", re.MULTILINE)
PARAGRAPHS = re.compile(r"(?:\A|(?<=\n\n))(?=\S)")


class Text(NamedTuple):
    """A text, or a part of one."""

    name: str
    text: str
    ends: bool = True  # False: another part of the same text follows


Groups = dict[str, list[tuple[str, str]]]  # the (name, text) pairs of each group
Starts = tuple[re.Pattern[str], ...]  # where a prompt may begin; matches of the last pattern are used first


def encode_texts(tokenizer: Any, texts: Sequence[Text]) -> list[Document]:
    """Documents with every token supervised, and the end-of-text token after each text that ends. Raises UserError without such a token."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the target's tokenizer has no end-of-text token, which plain text is separated by: set eos_token in the target's "
            "tokenizer_config.json, or take data=chat"
        )
    found = []
    for start in range(0, len(texts), 256):
        some = texts[start : start + 256]
        for text, ids in zip(some, tokenizer([t.text for t in some], verbose=False)["input_ids"], strict=True):
            ends = bool(ids) and ids[-1] == tokenizer.eos_token_id
            if text.ends and not ends:
                ids = [*ids, tokenizer.eos_token_id]
            found.append(encode(ids[:-1] if ends and not text.ends else ids))
    return found


def source(target: Target, train: Sequence[Text], held: Sequence[Text], length: int, seed: int, starts: Starts, groups: Groups) -> Source:
    """A source of plain text. Prompts come from the held-out texts in ``groups``, each group in turn, and begin where ``starts`` match.

    Raises UserError for a tokenizer without an end-of-text token, a wrong ``length``, and documents without anything to learn.
    """
    tokenizer = target.tokenizer
    documents, held_out = encode_texts(tokenizer, train), encode_texts(tokenizer, held)
    return live(target, documents, held_out, length, seed, lambda count, new: asked(tokenizer, groups, count, seed, starts))


def asked(tokenizer: Any, groups: Groups, count: int, seed: int, starts: Starts) -> list[list[int]]:
    """Up to ``count`` prompts as tokens. Each begins with the target's beginning-of-text token, if its tokenizer adds one."""
    found = dict[str, list[int]]()
    for length in LENGTHS:
        if len(found) < count:
            for prompt in prompts(groups, count, seed, tokenizer, length, starts):
                ids = tokenizer(prompt["text"], verbose=False)["input_ids"]
                found.setdefault(prompt["id"], ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids)
    return list(found.values())[:count]


def prompts(groups: Groups, count: int, seed: int, tokenizer: Any, tokens: int, starts: Starts) -> list[dict[str, str]]:
    """``count`` prompts of ``tokens`` tokens each, from the groups in turn, as {"id", "text"}. A prompt begins where one of the patterns
    ``starts`` matches. Matches of the last pattern are used first. The same seed gives the same prompts. If the text runs out, there are
    fewer than ``count``.
    """
    rng = random.Random(seed)
    texts = {name: text for group in groups.values() for name, text in group}
    places: dict[str, list[tuple[str, int]]] = {}
    for pattern in starts:  # places are used from the end of the list
        for group, members in groups.items():
            here = [(name, match.start()) for name, text in members for match in pattern.finditer(text)]
            rng.shuffle(here)
            places[group] = places.get(group, []) + here
    order = list(groups)
    rng.shuffle(order)
    used: set[tuple[str, int]] = set()

    def next_of(group: str) -> dict[str, str] | None:
        while places[group]:
            name, start = place = places[group].pop()
            # 16 characters for each token: more than the tokens of any tokenizer have on average
            text = texts[name][start : start + 16 * tokens]
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
            if place not in used and len(ids) == tokens:
                used.add(place)
                line = texts[name].count("\n", 0, start) + 1
                return {"id": f"{name}:{line}", "text": tokenizer.decode(ids).rstrip("\ufffd")}
        return None

    found: list[dict[str, str]] = []
    while len(found) < count and any(places.values()):
        for group in order:
            if len(found) < count and (prompt := next_of(group)):
                found.append(prompt)
    return found
