"""The endpoint says what plain decoding says, to everyone at once; what is wrong with one request is told to it and harms no other."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from headstart.heads import hub
from headstart.heads.spelling import HALF
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.serving import serve
from tests.inference.serving.served import COMPLETIONS, PROMPTS, ask, ask_all, client, drafter, figures, greedy, plain, running, until
from tests.inference.serving.speech import NEW, target, text_of
from tests.tiny_targets import tiny_target


@pytest.mark.parametrize("drafted", [True, False])
@running
async def test_everyone_gets_what_plain_decoding_says(drafted: bool) -> None:
    async with client(drafted) as it:
        asked = [greedy(i % 5, NEW - i % 3, stream=i % 2 == 0, stream_options={"include_usage": True}) for i in range(12)]
        for body, answer in zip(asked, await asyncio.gather(*(ask(it, body) for body in asked)), strict=True):
            said = plain(PROMPTS.index(body["prompt"]))[: body["max_tokens"]]
            assert answer["token_ids"] == said and answer["text"] == text_of(said) and answer["finish_reason"] == "length"
            old, new = len(body["prompt"]), len(said)
            assert answer["usage"] == {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
            assert not body["stream"] or (answer["pieces"] < new if drafted else answer["pieces"] == new)
        await until(it, requests_running=0, requests_waiting=0, rows_free=2)
        seen = await figures(it)
        assert seen["tokens_total"] == sum(body["max_tokens"] for body in asked)
        assert seen["prompt_tokens_total"] == sum(len(body["prompt"]) for body in asked)
        assert seen[f'requests_total{{path="{COMPLETIONS}",status="200"}}'] == 12 and seen["engine_restarts_total"] == 0
        assert seen["accepted_length"] == pytest.approx((seen["tokens_total"] - 12) / seen["target_passes_total"])
        depths = [seen.get(f'acceptance{{depth="{d}"}}', 0.0) for d in range(1, 6)]
        passes, own = seen["target_passes_total"], seen["tokens_total"] - 12 - sum(depths) * seen["target_passes_total"]
        assert (
            passes - 12 - 1e-6 <= own <= passes + 1e-6
        )  # every pass has the target's own token, but for those that an answer's limit cuts
        assert own == pytest.approx(round(own)) and depths == sorted(depths, reverse=True)
        assert seen["accepted_length"] > 1.1 if drafted else seen["accepted_length"] == 1


@pytest.mark.parametrize("drafted", [True, False])
@running
async def test_a_stop_string_across_accepted_tokens_is_cut_out(drafted: bool) -> None:
    said = plain(0)
    text = text_of(said)
    async with client(drafted) as it:
        for at in (at for at in range(1, len(text) - 3, 2) if HALF not in text[at : at + 3]):
            stop = [text[at : at + 3], "never said"]
            until_then = next(n for n in range(NEW + 1) if stop[0] in text_of(said[:n]))
            for stream in (False, True):
                answer = await ask(it, greedy(0, stop=stop, stream=stream))
                assert answer["text"] == text[: text.index(stop[0])] and answer["finish_reason"] == "stop"
                assert answer["token_ids"] == said[:until_then]
        await until(it, requests_running=0, rows_free=2)


@running
async def test_an_end_of_text_token_stops_and_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = plain(0), drafter()  # which learns texts that must not end early
    monkeypatch.setattr(type(target()), "stop_ids", (said[5],))
    async with client() as it:
        answer = await ask(it, greedy(0))
        first = said.index(said[5])
        assert answer["finish_reason"] == "stop" and answer["text"] == text_of(said[:first])
        assert answer["usage"]["completion_tokens"] == first + 1


@running
async def test_a_seed_gives_the_same_text_in_any_company() -> None:
    body = greedy(0, seed=7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1) | {"temperature": 1.0}
    how = SamplingParams(1.0, 20, 0.9, 0.01, 1.1, seed=7)
    async with client(False) as it:
        one, *_, other = await asyncio.gather(ask(it, body), *(ask(it, greedy(i)) for i in range(4)), ask(it, body | {"stream": True}))
        alone = generate(target(), None, PROMPTS[0], new_tokens=NEW, sampling=how).tokens
        assert one["token_ids"] == other["token_ids"] == alone
        free = {tuple((await ask(it, {"prompt": PROMPTS[0], "max_tokens": 8, "return_token_ids": True}))["token_ids"]) for _ in range(4)}
        assert len(free) > 1  # temperature 1 and another seed where neither is given


@running
async def test_a_client_that_leaves_frees_its_row_and_its_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, before_it = threading.Semaphore(0), threading.Semaphore(0)

    class Gated(Engine):
        def step(self) -> Any:
            before_it.release()
            assert gate.acquire(timeout=30)
            return super().step()

    monkeypatch.setattr(serve, "Engine", Gated)
    async with client() as it:
        gate.release()  # its prompt is read
        leaving = await it.post(COMPLETIONS, json=greedy(0, stream=True))
        for _ in range(2):
            await asyncio.to_thread(before_it.acquire)  # until the next round has begun: who comes now, waits for its end
        staying = asyncio.ensure_future(ask(it, greedy(1)))
        await until(it, requests_waiting=1)
        gate.release()
        await until(it, requests_running=2)
        impatient = asyncio.ensure_future(ask(it, greedy(2)))
        await until(it, requests_waiting=1)
        patient = asyncio.ensure_future(ask(it, greedy(3)))
        await until(it, requests_waiting=2)
        impatient.cancel()
        leaving.close()
        while (await figures(it)).get(f'requests_total{{path="{COMPLETIONS}",status="499"}}') != 2:
            await asyncio.sleep(0.01)
        gate.release(2)  # the round that was waited for, and one after it
        await until(it, requests_waiting=0, requests_running=2)
        gate.release(1000)
        assert (await staying)["token_ids"] == plain(1) and (await patient)["token_ids"] == plain(3)
        await until(it, requests_running=0, rows_free=2)
        assert (await figures(it))["prompt_tokens_total"] == sum(len(PROMPTS[i]) for i in (0, 1, 3))  # the impatient one's was not read


@running
async def test_an_engine_that_fails_is_built_anew_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    all_here = threading.Event()

    class Fragile(Engine):
        left = 0  # steps until one fails

        def add_request(self, prompt: Any, **how: Any) -> Any:
            row = super().add_request(prompt, **how)
            if list(prompt) == PROMPTS[4]:
                raise RuntimeError("out of memory, for example")
            return row

        def step(self) -> Any:
            assert all_here.wait(timeout=30)
            made = super().step()
            Fragile.left -= 1
            if Fragile.left == 0:
                raise RuntimeError("a kernel failed, for example")
            return made

    monkeypatch.setattr(serve, "Engine", Fragile)
    async with client(sequences=3) as it:
        others = [asyncio.ensure_future(ask(it, greedy(1, 70, stream=True)))]
        await until(it, requests_running=1)
        others.append(asyncio.ensure_future(ask(it, greedy(2, 70))))
        await until(it, requests_waiting=1)
        failed = [asyncio.ensure_future(it.post(COMPLETIONS, json=greedy(4, stream=i == 1))) for i in range(2)]
        await until(it, requests_waiting=3)
        all_here.set()
        for response in await asyncio.gather(*failed):
            assert response.status == 500 and (await response.json())["error"]["code"] == "engine_failed"
        for i, answer in zip((1, 2), await asyncio.gather(*others), strict=True):
            assert answer["token_ids"] == plain(i, 70)
        assert (await figures(it))["engine_restarts_total"] == 2
        Fragile.left = 2
        async with it.post(COMPLETIONS, json=greedy(0, stream=True)) as response:  # it fails after its first token
            *_, last = (await response.text()).strip().split("\n\n")
            assert json.loads(last[6:])["error"]["type"] == "server_error"
        assert (await figures(it))[f'requests_total{{path="{COMPLETIONS}",status="500"}}'] == 3
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)
        await until(it, requests_running=0, rows_free=3)

        def gone(*args: Any, **how: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(serve, "Engine", gone)
        Fragile.left = 1
        assert (await it.post(COMPLETIONS, json=greedy(0))).status == 500
        while (await it.get("/health")).status != 503:
            await asyncio.sleep(0.01)
        assert (await it.post(COMPLETIONS, json=greedy(0))).status == 503


@running
async def test_a_full_queue_sends_away_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Gated(Engine):
        def step(self) -> Any:
            assert gate.wait(timeout=30)
            return super().step()

    monkeypatch.setattr(serve, "Engine", Gated)
    async with client(sequences=1, queue=2) as it:
        staying = [asyncio.ensure_future(ask(it, greedy(0)))]
        await until(it, requests_running=1)
        staying.append(asyncio.ensure_future(ask_all(it, greedy(0) | {"prompt": PROMPTS[1:3]})))  # type: ignore[arg-type]
        await until(it, requests_waiting=2)
        for stream in (False, True):
            async with it.post(COMPLETIONS, json=greedy(3, stream=stream)) as response:
                assert response.status == 429 and response.headers["Retry-After"].isdecimal()
                assert (await response.json())["error"]["type"] == "rate_limit_error"
        gate.set()
        first, others = await asyncio.gather(*staying)
        assert first["token_ids"] == plain(0) and [o["token_ids"] for o in others] == [plain(1), plain(2)]  # type: ignore[call-overload, index]
        assert (await ask(it, greedy(3)))["token_ids"] == plain(3)
        assert (await figures(it))[f'requests_total{{path="{COMPLETIONS}",status="429"}}'] == 2
        gate.clear()
        one = asyncio.ensure_future(ask(it, greedy(0)))
        await until(it, requests_running=1)
        async with it.post(COMPLETIONS, json=greedy(3, n=3)) as response:
            assert response.status == 429, "there is room for two, not for three"
        gate.set()
        await one
        four = await ask_all(it, greedy(3, n=4))
        assert [each["token_ids"] for each in four] == [plain(3)] * 4, "alone, more than the queue holds may come"


def test_a_draft_model_with_learned_positions_serves_beside_idle_rows() -> None:
    """Three sequences in four rows; the draft model is the target itself, so that the idle row accepts guesses too."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
    gpt = tiny_target("gpt2", **sizes)
    draft = hub.build("draft_lm", gpt.shape, config={**gpt.config.to_diff_dict(), "model_type": "gpt2"}).eval()
    draft.lm.load_state_dict(gpt.model.state_dict())  # type: ignore[union-attr, operator]
    draft.attach(gpt.ends)
    engine = Engine(gpt, draft, sequences=4, max_length=60, plans=TreePolicy("chain", depth=3))
    rows = engine.run(PROMPTS[:3], new_tokens=12, sampling=[SamplingParams()] * 3)
    assert [row.tokens for row in rows] == [generate(gpt, None, p, new_tokens=12).tokens for p in PROMPTS[:3]]
