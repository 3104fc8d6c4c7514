"""What may be asked, and what is refused by its name; what is said to it has OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tokenizers import processors
from transformers import GenerationConfig

from headstart.inference.decoding.decode import generate
from headstart.inference.serving import serve
from headstart.inference.serving.asked import read
from headstart.inference.serving.fields import SAMPLING
from headstart.inference.serving.text import ids
from tests.inference.serving.served import CHAT, COMPLETIONS, PROMPTS, ask, ask_all, client, drafter, figures, greedy, plain, running, until
from tests.inference.serving.speech import NEW, target, text_of, tokenizer


@running
async def test_chats_are_rendered_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "yo", "refusal": None}]
    talk.append({"role": "user", "content": "é?"})
    prompt = ids(tokenizer(), "u:Hi\na:yo\nu:é?\na:", special=False)
    said = text_of(generate(target(), None, prompt, new_tokens=100 - len(prompt)).tokens)
    async with client() as it:
        body = {"model": "toy", "messages": talk, "temperature": 0}
        whole = await ask(it, body, CHAT)
        assert whole["message"] == {"role": "assistant", "content": said} and whole["usage"]["total_tokens"] == 100
        assert (await ask(it, body | {"stream": True}, CHAT))["text"] == said
        assert (await ask(it, body | {"max_completion_tokens": 3}, CHAT))["usage"]["completion_tokens"] == 3
        monkeypatch.setattr(target(), "tokenizer", tokenizer(None))
        async with it.post(CHAT, json=body) as response:
            assert response.status == 400 and "no chat template" in (await response.json())["error"]["message"]


BAD: list[tuple[Any, int, str | None, str]] = [
    (b"{", 400, None, "not JSON"),
    (b"[" * 100_000, 400, None, "not JSON"),
    (b'"\xff"', 400, None, "not JSON"),
    (b"[1]", 400, None, "JSON object"),
    (b"x" * 500_000, 413, None, "size"),
    ({}, 400, "prompt", "prompt"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": "a\ud800"}, 400, "prompt", "surrogate"),
    ({"prompt": ["a", ""]}, 400, "prompt", "prompt[1]: the prompt is empty"),
    ({"prompt": [[5], [96]]}, 400, "prompt", "prompt[1]: the prompt holds token 96"),
    ({"prompt": [[5], "a\ud800"]}, 400, "prompt", "prompt[1]: the prompt is not Unicode"),
    ({"prompt": ["a", "b" * 90]}, 400, "prompt", "prompt[1]: its 90 tokens"),
    ({"prompt": ["a"] * 9, "n": 128}, 400, "prompt", "more than 1024 answers"),
    ({"prompt": ["a"] * 1024 + [""]}, 400, "prompt", "1025 prompts and n, 1, are more than 1024 answers"),  # before one is read
    ({"prompt": [3, "a"]}, 400, "prompt", "token ids"),
    ({"prompt": ["a", None]}, 400, "prompt", "token ids"),
    ({"prompt": [True]}, 400, "prompt", "token ids"),
    ({"prompt": [96]}, 400, "prompt", "vocabulary has 96"),
    ({"prompt": [-1]}, 400, "prompt", "vocabulary"),
    ({"prompt": [1 << 70]}, 400, "prompt", "vocabulary"),
    ({"prompt": {"a": 1}}, 400, "prompt", "prompt must be"),
    ({"prompt": [5] * 90, "max_tokens": 11}, 400, "prompt", "90 tokens and max_tokens, 11, are more than the 100"),
    ({"prompt": "a" * 300}, 400, "prompt", "300 tokens and max_tokens, 16, are more"),
    ({"prompt": [5] * 300}, 400, "prompt", "300 tokens and max_tokens, 16, are more"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"max_tokens": "9"}, 400, "max_tokens", "type int"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "type int"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens", "at least 1"),
    ({"temperature": -0.1}, 400, "temperature", "at least 0"),
    ({"temperature": "hot"}, 400, "temperature", "type float"),
    ({"temperature": True}, 400, "temperature", "type float"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "number"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "number"),
    ({"top_p": 0}, 400, "top_p", "above 0"),
    ({"top_k": 1.5}, 400, "top_k", "type int"),
    ({"min_p": 1}, 400, "min_p", "below 1"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    ({"seed": 1 << 63}, 400, "seed", "64 bits"),
    ({"stop": ["a"] * 65}, 400, "stop", "up to 64"),
    ({"stop": [""]}, 400, "stop", "1 to 256"),
    ({"stop": 3}, 400, "stop", "up to 64"),
    ({"stop": 0}, 400, "stop", "up to 64"),
    ({"n": 0}, 400, "n", "1 to 128"),
    ({"n": 129}, 400, "n", "1 to 128"),
    ({"n": True}, 400, "n", "type int"),
    ({"best_of": 2}, 400, "best_of", "best_of must equal n (1)"),
    ({"logprobs": True}, 400, "logprobs", "type int"),
    ({"logprobs": 21}, 400, "logprobs", "0 to 20"),
    ({"detokenize": False}, 400, "detokenize", "nothing but true"),
    ({"add_special_tokens": 1}, 400, "add_special_tokens", "type bool"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "give logprobs"),
    ({"min_tokens": 17}, 400, "min_tokens", "0 to max_tokens, 16"),
    ({"stop_token_ids": [96]}, 400, "stop_token_ids", "0 to 95"),
    ({"stop_token_ids": [True]}, 400, "stop_token_ids", "0 to 95"),
    ({"stop_token_ids": 3}, 400, "stop_token_ids", "type list"),
    ({"ignore_eos": 1}, 400, "ignore_eos", "type bool"),
    ({"echo": 1}, 400, "echo", "type bool"),
    ({"echo": True, "max_tokens": -1}, 400, "max_tokens", "at least 0"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "nothing but 0"),
    ({"frequency_penalty": False}, 400, "frequency_penalty", "nothing but 0"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "nothing but {}"),
    ({"suffix": "x"}, 400, "suffix", 'nothing but ""'),
    ({"chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs", "nothing but {}"),
    ({"reasoning_effort": "low"}, 400, "reasoning_effort", "no such field"),
    ({"guided_json": {}}, 400, "guided_json", "no such field"),
    ({"x" * 300: 1}, 400, "x" * 77 + "...", "no such field"),
    ({"model": "x" * 300}, 404, "model", "only 'toy'"),
    ({"prompt": "é" * 50_000}, 400, "prompt", "tokens and max_tokens"),
    ({"prompt": [7] * 60_000}, 400, "prompt", "60000 tokens and max_tokens, 16, are more"),
    ({"stream": "yes"}, 400, "stream", "type bool"),
    ({"stream_options": {"a": 1}}, 400, "stream_options", "stream_options.a"),
    ({"maxtokens": 5}, 400, "maxtokens", "no such field here (did you mean max_tokens?)"),
    ({"messages": []}, 400, "messages", "chats have messages, completions a prompt"),
    ({"model": "another"}, 404, "model", "only 'toy'"),
]  # fmt: skip
EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e-30}, {"temperature": 1e6}, {"repetition_penalty": 1e6}, {"repetition_penalty": 1e-30}, {"top_k": 1 << 40},
    {"top_p": 1e-30}, {"min_p": 0.999999}, {"seed": -(1 << 63)}, {"user": "me", "n": 1, "stop": None},
]  # fmt: skip
BAD_CHATS: list[tuple[Any, int, str | None, str]] = [
    ({}, 400, "messages", "no list"),
    ({"messages": "hi"}, 400, "messages", "no list"),
    ({"messages": []}, 400, "messages", "messages is empty"),
    ({"messages": [3]}, 400, "messages", "not an object"),
    ({"messages": [{"role": "bard", "content": "a"}]}, 400, "messages", "'bard'"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages", "not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "parts that are not text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, 400, "messages", "'tool_calls'"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages", "no tools"),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, 400, "messages", "are more than the 100"),
    ({"messages": [{"role": "user", "content": "ab " * 60_000}]}, 400, "messages", "are more than the 100"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "messages", "surrogate"),
    ({"messages": [{"role": "u" * 300, "content": "a"}]}, 400, "messages", "role is"),
    ({"messages": [{"role": "user", "content": "a", "x" * 300: 1}]}, 400, "messages", "not supported in a message"),
    ({"prompt": "a"}, 400, "prompt", "chats have messages, completions a prompt"),
    ({"echo": True}, 400, "echo", "nothing but false"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "nothing but []"),
    ({"tool_choice": "required"}, 400, "tool_choice", 'nothing but "none" or "auto"'),
    ({"functions": [{"name": "f"}]}, 400, "functions", "nothing but []"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", 'nothing but {"type": "text"}'),
    ({"modalities": ["text", "audio"]}, 400, "modalities", 'nothing but ["text"]'),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort", "chat template does not read it"),
    ({"reasoning_effort": 3}, 400, "reasoning_effort", "type str"),
    ({"chat_template_kwargs": [1]}, 400, "chat_template_kwargs", "type dict"),
    ({"chat_template_kwargs": {"a": 1, "chat_template": "x"}}, 400, "chat_template_kwargs", "chat_template is not for clients"),
    ({"chat_template_kwargs": {"tools": [1]}}, 400, "chat_template_kwargs", "tools is not for clients"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "messages is not for clients"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs", "bos_token is not for clients"),
    ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs", "tokenize is not for clients"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": [1]}]}, 400, "messages", "reasoning_content must be text"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages", "not text"),
    ({"logprobs": 3}, 400, "logprobs", "type bool"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "0 to 20"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
]


@running
async def test_a_bad_request_is_told_why_and_harms_nobody() -> None:
    async with client(max_body=400_000) as it:
        others = [asyncio.ensure_future(ask(it, greedy(i, stream=True))) for i in range(5)]
        for path, cases, usual in ((COMPLETIONS, BAD, {"prompt": "abc"}), (CHAT, BAD_CHATS, {})):
            for body, status, param, message in cases:
                whole = usual | body if isinstance(body, dict) and (body or path == CHAT) else body
                data = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
                for stream in (False, True) if isinstance(whole, dict) and "stream" not in whole else [False]:
                    data = json.dumps(whole | {"stream": True}).encode() if stream else data
                    async with it.post(path, data=data) as response:
                        assert response.content_type == "application/json", body
                        error = (await response.json())["error"]
                        assert (response.status, error["param"]) == (status, param), (body, error)
                        assert message in error["message"] and error["type"] == "invalid_request_error" and error["code"]
        async with it.post(COMPLETIONS, data=b"no gzip", headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400 and "headers" in (await response.json())["error"]["message"]
        for path, method, status in (("/v1/nothing", it.get, 404), (COMPLETIONS, it.get, 405), ("/health", it.post, 405)):
            async with method(path) as response:
                message = (await response.json())["error"]["message"]
                assert response.status == status and message and ("this endpoint has /v1/chat/completions" in message) == (status == 404)
        for i, answer in enumerate(await asyncio.gather(*others)):
            assert answer["token_ids"] == plain(i)
        for extreme in EXTREME:
            assert len((await ask(it, greedy(0, ignore_eos=True) | {"temperature": 1.0} | extreme))["token_ids"]) == NEW
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)
        assert await (await it.get("/health")).json() == {"status": "ok"}
        assert [card["id"] for card in (await (await it.get("/v1/models")).json())["data"]] == ["toy"]
        assert (await figures(it))["engine_restarts_total"] == 0


@running
async def test_every_prompt_gets_its_answers_as_if_it_were_alone() -> None:
    async with client() as it:
        alone = [(await ask(it, greedy(i)))["token_ids"] for i in range(3)]
        warm = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 1.0, "return_token_ids": True}
        for stream in (False, True):
            several = greedy(0, stream=stream, stream_options={"include_usage": True, "include_obfuscation": False}) | {
                "prompt": PROMPTS[:3]
            }
            made = await ask_all(it, several)
            assert [m["token_ids"] for m in made] == alone and [m["text"] for m in made] == [text_of(a) for a in alone]
            old = sum(map(len, PROMPTS[:3]))
            assert made[0]["usage"] == {"prompt_tokens": old, "completion_tokens": 3 * NEW, "total_tokens": old + 3 * NEW}
            made = await ask_all(it, warm | {"prompt": PROMPTS[:2], "n": 3, "best_of": 3, "seed": 7, "stream": stream})
            said = [m["token_ids"] for m in made]
            each = [(await ask(it, warm | {"prompt": p, "seed": 7 + i}))["token_ids"] for p in PROMPTS[:2] for i in range(3)]
            assert said == each and len({tuple(s) for s in said[:3]}) == 3
        free = await ask_all(it, warm | {"prompt": [PROMPTS[0]] * 4})  # the same prompt four times, no seed
        assert len({tuple(m["token_ids"]) for m in free}) == 4
        cut = text_of(alone[1])[2:5]
        made = await ask_all(it, greedy(0, stop=[cut], stream=True) | {"prompt": PROMPTS[:3]})
        assert made[1]["finish_reason"] == "stop" and made[1]["text"] == text_of(alone[1]).partition(cut)[0]
        assert made[0]["token_ids"] == alone[0] or cut in text_of(alone[0])
        texts = ["ab", "c"]
        assert [m["text"] for m in await ask_all(it, {"prompt": texts, "temperature": 0})] == [
            (await ask(it, {"prompt": text, "temperature": 0}))["text"] for text in texts
        ]
        talk = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "seed": 1, "n": 2}
        assert len({m["message"]["content"] for m in await ask_all(it, talk, CHAT)}) == 2
        assert len({m["text"] for m in await ask_all(it, talk | {"stream": True}, CHAT)}) == 2
        await until(it, requests_running=0, requests_waiting=0, rows_free=2)


@running
async def test_tokens_that_end_an_answer_are_the_clients_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    said = plain(0)
    first = said.index(said[9])
    drafter()  # which learns what is said without that
    monkeypatch.setattr(type(target()), "stop_ids", (said[5],))
    async with client() as it:
        assert (await ask(it, greedy(0, ignore_eos=True)))["token_ids"] == said
        for more in ({"ignore_eos": True}, {}):
            answer = await ask(it, greedy(0, stop_token_ids=[said[9]], **more))
            until_then = first if more else min(first, said.index(said[5]))
            assert answer["finish_reason"] == "stop" and answer["text"] == text_of(said[:until_then])
            assert answer["token_ids"] == said[: until_then + 1]


@running
async def test_the_tokenizers_own_end_ends_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some fine-tunes keep the generation_config.json of their base, which names another token."""
    said, _ = plain(0), drafter()
    speech = tokenizer()
    speech.eos_token = speech.convert_ids_to_tokens(said[5])
    monkeypatch.setattr(target(), "tokenizer", speech)
    async with client() as it:
        answer = await ask(it, greedy(0))
        assert answer["finish_reason"] == "stop" and answer["token_ids"] == said[: said.index(said[5]) + 1]
        assert (await ask(it, greedy(0, ignore_eos=True)))["token_ids"] == said
        speech.add_special_tokens({"eos_token": "<beyond the vocabulary>"})  # which ends nothing, and no token is held back for it
        assert (await ask(it, greedy(0, min_tokens=3)))["token_ids"] == said


@running
async def test_what_a_request_does_not_say_is_as_the_model_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    published = GenerationConfig(temperature=0.0, top_k=7, repetition_penalty=None)
    assert serve.defaults_of(target()) == SAMPLING
    monkeypatch.setattr(target().model, "generation_config", published)
    defaults = serve.defaults_of(target())
    assert defaults == SAMPLING | {"temperature": 0.0, "top_k": 7}
    async with client(defaults=defaults) as it:
        body = greedy(0)
        del body["temperature"]
        assert [(await ask(it, body))["token_ids"] for _ in range(2)] == [plain(0)] * 2
        assert (await ask(it, body | {"temperature": None}))["token_ids"] == plain(0)
        assert len({tuple((await ask(it, body | {"temperature": 1.0, "top_k": 0}))["token_ids"]) for _ in range(3)}) > 1


def test_special_tokens_are_added_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    speech = tokenizer()
    speech.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    monkeypatch.setattr(target(), "tokenizer", speech)
    hi, talk = speech("Hi", add_special_tokens=False)["input_ids"], ids(speech, "u:Hi\na:", special=False)

    def prompt(chat: bool, **body: Any) -> list[int]:
        what = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
        return read(json.dumps(what | body).encode(), chat, target(), "toy", 100, "auto", SAMPLING).prompts[0]

    assert prompt(False) == [1, *hi] == prompt(False, add_special_tokens=True) and prompt(False, add_special_tokens=False) == hi
    assert prompt(True) == talk == prompt(True, add_special_tokens=False) and prompt(True, add_special_tokens=True) == [1, *talk]


NULL = (  # OpenAI's request schemas, then fields of other engines
    "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options "
    "suffix temperature top_p user messages audio function_call functions max_completion_tokens metadata modalities moderation "
    "parallel_tool_calls prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format "
    "safety_identifier service_tier store tool_choice tools top_logprobs verbosity web_search_options top_k min_p "
    "repetition_penalty min_tokens ignore_eos stop_token_ids return_token_ids skip_special_tokens guided_json structured_outputs "
    "prompt_logprobs "
)
DEFAULT: dict[str, Any] = dict(
    logit_bias={}, tools=[], tool_choice="none", functions=[], function_call="auto", response_format={"type": "text"}, n=1, best_of=1,
    parallel_tool_calls=True, metadata={"a": "b"}, store=False, service_tier="auto", modalities=["text"], user="me", suffix="", echo=False,
    presence_penalty=0.0, frequency_penalty=0, stop=[], stream=False, top_p=1, verbosity="medium", safety_identifier="x", logprobs=False,
    prompt_cache_key="x", prediction={"type": "content", "content": "x"}, ignore_eos=False, min_tokens=0, stop_token_ids=[],
    skip_special_tokens=True, spaces_between_special_tokens=True, use_beam_search=False, request_id="x", priority=0, stream_options=None,
    detokenize=True, separate_reasoning=True, include_reasoning=True,
)  # fmt: skip


@running
async def test_null_and_default_fields_change_nothing() -> None:
    async with client() as it:
        said = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi", "name": None, "tool_calls": []}]
        as_system = [said[0] | {"role": "system"}, said[1]]
        for path, asks in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": said})):
            body = {"max_tokens": 2, "temperature": 0, **asks}
            choice = await ask(it, body, path)
            assert choice["logprobs"] is None and choice["usage"]["completion_tokens"] == 2
            everything = {name: None for name in NULL.split() if name not in body}
            assert await ask(it, everything | body, path) == choice
            assert await ask(it, DEFAULT | body, path) == choice
            for name, value in DEFAULT.items():  # one by one: what stands in the way of one must not hide another
                assert await ask(it, {name: value} | body, path) == choice, name
            assert path == COMPLETIONS or await ask(it, body | {"messages": as_system}, path) == choice


@running
async def test_what_other_clients_send() -> None:
    """lm-evaluation-harness: a type in each message, many stops; vLLM's and SGLang's top_k that is off; GuideLLM: usage in every chunk."""
    async with client() as it:
        typed = {"messages": [{"role": "user", "content": "Hi", "type": "text"}]}
        plain = {"messages": [{"role": "user", "content": "Hi"}]}
        short = {"max_tokens": 4, "temperature": 0}
        assert await ask(it, typed | short, CHAT) == await ask(it, plain | short, CHAT)
        said = await ask(it, greedy(0))
        assert await ask(it, greedy(0, top_k=-1, stop=[f"never {i}" for i in range(20)])) == said
        told = {"include_usage": True, "continuous_usage_stats": True}
        async with it.post(COMPLETIONS, json=greedy(0, stream=True, stream_options=told)) as response:
            events = [json.loads(line[6:]) for line in (await response.text()).split("\n\n")[:-2]]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[0] < counts[-1] == NEW and len(counts) > 3
        assert {event["usage"]["prompt_tokens"] for event in events} == {len(PROMPTS[0])}


@running
async def test_a_model_is_shown_by_its_name() -> None:
    async with client(name="house/toy") as it:
        async with it.get("/v1/models/house/toy") as response:
            card = await response.json()
        async with it.get("/v1/models") as response:
            assert (await response.json())["data"] == [card] and (card["id"], card["max_model_len"]) == ("house/toy", 100)
        assert card["root"] == target().name  # from which clients load the tokenizer
        async with it.get("/v1/models/" + "x" * 300) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
