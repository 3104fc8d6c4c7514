"""Log-probabilities in OpenAI's two forms, and the text and bytes of one token."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest
import torch

from headstart.heads.spelling import HALF, bytes_of, spelling_of, text_of_token
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.serving import reply, serve, worker
from tests.drafters import random_tokens
from tests.inference.serving import speech
from tests.inference.serving.served import CHAT, COMPLETIONS, PROMPTS, ask, ask_all, client, figures, greedy, plain, running, until
from tests.inference.serving.speech import NEW, target, text_of, tokenizer


def test_a_tokens_own_text_and_bytes() -> None:
    """Together they make the text that all tokens make: halves of characters, spaces that a text begins with."""
    for made in (tokenizer(), speech.spaced()):
        for token in range(3, len(made)):
            text, raw = text_of_token(made, token), bytes_of(made, token)
            assert raw is not None and (HALF in text or raw == list(text.encode()))
            assert (HALF in text) == (HALF in made.decode([token]))
    spaced = speech.spaced()
    a, b, euro = (spaced.convert_tokens_to_ids(t) for t in ("▁a", "b", "<0xE2>"))
    assert [text_of_token(spaced, t) for t in (a, b)] == [" a", "b"] and bytes_of(spaced, euro) == [0xE2]
    assert spelling_of(spaced, [[a, b], [a]]) == {a: " a", b: "b"} and spelling_of(None, [[a]]) == {}, "as reports show texts"
    known = tokenizer()
    said = [3, 4, 5, 6, 7, *known("a b")["input_ids"]]
    assert bytes(byte for token in said for byte in bytes_of(known, token) or []).decode() == known.decode(said)
    assert reply.finite(float("-inf")) == -9999.0 and reply.finite(-1.5) == -1.5


def named(token: int) -> str:
    """As OpenAI names a token: tokens that are a byte of a longer character by that."""
    at = token - len(speech.SPECIAL)
    raw = speech.CHARACTERS.encode()
    return f"bytes:\\x{raw[at]:02x}" if 0 <= at < len(raw) else str(tokenizer().decode([token]))


def test_every_token_has_a_name_of_its_own() -> None:
    """Those of part of a character too: in ``top_logprobs`` one overwrote the other."""
    for made in (tokenizer(), speech.spaced()):
        assert len({reply.name_of_token(made, token) for token in range(len(made))}) == len(made)
    assert [reply.name_of_token(tokenizer(), token) for token in range(96)] == [named(token) for token in range(96)]


def test_a_token_is_decoded_once_however_often_it_is_told() -> None:
    speech, read = tokenizer(), list[int]()

    class Counted:
        def decode(self, tokens: list[int], **how: Any) -> str:
            read.append(len(tokens))
            return str(speech.decode(tokens, **how))

    counted = Counted()
    assert [bytes_of(counted, 12) for _ in range(9)] == [[32]] * 9 and text_of_token(counted, 12) == " "
    assert len(read) == 2


@running
async def test_log_probabilities_have_openais_form() -> None:
    said = plain(0)
    with torch.no_grad():
        truth = target().model(torch.tensor([PROMPTS[0] + said])).logits[0].log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    async with client() as it:
        for count in (0, 3):
            whole = (await ask(it, greedy(0, logprobs=count)))["logprobs"]
            assert whole["tokens"] == [named(token) for token in said]
            assert whole["token_logprobs"] == pytest.approx(truth.max(-1).values.tolist(), abs=1e-4)
            for likeliest, p_V in zip(whole["top_logprobs"], truth, strict=True):
                values, tokens = p_V.topk(max(count, 1))
                assert likeliest == pytest.approx({named(int(t)): float(v) for v, t in zip(values, tokens, strict=True)}, abs=1e-4)
            assert whole["text_offset"] == [len(text_of(said[:i]).rstrip(HALF)) for i in range(NEW)]
            parts = [p for p in (await ask(it, greedy(0, logprobs=count, stream=True)))["logprobs"] if p]
            assert {key: [x for p in parts for x in p[key]] for key in whole} == whole and len(parts) > 1
        other = await ask(it, greedy(0, logprobs=2, temperature=1.0, seed=3))
        assert any(len(likeliest) == 3 for likeliest in other["logprobs"]["top_logprobs"])  # what was said, beside the likeliest two
        held = greedy(0, logprobs=2, stop_token_ids=[said[2]], min_tokens=NEW)
        answer = await ask(it, held)  # what it must not say yet keeps its probability
        text = PROMPTS[0] + answer["token_ids"]
        with torch.no_grad():
            raw = target().model(torch.tensor([text])).logits[0].log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
        assert answer["token_ids"][:2] == said[:2] and answer["token_ids"][2] != said[2]
        of_each = [float(p_V[token]) for p_V, token in zip(raw, answer["token_ids"], strict=True)]
        assert answer["logprobs"]["token_logprobs"] == pytest.approx(of_each, abs=1e-4)
        assert max(answer["logprobs"]["top_logprobs"][2].values()) > of_each[2]
        assert (await ask(it, greedy(0)))["logprobs"] is None
        cut = await ask(it, greedy(0, logprobs=1, stop=text_of(said)[4:6]))
        assert len(cut["logprobs"]["tokens"]) == len(cut["token_ids"]) < NEW
        body = {"messages": [{"role": "user", "content": "é?"}], "temperature": 0, "max_tokens": NEW, "return_token_ids": True}
        choice = await ask(it, body | {"logprobs": True, "top_logprobs": 2}, CHAT)
        content = choice["logprobs"]["content"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode(errors="replace") == choice["message"]["content"]
        for entry in content:
            (first, p), second = ((e["token"], e["logprob"]) for e in entry["top_logprobs"])
            assert (first, p) == (entry["token"], entry["logprob"]) and p > second[1] and len(entry["top_logprobs"]) == 2
        none = await ask(it, body | {"logprobs": True}, CHAT)
        assert [entry["top_logprobs"] for entry in none["logprobs"]["content"]] == [[]] * NEW
        parts = [e for p in (await ask(it, body | {"logprobs": True, "stream": True}, CHAT))["logprobs"] if p for e in p["content"]]
        assert parts == none["logprobs"]["content"]
        ended = choice["token_ids"][4]
        ended = await ask(it, body | {"logprobs": True, "stop_token_ids": [ended]}, CHAT)
        assert len(ended["logprobs"]["content"]) == len(ended["token_ids"]) - 1  # the token that ends a message is none of it


@running
async def test_a_prompt_that_is_echoed_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lm-evaluation-harness judges by: the prompt's tokens, the first without a probability, then the answer's."""
    monkeypatch.setattr(worker, "PIECE", 4)
    prompt, said = PROMPTS[0], plain(0)[:1]
    with torch.no_grad():
        truth = target().model(torch.tensor([prompt + said])).logits[0].log_softmax(-1)
    of_each = [float(p_V[token]) for p_V, token in zip(truth, [*prompt[1:], *said], strict=False)]
    async with client() as it:
        for new, count, stream in ((1, 1, False), (1, 2, True), (0, 0, False), (0, 2, True)):
            body = greedy(0, new, echo=True, logprobs=count, stream=stream, stream_options={"include_usage": True} if stream else None)
            answer = await ask(it, body)
            (found,) = [x for x in answer["logprobs"] if x] if stream else [answer["logprobs"]]
            text = text_of(prompt + said[:new])
            assert answer["text"] == text and answer["token_ids"] == prompt + said[:new] and answer["finish_reason"] == "length"
            assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": new, "total_tokens": len(prompt) + new}
            first, *others = found["token_logprobs"]
            assert first is None and others == pytest.approx(of_each[: len(prompt) - 1 + new], abs=1e-4)
            assert len(found["tokens"]) == len(found["top_logprobs"]) == len(prompt) + new and found["top_logprobs"][0] is None
            assert found["text_offset"] == [len(text_of([*prompt, *said][:i]).rstrip(HALF)) for i in range(len(prompt) + new)]
            for likeliest, p_V in zip(found["top_logprobs"][1:], truth, strict=False):
                assert not count or max(likeliest.values()) == pytest.approx(float(p_V.max()), abs=1e-4)
                assert count <= len(likeliest) <= count + 1 or not count
        alone = await ask(it, {"prompt": [5], "max_tokens": 0, "echo": True, "logprobs": 1})
        assert alone["logprobs"]["token_logprobs"] == [None] and alone["text"] == text_of([5])
        told = await ask(it, greedy(0, echo=True))  # without log-probabilities nothing is scored
        assert (told["text"], told["token_ids"], told["logprobs"]) == (text_of(prompt + plain(0)), prompt + plain(0), None)
        cut = text_of(plain(0))[4:6]
        assert (await ask(it, greedy(0, echo=True, stop=cut)))["text"] == text_of(prompt) + text_of(plain(0)).partition(cut)[0]
        texts = await ask_all(it, {"prompt": ["ab", "c"], "max_tokens": 0, "echo": True, "n": 2})
        assert [each["text"] for each in texts] == ["ab", "ab", "c", "c"]


def test_others_go_on_while_a_prompt_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round stands between two pieces of the prompt; whoever has left is scored no further."""
    passes, read, ended = list[str](), Context.read, queue.SimpleQueue[str]()
    monkeypatch.setattr(worker, "PIECE", 4)
    monkeypatch.setattr(Context, "read", lambda *about: (passes.append("score"), read(*about))[1])

    class Noting(Engine):
        def step(self) -> Any:
            passes.append("round")
            leaves.gone = leaves.gone or passes.count("round") == 3
            return super().step()

    def job(prompt: list[int], new: int, scored: bool) -> worker.Job:
        def tell(event: Any) -> None:
            assert isinstance(event, worker.Said)
            if event.ended:
                ended.put(f"{len(prompt)}, {len(event.prompt)} scored")

        return worker.Job(prompt, new, SamplingParams(), tell, (), logprobs=0 if scored else None, scored=scored)

    stays, leaves = job(random_tokens(33, seed=1), 0, True), job(random_tokens(80, seed=2), 0, True)
    served = worker.Worker(lambda: Noting(target(), None, sequences=2, max_length=100))
    for each in (job(PROMPTS[0], NEW, False), leaves, stays):
        served.submit(each)
    served.thread.start()
    assert [ended.get(timeout=30) for _ in range(2)] == ["33, 32 scored", f"{len(PROMPTS[0])}, 0 scored"]
    served.stop()
    assert passes[:22] == ["score", "round"] * 11 and passes.count("score") == 3 + 32 // 4


@running
async def test_a_prompt_that_cannot_be_scored_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said, read, reads = plain(1), Context.read, list[int]()
    monkeypatch.setattr(worker, "PIECE", 4)

    def fails(self: Context, tokens_R: torch.Tensor, *more: Any) -> Any:
        reads.append(len(tokens_R))
        if len(reads) == 2:
            raise RuntimeError("out of memory, for example")
        return read(self, tokens_R, *more)

    monkeypatch.setattr(Context, "read", fails)
    scored = greedy(0, 0, echo=True, logprobs=0)
    async with client(False) as it:
        other, first = await asyncio.gather(ask(it, greedy(1)), it.post(COMPLETIONS, json=scored))
        assert first.status == 500 and (await first.json())["error"]["code"] == "engine_failed"
        assert other["token_ids"] == said
        assert len((await ask(it, scored))["logprobs"]["tokens"]) == len(PROMPTS[0]) and reads == [4, 4, 4, 4, 2]
        assert (await figures(it))["engine_restarts_total"] == 1


@running
async def test_least_tokens_reach_the_engine_and_hold_stop_strings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told, all_here = list[int](), threading.Event()

    class Noting(Engine):
        def add_request(self, prompt: Any, *, sampling: Any, **how: Any) -> Any:
            told.append(sampling.min_tokens)
            if list(prompt) == PROMPTS[2]:
                raise RuntimeError("out of memory, for example")
            return super().add_request(prompt, sampling=sampling, **how)

        def step(self) -> Any:
            assert all_here.wait(timeout=30)
            return super().step()

    monkeypatch.setattr(serve, "Engine", Noting)
    said = plain(0)
    text = text_of(said)
    stop = next(c for c in text if c in text_of(said[:6]) and c in text_of(said[6:]))
    async with client(False) as it:
        first = asyncio.ensure_future(ask(it, greedy(1, min_tokens=NEW)))
        await until(it, requests_running=1)
        failing = asyncio.ensure_future(it.post(COMPLETIONS, json=greedy(2)))
        await until(it, requests_waiting=1)
        all_here.set()
        assert (await failing).status == 500 and (await first)["token_ids"] == plain(1)
        assert told[:2] == [NEW, 0] and 0 < told[2] < NEW and len(told) == 3  # what it had said counts
        answer = await ask(it, greedy(0, stop=stop, min_tokens=6))
        assert answer["text"] == text_of(said[:6]) + text_of(said[6:]).partition(stop)[0] and told[3] == 6
