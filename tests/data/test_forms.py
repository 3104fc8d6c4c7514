"""Whatever form conversations come in, they read as the same; tools and their calls stand where the template writes them."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data import chat, forms, prompts, tokenized
from headstart.data.forms import PRESETS, talk_of
from headstart.data.masks import Template
from headstart.data.reader import in_memory
from headstart.data.source import CONF, open_source
from headstart.data.suite import questions
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, conversation
from tests.data.conftest import write
from tests.inference.serving.speech import tokenizer

TALK = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm"}}}
CALLS = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}, TALK[1]]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
BODY = (
    "{% if tools %}{{ '<sys>' + tools | tojson + '<end>' }}{% endif %}{% for m in messages %}{{ '<' + m['role'] + '>' }}SAID"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SAID = "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}{{ '<end>' }}"
PREFIXES = BODY.replace("SAID", SAID)
TAGGED = BODY.replace(
    "SAID", "{% if m['role'] == 'assistant' %}{% generation %}" + SAID + "{% endgeneration %}{% else %}" + SAID + "{% endif %}"
)


def test_columns() -> None:
    """One with the conversation, or a question (or all up to the answer) and an answer."""
    ways = [
        ({"messages": TALK, "other": 1}, ()),
        ({"chosen": TALK, "messages": [TALK[0]]}, ("chosen",)),
        ({"chosen": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]}, ("chosen",)),
        ({"instruction": "One?", "output": "1"}, ("instruction", "output")),
        ({"input": TALK[:1], "output": "1", "system_prompt": "x"}, ("input", "output")),
    ]
    for row, columns in ways:
        assert talk_of(row, columns) == (TALK, None)
    with pytest.raises(BadRow, match=r"no column 'chosen', it has 'messages': data\.columns=\[\.\.\.\] says which"):
        talk_of({"messages": TALK}, ("chosen",))


def reply(message: dict[str, Any]) -> dict[str, Any]:
    """What an OpenAI-style server answers; a second choice is not what the conversation went on with."""
    other = {"index": 1, "message": {"role": "assistant", "content": "another"}}
    return {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", "message": message}, other]}


LONGER = [*TALK, {"role": "user", "content": "Two?"}]  # its last answer was lost without a word


@pytest.mark.parametrize("asked", [TALK[:1], LONGER], ids=["once", "longer"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda asked, said: {"model": "m", "messages": asked, **said},
        lambda asked, said: {"model": "m", "messages": asked, "response": said},
        lambda asked, said: {"request": {"model": "m", "messages": asked}, "response": said},
        lambda asked, said: {"custom_id": "1", "request": {"body": {"messages": asked}}, "response": {"status_code": 200, "body": said}},
    ],
    ids=["merged", "messages and response", "request and response", "batch"],
)
def test_a_servers_log_is_a_conversation(asked: list[Any], wrap: Any, tmp_path: Path) -> None:
    """The request's messages, then the reply's; its question alone is a prompt."""
    said = {"role": "assistant", "content": "2", "refusal": None, "tool_calls": None}
    row = wrap(asked, reply(said))
    assert talk_of(row) == ([*asked, {"role": "assistant", "content": "2"}], None)
    assert talk_of(wrap([*asked, {"role": "assistant", "content": "2"}], reply(said))) == talk_of(row), "where the log has it in both"
    with pytest.raises(BadRow, match="its request ends with an assistant's message, and the reply says something else"):
        talk_of(wrap([*asked, {"role": "assistant", "content": "beg"}], reply(said)))
    speech = tokenizer(None, size=400)
    speech.chat_template = PREFIXES
    path = write(tmp_path / "log.jsonl", [row])
    assert speech.decode(next(prompts.read(str(path), speech, "prompts"))["tokens"]).endswith(asked[-1]["content"] + "<end><assistant>")
    (question,) = questions({"name": "mine", "turns": "turns", "category": None, "groups": {}}, str(path), None)
    assert question.turns == [m["content"] for m in asked if m["role"] == "user"]
    (document,) = in_memory(chat.Reader(speech), str(path), "", "", None)
    assert speech.decode(document.tokens[document.loss_mask]).endswith("2<end>")


def test_a_reply_that_was_cut_says_so(tmp_path: Path) -> None:
    """Its last token is learnt, the end of the turn is not."""
    speech = tokenizer(None, size=400)
    speech.chat_template = PREFIXES
    rows = []
    for reason, stop in (("length", None), ("stop", 7), ("stop", "\n"), ("content_filter", None)):
        choice = {"message": {"role": "assistant", "content": "2"}, "finish_reason": reason, "stop_reason": stop}
        rows.append({"request": {"messages": TALK[:1]}, "response": {"choices": [choice]}})
    assert [talk_of(row)[0][-1].get("cut") for row in rows] == [True, None, True, True]
    cut, whole = in_memory(chat.Reader(speech), str(write(tmp_path / "log.jsonl", rows[:2])), "", "", None)
    assert [speech.decode(each.tokens[each.loss_mask]) for each in (cut, whole)] == ["2", "2<end>"]


def test_a_logged_call_of_a_tool_is_the_requests(tmp_path: Path) -> None:
    row = {"request": {"messages": CALLS[:1], "tools": TOOLS}, "response": reply({**CALLS[1], "content": None})}
    assert talk_of(row) == (CALLS[:2], TOOLS)
    for other in (
        {"messages": TALK, "choices": ["a", "b"]},
        {"messages": TALK, "choices": [], "response": "1"},
        {"messages": TALK, "body": 1},
    ):
        assert talk_of(other) == (TALK, None), "not a reply"


@pytest.mark.parametrize("piece", [{"choices": [{"delta": {"content": "1"}}]}, {"choices": []}, {"error": {"message": "busy"}}, "data: {}"])
def test_a_log_without_a_whole_reply_is_named_as_such(piece: Any) -> None:
    """It was taken for a row whose columns are to be named, which would not help."""
    for asked in ({"messages": TALK[:1]}, {"body": {"messages": TALK[:1]}}):
        with pytest.raises(BadRow, match=r"log without a whole reply .* leave out failed requests, and write the pieces of a streamed"):
            talk_of({"request": asked, "response": piece})


def test_a_system_prompt_beside_the_messages_stands_in_front_of_them() -> None:
    """As LLaMA-Factory's files have it."""
    prompt, sharegpt = {"role": "system", "content": "Be brief."}, [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]
    for row, columns in (
        ({"system": "Be brief.", "messages": TALK}, ()),
        ({"system": "Be brief.", "conversations": sharegpt}, ()),
        ({"system": "Be brief.", "instruction": "One?", "output": "1"}, ("instruction", "output")),
        ({"system": "Be long.", "messages": [prompt, *TALK]}, ()),
    ):
        assert talk_of(row, columns) == ([prompt, *TALK], None)
    assert conversation({"system": "Be brief.", "conversations": sharegpt}) == [prompt, *TALK], "what regenerate asks"
    for nothing in (None, "", " \n", ["Be brief."]):
        assert talk_of({"system": nothing, "messages": TALK}) == (TALK, None)


@pytest.mark.parametrize("template", ["prefixes", "tagged"])
@pytest.mark.parametrize("turns", [None, "last"])
def test_an_answer_of_weight_0_is_read_and_not_learnt(template: str, turns: str | None, tmp_path: Path) -> None:
    speech = tokenizer(None, size=400)
    speech.chat_template = {"prefixes": PREFIXES, "tagged": TAGGED}[template]
    bad = {"role": "assistant", "content": "an answer that nobody wants", "weight": 0}
    talk = [TALK[0], bad, {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2", "weight": 1}, TALK[1]]
    path = write(tmp_path / "weights.jsonl", [{"messages": talk}, {"messages": [*talk[:4], bad]}])
    for document, said in zip(
        in_memory(chat.Reader(speech, turns=turns), str(path), "", "", None), ("2<end>1<end>", "2<end>"), strict=True
    ):
        assert speech.decode(document.tokens[document.loss_mask].tolist()) == said
        assert bad["content"] in speech.decode(document.tokens.tolist())
    with pytest.raises(BadRow, match=r"the assistant says nothing in it|the last question has no answer"):
        Template(speech, last=turns == "last").talk(*talk_of({"messages": talk[:2]}))
    for wrong in (0.5, 2, "0"):
        with pytest.raises(BadRow, match=rf"the weight of a message is 0 or 1, found {wrong!r}"):
            talk_of({"messages": [TALK[0], {**bad, "weight": wrong}]})
    assert talk_of({"messages": [TALK[0], {**TALK[1], "weight": 1}]}) == talk_of({"messages": [*TALK]}), "no template sees it"


def test_tags_that_do_not_tell_messages_apart_refuse_a_weight() -> None:
    speech = tokenizer(None, size=400)
    speech.chat_template = TAGGED.replace(
        "{{ '<end>' }}{% endgeneration %}", "{% endgeneration %}{% generation %}{{ '<end>' }}{% endgeneration %}"
    )
    with pytest.raises(BadRow, match=r"a message has weight 0, and the template's \{% generation %\} tags do not show"):
        Template(speech).talk([*TALK, {**TALK[1], "weight": 0}])


def test_tools_and_their_calls() -> None:
    flat = json.dumps({"name": "weather", "arguments": {"place": "Ulm"}})
    as_text = {"function": {"name": "weather", "arguments": '{"place": "Ulm"}'}, "type": "function"}
    sharegpt = [("human", "One?"), ("function_call", flat), ("observation", "rain"), ("gpt", "1")]
    ways: list[dict[str, Any]] = [
        {"messages": CALLS, "tools": TOOLS},
        {"messages": [CALLS[0], {**CALLS[1], "content": None, "tool_calls": [as_text]}, *CALLS[2:]], "tools": json.dumps(TOOLS)},
        {"conversations": [{"from": name, "value": value} for name, value in sharegpt], "tools": json.dumps(TOOLS)},
        {"messages": [CALLS[0], {"role": "assistant", "content": None, "function_call": json.loads(flat)}, *CALLS[2:]], "tools": TOOLS},
    ]
    ways.append({"conversations": [*ways[2]["conversations"][:2], {"from": "function_response", "value": "rain"}, TALK[1]], "tools": TOOLS})
    for row in ways:
        assert talk_of(row) == (CALLS, TOOLS)
    empty = [{**message, "tool_calls": None, "function_call": {}} for message in TALK]  # as tables of columns fill them
    assert talk_of({"messages": empty, "tools": "[]"}) == (TALK, None)


def test_calls_and_their_results_keep_what_joins_them() -> None:
    """Templates write the id of a call, and the name and id with which its result answers it. Anything but text is left out."""
    call, result = CALL | {"id": "call_1"}, {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call_1"}
    (_, called, answered, _), _ = talk_of({"messages": [CALLS[0], {**CALLS[1], "tool_calls": [call]}, result, TALK[1]]})
    assert called["tool_calls"] == [call] and answered == result
    odd = {**result, "name": None, "tool_call_id": 5}
    (_, called, answered, _), _ = talk_of({"messages": [CALLS[0], {**CALLS[1], "tool_calls": [CALL | {"id": 7}]}, odd, TALK[1]]})
    assert called["tool_calls"] == [CALL] and answered == {"role": "tool", "content": "rain"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": TALK, "tools": "{"}, "tools: not JSON"),
        ({"messages": TALK, "tools": "5"}, "tools are no list of objects"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}, "tool calls need a function with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "[1]"}]}]},
            "arguments of tool calls must be an object",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{"}]}]}, "arguments of tool calls: not JSON"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "only an assistant calls tools"),
        ({"messages": "text"}, "not a conversation"),
        ({"question": "a", "answer": "b"}, r"^not a conversation: .*, it has 'question', 'answer': data\.columns=\[question,answer\]"),
        ({"id": 1, "text": "a"}, "it has 'id', 'text': data.*; plain text is data=text$"),
        ({"text": "a", "regenerated": {}}, "answers that the target gave to plain text are data=regenerated$"),
        ({}, "it has nothing: "),
        ({"conversations": [{"from": "function_call", "value": "weather"}]}, "function_call: not JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": '{"a":' + "[" * 900 + "]" * 900 + "}"}]}]},
            "arguments of tool calls: nested more than 64 levels",
        ),
    ],
)
def test_what_is_no_call_is_said(row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRow, match=says):
        talk_of(row)


def test_what_a_json_text_says_is_kept_and_what_a_table_fills_in_is_not() -> None:
    told = {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}
    as_text = {"name": "f", "arguments": json.dumps(told["arguments"])}
    for given in ({"role": "assistant", "tool_calls": [{"function": as_text}]}, {"from": "function_call", "value": json.dumps(told)}):
        (message,), _ = talk_of({"messages": [given]} if "role" in given else {"conversations": [given]})
        assert message["tool_calls"][0]["function"] == told
    (message,), _ = talk_of({"messages": [{"role": "assistant", "tool_calls": [{"function": told}]}]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"b": [{}]}}


@pytest.mark.parametrize("template", [PREFIXES, TAGGED], ids=["prefixes", "tagged"])
@pytest.mark.parametrize("where", ["arguments", "tools"])
def test_half_of_a_surrogate_pair_in_a_call_is_a_bad_row(template: str, where: str, tmp_path: Path) -> None:
    """JSON can write it, no tokenizer reads it."""
    speech = tokenizer(None, size=400)
    speech.chat_template = template
    half = {"tools": [{"name": "\ud83d"}]} if where == "tools" else {"tools": TOOLS}
    name, arguments = "weather", {"place": "\ud83d" if where == "arguments" else "Ulm"}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    path = write(tmp_path / "half.jsonl", [{"messages": [CALLS[0], called], **half}, {"messages": TALK}])
    with pytest.raises(UserError, match=r"line 1: what the chat template writes is not Unicode"):
        in_memory(chat.Reader(speech), str(path), "", "", None)
    assert len(in_memory(chat.Reader(speech, on_bad="skip"), str(path), "", "", None)) == 1


@pytest.mark.parametrize("template", [PREFIXES, TAGGED], ids=["prefixes", "tagged"])
def test_calls_are_supervised_and_results_are_not(template: str, tmp_path: Path) -> None:
    speech = tokenizer(None, size=400)
    speech.chat_template = template
    path = write(tmp_path / "calls.jsonl", [{"messages": CALLS, "tools": TOOLS}, {"messages": TALK}])
    called, plain = in_memory(chat.Reader(speech), str(path), "", "", None)
    whole = speech.apply_chat_template(CALLS, tools=TOOLS, tokenize=False)
    assert speech.decode(called.tokens.tolist()) == whole and "<sys>[" in whole
    said = speech.decode(called.tokens[called.loss_mask].tolist())
    assert said == '<call>{"name": "weather", "arguments": {"place": "Ulm"}}<end>1<end>'
    assert speech.decode(plain.tokens[plain.loss_mask].tolist()) == "1<end>"


def test_a_template_without_tools_refuses_them() -> None:
    speech = tokenizer(None, size=400)
    speech.chat_template = BODY.replace("SAID", "{{ m['content'] + '<end>' }}")
    with pytest.raises(BadRow, match="the chat template writes no tool calls"):
        Template(speech).talk(CALLS)
    speech.chat_template = speech.chat_template.replace("tools", "nothing")
    with pytest.raises(BadRow, match="the chat template writes no tools"):
        Template(speech).talk(TALK, TOOLS)


@pytest.mark.parametrize("template", [PREFIXES, TAGGED], ids=["prefixes", "tagged"])
def test_of_templates_with_names_that_for_tools_is_asked(template: str) -> None:
    """A tokenizer may have several; as transformers, what has tools is written by ``tool_use``."""
    speech = tokenizer(None, size=400)
    plain = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
    speech.chat_template = {"default": plain + "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}", "tool_use": template}
    talk = Template(speech).talk(CALLS, TOOLS)
    assert talk.text == speech.apply_chat_template(CALLS, tools=TOOLS, tokenize=False) and talk.text.startswith("<sys>[")
    said = [talk.text[start:end] for start, end in talk.spans]
    assert said == ['<call>{"name": "weather", "arguments": {"place": "Ulm"}}<end>', "1<end>"]
    talk = Template(speech).talk(TALK)
    assert talk.text == "<user>One?<end><assistant>1<end>" and [talk.text[start:end] for start, end in talk.spans] == ["1<end>"]
    before = chat.Reader(speech).about()["template"]
    speech.chat_template["tool_use"] += "\n"
    assert chat.Reader(speech).about()["template"] != before
    speech.chat_template = PREFIXES
    assert chat.Reader(speech).about()["template"] == hashlib.sha256(PREFIXES.encode()).hexdigest(), "as the cache of before has it"


@pytest.mark.parametrize("template", [PREFIXES, TAGGED], ids=["prefixes", "tagged"])
def test_the_last_turn_only(template: str, tmp_path: Path) -> None:
    """All that is said behind the last question: with a call of a tool two messages."""
    speech = tokenizer(None, size=400)
    speech.chat_template = template
    two = [{"role": "user", "content": "Zero, please"}, {"role": "assistant", "content": "an answer of before"}]
    path = write(tmp_path / "two.jsonl", [{"messages": [*two, *TALK]}, {"messages": [*two, *CALLS]}, {"messages": TALK}])
    documents = in_memory(chat.Reader(speech, turns="last"), str(path), "", "", None)
    said = [speech.decode(document.tokens[document.loss_mask].tolist()) for document in documents]
    assert said == ["1<end>", '<call>{"name": "weather", "arguments": {"place": "Ulm"}}<end>1<end>', "1<end>"]
    unanswered = write(tmp_path / "none.jsonl", [{"messages": [*two, TALK[0]]}])
    with pytest.raises(UserError, match="line 1: the last question has no answer"):
        in_memory(chat.Reader(speech, turns="last"), str(unanswered), "", "", None)
    assert len(in_memory(chat.Reader(speech), str(unanswered), "", "", None)) == 1


def test_a_template_of_the_users(target: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "talks.jsonl", [{"messages": TALK}] * 4)
    file = tmp_path / "mine.jinja"
    content = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    file.write_text("{% for m in messages %}{{ m['role'] + ' ' }}" + content + "{{ '<end>' }}{% endfor %}")
    given = {"name": "chat", "path": str(path), "split": "", "on_bad": "error"}
    own = target.tokenizer.chat_template
    with pytest.raises(UserError, match=r"the loss mask is shifted: message 1 \(user\) is supervised|the loss mask"):
        in_memory(chat.Reader(target.tokenizer, template=str(file)), str(write(tmp_path / "long.jsonl", [
            {"messages": [{"role": "user", "content": "a question that is long enough"}, TALK[1]]}])), "", "", None)  # fmt: skip
    file.write_text(file.read_text().replace(content, "{{ m['content'] }}"))
    file.write_text(file.read_text() + "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}")
    (made, *_) = in_memory(chat.Reader(target.tokenizer, template=str(file)), str(path), "", "", None)
    assert target.tokenizer.decode(made.tokens.tolist()) == "user One?<end>assistant 1<end>" and target.tokenizer.chat_template == own
    for wrong, says in ((str(tmp_path / "gone.jinja"), r"gone\.jinja: no such file"), (5, "5: no such file")):
        with pytest.raises(UserError, match=says):
            open_source({**given, "template": wrong}, target, length=32, seed=0)


def test_presets_are_in_the_help_and_read_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    said = re.search(r"Presets \(.*?\): (.*)\.", (CONF / "chat.yaml").read_text())
    assert said is not None and said[1].split(", ") == list(PRESETS)
    asked: list[tuple[str, str]] = []
    for name, known in PRESETS.items():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", known.path) and len(known.columns) == 1
        rows = datasets.Dataset.from_list([{known.columns[0]: TALK, "prompt": "x"}] * 3)
        monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, split, rows=rows: asked.append((path, split)) or rows)
        settings = {"split": "train", "subset": "", "columns": None}
        found = chat.conversations(talk_of, path=name, on_bad="error", **settings)  # type: ignore[arg-type]
        assert [talk for _, talk in found] == [(TALK, None)] * 3 and asked[-1] == (known.path, known.split)
        chat.conversations(talk_of, path=name, on_bad="error", **{**settings, "split": "test[:2]"})  # type: ignore[arg-type]
        assert asked[-1] == (known.path, "test[:2]")
    assert forms.preset("someone/else", "a", "b", ["c"]) == ("someone/else", "a", "b", ("c",))
    assert forms.preset("sharegpt", "train", "own", ["mine"])[2:] == ("own", ("mine",)), "what is given goes before"


def test_rows_of_tokens(target: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [{"input_ids": rng.integers(1, 300, 40).tolist()} for _ in range(30)]
    for row in rows[1:]:
        row["loss_mask"] = (rng.random(40) < 0.5).astype(int).tolist()
    path = write(tmp_path / "tokens.jsonl", rows)
    given = {"name": "tokenized", "path": str(path), "split": "", "subset": "", "on_bad": "error"}
    inside, on_disk = (open_source({**given, "cache": cache}, target, length=64, seed=0) for cache in (None, str(tmp_path / "cache")))
    assert inside.packed is not None and inside.held_out is not None and inside.digest() == on_disk.digest()
    there = {token: row for row in rows for token in [tuple(row["input_ids"][:8])]}
    batch = inside.packed.batch(slice(0, 4))
    for tokens, mask in zip(batch.tokens_BT.tolist(), batch.loss_mask_BT.tolist(), strict=True):
        assert mask[:24] == [bool(x) for x in there[tuple(tokens[:8])].get("loss_mask", [1] * 40)[:24]] or tuple(tokens[:8]) not in there
    for bad, says in (
        ({"input_ids": [320]}, "not all tokens of the target, from 0 to 319"),
        ({"input_ids": [1.5]}, "not all tokens"),
        ({"text": "a"}, "no list input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "as long as input_ids"),
        ({"input_ids": [1], "loss_mask": [2]}, "0 and 1"),
        ({"input_ids": [1, 2], "labels": [1]}, "as long as input_ids"),
        ({"input_ids": [1, 2], "labels": "no"}, "as long as input_ids"),
        ({"input_ids": [11, 12, 13], "labels": [-100, 13, -100]}, "those that name the next token are not read"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "leaves out tokens between others"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask must be a list of 0 and 1"),
    ):
        write(path, [rows[0], bad])
        with pytest.raises(UserError, match=rf"tokens\.jsonl line 2: .*{says}"):
            open_source(given, target, length=64, seed=0)


def test_labels_say_what_is_learnt() -> None:
    """As transformers' trainers have them; a mask of its own goes before."""
    read = tokenized.Reader(320, "error").read
    for row, mask in (
        ({"labels": [-100, 2, -100]}, [0, 1, 0]),
        ({"labels": [-100, 2, -100], "loss_mask": None}, [0, 1, 0]),
        ({"labels": [-100] * 3, "loss_mask": [1, 0, 0]}, [1, 0, 0]),
        ({"assistant_masks": [0, 0, 1]}, [0, 0, 1]),
        ({"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0], "labels": [1, 2, 3]}, [0, 1, 0]),
    ):
        assert read({"input_ids": [1, 2, 3], **row}).loss_mask.tolist() == [bool(x) for x in mask]


def test_padding_is_no_text() -> None:
    read = tokenized.Reader(320, "error").read
    for mask, tokens, learnt in (([1, 1, 1, 0], [1, 2, 3], [0, 1, 1]), ([0, 1, 1, 1], [2, 3, 4], [1, 1, 0]), ([0] * 4, [], [])):
        found = read({"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "attention_mask": mask})
        assert (found.tokens.tolist(), found.loss_mask.tolist()) == (tokens, [bool(x) for x in learnt])


def test_limit_takes_the_first_rows(target: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "talks.jsonl", [{"messages": [TALK[0], {"role": "assistant", "content": "1 2 3 " * i}]} for i in range(1, 30)])
    (tmp_path / "ten.jsonl").write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    given = {"name": "chat", "path": str(path), "split": "", "on_bad": "error"}
    ten = open_source({**given, "path": str(tmp_path / "ten.jsonl")}, target, length=64, seed=0)
    assert open_source({**given, "limit": 10}, target, length=64, seed=0).digest() == ten.digest()
    with pytest.raises(UserError, match=r"data\.limit must be a whole number of at least 1, found 0"):
        open_source({**given, "limit": 0}, target, length=64, seed=0)
    assert "limit" in inspect.signature(chat.open).parameters
