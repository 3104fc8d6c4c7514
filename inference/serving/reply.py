"""An answer as OpenAI's JSON has it: the choices of a completion or a chat, whole or piece by piece, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headstart.heads.spelling import HALF, bytes_of, text_of_token
from headstart.inference.serving.asked import Asked
from headstart.inference.serving.text import Reader
from headstart.inference.serving.thoughts import Splitter

LOWEST = -9999.0  # OpenAI's log-probability of an impossible token: JSON has no infinity

Best = tuple[float, list[tuple[int, float]]]  # the token's log-probability; then the likeliest tokens with theirs


class Piece(NamedTuple):
    """The part by which an answer grew."""

    text: str
    thought: str  # separated from the text; "" if thoughts are not to be returned
    tokens: list[int]  # of both, with the marks between them
    best: Sequence[Best | None]  # one for each token, if log-probabilities were asked for; None for a prompt's first token


class Answer:
    """One of the choices that answer a request, built from its tokens as they come."""

    def __init__(self, asked: Asked, index: int, tokenizer: Any) -> None:
        self.asked, self.index, self.tokenizer = asked, index, tokenizer
        prompt, self.splitter = asked.prompts[index // asked.n], Splitter(asked.marks, asked.begun)
        self.reader, self.thinker = Reader(tokenizer, prompt, asked.stops, asked.min_tokens), Reader(tokenizer, prompt)
        self.text, self.thought, self.tokens, self.best = "", "", list[int](), list[Best | None]()
        self.kept = ""  # the thought, also where it is not to be returned
        self.ended, self.begun = "", False
        self.place, self.offset = Reader(tokenizer, () if asked.echo else prompt), 0  # to find where a completion's next token begins
        self.echoed: int | None = None if asked.echo else 0  # tokens of the prompt that were returned; None: they are still to be returned

    def take(self, tokens: list[int], ended: str, best: list[Best], prompt: Sequence[Best] = ()) -> Piece:
        """Add tokens; returns the piece they make. ``ended``: why no more tokens come, or "". A stop string can end the answer earlier, but
        not a thought. ``prompt``: the log-probabilities of the prompt's tokens except the first, if they are to be returned.
        """
        piece = self._grow(tokens, ended, best)
        if self.echoed is None:
            known = self.asked.prompts[self.index // self.asked.n]
            text = self.tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False) + piece.text
            scores = [] if self.asked.logprobs is None else [None, *prompt]
            piece = Piece(text, piece.thought, [*known, *piece.tokens], [*scores, *piece.best])
            self.echoed = len(known)
        self.text += piece.text
        self.thought += piece.thought
        self.tokens += piece.tokens
        self.best += piece.best
        return piece

    def _grow(self, tokens: list[int], ended: str, best: list[Best]) -> Piece:
        before, shown, thinking = self.said, tokens[:-1] if ended == "stop" else tokens, self.splitter.open is not False
        inner, answer = self.splitter.split(shown, last=bool(ended))
        over = bool(ended) or self.splitter.open is False
        thought = self.thinker.push(inner) + (self.thinker.end() if over else "") if thinking else ""
        self.reader.count = before + len(shown) - len(self.splitter.held) - len(answer)  # of the thought and the marks
        text = self.reader.push(answer) + (self.reader.end() if ended else "")
        if self.reader.stopped:
            tokens, ended = tokens[: max(self.reader.count - before, 0)], "stop"
        self.ended, self.kept = ended, self.kept + thought
        return Piece(text, thought if self.asked.thoughts else "", tokens, best[: len(tokens)])

    @property
    def said(self) -> int:
        """The number of the answer's tokens, without those of the prompt."""
        return len(self.tokens) - (self.echoed or 0)

    def whole(self) -> dict[str, Any]:
        """The choice as it stands in an answer that is not streamed."""
        return self._choice(self._said(self.thought), Piece(self.text, self.thought, self.tokens, self.best))

    def _said(self, thought: str) -> dict[str, Any]:
        said = message_of(Piece(self.text, thought, [], []))
        return {"message": {"role": "assistant"} | said} if self.asked.chat else {"text": self.text}

    def to_record(self) -> dict[str, Any]:
        """The whole choice as the log of the endpoint has it: what was said, why it ended, and which stop string ended it, as vLLM says."""
        reason = {"finish_reason": self.ended, "stop_reason": self.reader.by or None}
        return {"index": self.index} | self._said(self.kept) | reason

    def part(self, piece: Piece) -> dict[str, Any] | None:
        """The choice as it stands in a stream's chunk; None where the chunk would be empty."""
        role, self.begun = {} if self.begun else {"role": "assistant"}, True
        if not (piece.text or piece.thought or role or self.ended or self.asked.token_ids or piece.best):
            return None
        return self._choice({"delta": role | message_of(piece)} if self.asked.chat else {"text": piece.text}, piece)

    def _choice(self, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        shown = {"token_ids": piece.tokens} if self.asked.token_ids else {}
        found = None if self.asked.logprobs is None else self._of_chat(piece) if self.asked.chat else self._of_completion(piece)
        return {"index": self.index} | said | shown | {"logprobs": found, "finish_reason": self.ended or None}

    def _of_completion(self, piece: Piece) -> dict[str, Any]:
        """A completion's log-probabilities: parallel lists. ``text_offset`` is where in the text a token begins. A token that is a part of
        a character begins where the character does; a special token, which has no text, where the next token does.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, best in zip(piece.tokens, piece.best, strict=True):
            found["tokens"].append(name_of_token(self.tokenizer, token))
            found["token_logprobs"].append(None if best is None else finite(best[0]))
            likeliest = [] if best is None else reversed([(token, best[0]), *best[1]])
            told = {name_of_token(self.tokenizer, t): finite(p) for t, p in likeliest}
            found["top_logprobs"].append(None if best is None else told)
            found["text_offset"].append(self.offset)
            self.offset += len(self.place.push([token]))
        return found

    def _of_chat(self, piece: Piece) -> dict[str, Any]:
        """A chat's log-probabilities: those of the message's tokens, without a stop token that ends the message."""
        count = len(piece.tokens) - (self.ended == "stop" and not self.reader.stopped)

        def entry(token: int, p: float) -> dict[str, Any]:
            return {"token": text_of_token(self.tokenizer, token), "logprob": finite(p), "bytes": bytes_of(self.tokenizer, token)}

        content = [
            entry(token, said) | {"top_logprobs": [entry(t, p) for t, p in likeliest]}
            for token, (said, likeliest) in zip(piece.tokens[:count], filter(None, piece.best[:count]), strict=True)
        ]
        return {"content": content, "refusal": None}


def message_of(piece: Piece) -> dict[str, str]:
    """What a chat's message or delta says."""
    return {"content": piece.text} | ({"reasoning_content": piece.thought} if piece.thought else {})


def finite(log_probability: float) -> float:
    """The log-probability, but at least ``LOWEST``: JSON has no infinity."""
    return max(log_probability, LOWEST)


def name_of_token(tokenizer: Any, token: int) -> str:
    """The token's text. A token that is a part of a character is named by its bytes, as by OpenAI: else many would have the same name."""
    text = text_of_token(tokenizer, token)
    if HALF not in text or (raw := bytes_of(tokenizer, token)) is None:
        return text
    return "bytes:" + bytes(raw).decode(errors="backslashreplace")


def usage(asked: Asked, answers: list[Answer]) -> dict[str, Any]:
    """The counts of tokens that were read and generated."""
    old, new = sum(map(len, asked.prompts)), sum(answer.said for answer in answers)
    of_thoughts = {"reasoning_tokens": sum(answer.thinker.count for answer in answers)}
    more = {"completion_tokens_details": of_thoughts} if asked.marks is not None else {}
    return {"usage": {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new} | more}
