"""Tokenizers of 96 tokens for the tiny random targets: ASCII characters, and one token for each byte of longer ones. Also a target with
such a tokenizer, and a drafter for it.
"""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from tests.drafters import learn_by_heart, make
from tests.tiny_targets import tiny_target

CHARACTERS = "é€😀"  # 2, 3 and 4 bytes, no byte twice: tokens 3 to 11
POLICY, NEW = TreePolicy(depth=4, nodes=10, branch=3, least=0.05), 24
SPECIAL = ["<pad>", "<s>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, size: int = 96) -> PreTrainedTokenizerFast:
    """Byte-level. The first tokens after the special ones are the bytes of CHARACTERS, then space, line break, letters, signs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = [letter for c in CHARACTERS for letter in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0]]
    plain = [" ", "\n", *"abcdefghijklmnopqrstuvwxyz:.,!?ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    made = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in plain]
    known = list(dict.fromkeys([*SPECIAL, *raw, *made, *letters]))[:size]
    fast = Tokenizer(models.BPE({token: i for i, token in enumerate(known)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return wrapped(fast, template)


def spaced() -> PreTrainedTokenizerFast:
    """Like SentencePiece: a space in front of every word, the first one dropped when decoded, unknown characters as bytes."""
    known = [*SPECIAL, *(f"<0x{b:02X}>" for b in CHARACTERS.encode()), "▁", "▁a", "b", "▁cd", "▁▁", "\n", "e"]
    fast = Tokenizer(models.BPE({token: i for i, token in enumerate(dict.fromkeys(known))}, []))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return wrapped(fast, None)


def wrapped(fast: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="<end>")
    made.chat_template = template
    return made


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@functools.cache
def target() -> Target:
    made = tiny_target()
    made.tokenizer = tokenizer()
    return made


@functools.cache
def drafter(*prompts: tuple[int, ...]) -> Drafter:
    """A drafter that has learned by heart what the target generates after these prompts."""
    texts = [[*p, *generate(target(), None, p, new_tokens=NEW).tokens][: min(map(len, prompts)) + NEW] for p in prompts]
    return learn_by_heart(make("eagle", target()), target(), texts, depth=3, steps=15)
