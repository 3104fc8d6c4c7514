"""What templates of real targets do, each in a few lines of its own: what is learnt is what such a target says."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers.utils.chat_template_utils as of_transformers

from headstart.data import chat
from headstart.data.forms import talk_of
from headstart.data.mask_check import check_masks
from headstart.data.masks import Template, masked
from headstart.data.reader import in_memory
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, asking, in_history, render, spoken
from tests.data.conftest import write
from tests.inference.serving.speech import tokenizer

EACH, END = "{% for m in messages %}", "{% endfor %}"
CALL = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}"
# A thought stands in the last turn alone, an empty one where there is none (Qwen3).
LAST = (
    "{% if tools %}{{ 'tools' }}{% endif %}" + EACH + "{% set body = m['content'].split('</think>')[-1].lstrip() %}{{ '<s>' + m['role'] }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' + (m.reasoning_content or 'none') + '</think> ' }}{% endif %}"
    "{{ body }}" + CALL + "{{ '<end>' }}" + END + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)
# The thought is begun by the header that asks, and written in no earlier turn (QwQ).
BEGUN = LAST.replace("'<s>assistant' }}{% endif %}", "'<s>assistant<think>' }}{% endif %}").replace(
    "{{ '<think>' + (m.reasoning_content or 'none') + '</think> ' }}",
    "{% if '</think>' in m['content'] %}{{ m['content'].split('</think>')[0] + '</think> ' }}{% endif %}",
)
# The text ends where nobody is asked (Phi-3).
ENDS = EACH + "{{ '<s>' + m['role'] + m['content'] + '<end>' }}" + END + "{{ '<s>assistant' if add_generation_prompt else '<pad>' }}"
# The system's words stand in front of a question that is the last message, or nowhere (Mistral Nemo).
MOVES = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}" + EACH + "{% if m['role'] == 'user' %}"
    "{{ '<s>' + (system if loop.last else '') + m['content'] }}{% elif m['role'] == 'assistant' %}{{ m['content'] + '<end>' }}{% endif %}"
    + END
)
# A thought and an answer are messages of their own, and the thought is not kept (gpt-oss).
CHANNELS = (
    EACH + "{{ '<s>' + m['role'] }}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}{{ '<c>thought<m>' + m.thinking + '<e>"
    "<s>assistant' }}{% endif %}{{ '<c>final<m>' }}{% endif %}{{ m['content'] }}"
    "{{ '<end>' if loop.last and m.role == 'assistant' else '<e>' }}" + END
    + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)  # fmt: skip
# Calls come without the text beside them (Llama 3.1).
ALONE = (
    "{% if tools %}{{ 'tools' }}{% endif %}" + EACH + "{{ '<s>' + m['role'] }}{% if m.tool_calls %}" + CALL
    + "{% else %}{{ m['content'] }}{% endif %}{{ '<end>' }}" + END + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)  # fmt: skip
# A turn ends where the next one begins, and an early one loses its thought (GLM-4.5).
UNENDED = (
    EACH + "{% if m.role == 'assistant' %}{{ '<c>' }}{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content"
    " + '</think>' }}{% endif %}{% else %}{{ '<m>' }}{% endif %}{{ m['content'] }}" + END
    + "{% if add_generation_prompt %}{{ '<c>' }}{% endif %}"
)  # fmt: skip
# A content is a text, or parts, of which a thought is one (Magistral).
PARTS = (
    EACH + "{{ '<s>' + m['role'] }}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for block in m['content'] %}"
    "{% if block['type'] == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% else %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end>' }}" + END + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)
# A content is a list of parts, and a text that is none is left out without a word (SmolVLM, LLaVA).
ONLY_PARTS = (
    EACH + "{{ '<s>' + m['role'] }}{% for block in m['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{{ '<end>' }}" + END + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)  # fmt: skip
TAGGED_PARTS = (
    EACH + "{{ '<s>' + m['role'] }}{% for block in m['content'] | selectattr('type', 'equalto', 'text') %}{% if m['role'] == 'user' %}"
    "{{ block['text'] }}{% else %}{% generation %}{{ block['text'] + '<end>' }}{% endgeneration %}{% endif %}{% endfor %}" + END
    + "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)  # fmt: skip
DATED = "{{ strftime_now('%d %b %Y') }}" + EACH + "{{ '<s>' + m['role'] + m['content'] + '<end>' }}" + END + (
    "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(text: str = "", **arguments: Any) -> dict[str, Any]:
    return says(text, tool_calls=[{"type": "function", "function": {"name": "search", "arguments": arguments}}])


def made(template: str) -> Any:
    speech = tokenizer(None, size=400)
    speech.add_tokens(["<c>", "<m>", "<e>"], special_tokens=True)
    speech.chat_template = template
    return speech


def learnt(template: str, messages: list[dict[str, Any]], last: bool = False, **row: Any) -> list[str]:
    """What is supervised, run by run, where the checks of masks let it pass."""
    speech = made(template)
    talk = Template(speech, last=last).talk(*talk_of({"messages": messages, **row}))
    documents = list(masked(speech, [talk]))
    check_masks(speech, [talk.messages], documents, ["row 1"], last=last)
    return [talk.text[a:b] for a, b in talk.spans]


TWO = [user("One question?"), says("First."), user("Another one?"), says("Second.")]
RESULT = {"role": "tool", "content": "sun"}


@pytest.mark.parametrize("template", [ONLY_PARTS, TAGGED_PARTS])
def test_a_template_that_reads_parts_alone_is_given_parts(template: str) -> None:
    assert learnt(template, TWO) == ["First.<end>", "Second.<end>"]
    asked = render(made(template), [user("One question?")], ask=True)
    assert asked.startswith("<s>userOne question?") and asked.endswith("<s>assistant")


def test_a_call_in_the_middle_has_no_thought() -> None:
    messages = [user("Weather in Ulm, please?"), calls(place="Ulm"), RESULT, says("It shines.")]
    said = '<call>{"name": "search", "arguments": {"place": "Ulm"}}<end>'
    assert learnt(LAST, messages, tools=[{"name": "search"}]) == [said, "<think>none</think> It shines.<end>"]
    assert learnt(BEGUN, messages, tools=[{"name": "search"}]) == [said, "It shines.<end>"]


def test_a_call_may_repeat_the_user_and_a_template_may_leave_out_the_text_beside_it() -> None:
    words = "best pizza in rome, né"
    said = json.dumps({"name": "search", "arguments": {"query": words}}, ensure_ascii=False)
    for text in ("", "Let me search the web for that."):
        messages = [user(words), calls(text, query=words), RESULT, says("Da Remo.")]
        assert learnt(LAST, messages, tools=[{}])[0] == f"{text}<call>{said}<end>"
        assert learnt(ALONE, messages, tools=[{}]) == [f"<call>{said}<end>", "Da Remo.<end>"]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_call_may_repeat_what_the_user_wrote_as_json(ascii_only: bool) -> None:
    template = ALONE.replace("tojson", f"tojson(ensure_ascii={str(ascii_only).lower()})")
    for words in ('say "né" to all of us', ["best pizza in rome"]):
        spelled = json.dumps(words, ensure_ascii=ascii_only)[1:-1]
        messages = [user(spelled), calls(query=words), RESULT, says("Da Remo.")]
        assert spelled in learnt(template, messages, tools=[{}])[0]


def test_what_is_said_by_both_sides_is_no_fault_of_the_mask() -> None:
    """Short answers stand within longer ones that quote the user; numbers and names of calls are the user's words too."""
    question = "Is water wet or not?"
    for short in ("A", "2", "Yes", "Is water wet", "Surely it is not so"):
        quote = f'You ask: "{question}" {short}, it is.'
        assert learnt(ENDS, [user("Q?"), says(short), user(question), says(quote)]) == [f"{short}<end>", f"{quote}<end><pad>"]
    called = calls(order=113456789012)
    said = '<call>{"name": "search", "arguments": {"order": 113456789012}}<end>'
    assert learnt(ALONE, [user("First?"), says("Fine."), user("113456789012"), called], tools=[{}])[1] == said
    called = says("", tool_calls=[{"type": "function", "function": {"name": "get_current_weather", "arguments": {}}}])
    assert learnt(ALONE, [user("get_current_weather"), called], tools=[{}]) == [
        '<call>{"name": "get_current_weather", "arguments": {}}<end>'
    ]
    thought = [user("What is it, then?"), says("One.", reasoning_content="What is it, then?"), *TWO[2:]]
    assert learnt(LAST, thought) == ["One.<end>", "<think>none</think> Second.<end>"]


def test_thoughts_are_learnt_wherever_the_data_hold_them() -> None:
    """In the text, or in a field of their own under any of its names."""
    thought = "because of that"
    for key in ("reasoning_content", "reasoning", "thinking"):
        messages = [user("Why?"), says("So.", **{key: thought})]
        assert learnt(LAST, messages) == [f"<think>{thought}</think> So.<end>"]
        assert learnt(CHANNELS, messages) == [f"<c>thought<m>{thought}<e><s>assistant<c>final<m>So.<end>"]
        assert learnt(BEGUN, messages) == [f"\n{thought}\n</think> So.<end>"]
        assert learnt(PARTS, messages) == [f"[THINK]{thought}[/THINK]So.<end>"]
        assert learnt(ENDS, messages) == ["So.<end><pad>"]  # a target that does not think
    for more in ({}, {"reasoning": thought}):  # data sets may hold it in both places
        assert learnt(BEGUN, [user("Why?"), says(f"<think>{thought}</think>So.", **more)]) == [f"{thought}</think> So.<end>"]
    assert learnt(CHANNELS, [*TWO[:1], says("First.", thinking="hm"), *TWO[2:]]) == ["<c>final<m>First.<e>", "<c>final<m>Second.<end>"]


def test_a_thought_that_is_not_supervised_is_found() -> None:
    speech = made(LAST)
    talk = Template(speech).talk(*talk_of({"messages": [user("Why?"), says("So.", reasoning_content="a thought of some length")]}))
    (document,) = masked(speech, [talk._replace(spans=[(talk.text.index("So."), len(talk.text))])])
    with pytest.raises(UserError, match=r"shifted: message 2 \(assistant\) is not all supervised"):
        check_masks(speech, [talk.messages], [document], ["row 1"])


def test_a_call_that_is_not_supervised_is_found() -> None:
    speech = made(LAST)
    messages = [user("Weather in Ulm, please?"), calls(place="Ulm"), RESULT, says("It shines.")]
    talk = Template(speech).talk(*talk_of({"messages": messages, "tools": [{"name": "search"}]}))
    (document,) = masked(speech, [talk._replace(spans=talk.spans[1:])])
    with pytest.raises(UserError, match=r"shifted: the call of a tool in message 2 is not supervised"):
        check_masks(speech, [talk.messages], [document], ["row 1"])


def test_an_answer_that_is_said_twice_is_learnt_in_both_places() -> None:
    """Though the text before them changes, and the questions are the same."""
    messages = [{"role": "system", "content": "Be brief, be kind."}, user("Why?"), says("So."), user("Why?"), says("So.")]
    talk = Template(made(MOVES)).talk(*talk_of({"messages": messages}))
    assert [talk.text[a:b] for a, b in talk.spans] == ["So.<end>"] * 2 and len({*talk.spans}) == 2


def test_the_last_turn_of_a_thought_alone_is_no_answer() -> None:
    with pytest.raises(BadRow, match="the last question has no answer"):
        learnt(LAST, [*TWO[:3], says("<think>endless</think>")], last=True)
    assert learnt(LAST, TWO, last=True) == ["<think>none</think> Second.<end>"]
    last = chat.Reader(made(LAST), turns="last")
    last.check(list(last.made([talk := last.read({"messages": TWO})])), [talk], ["row 1"])


def test_answers_are_found_though_the_text_before_them_changes() -> None:
    assert learnt(ENDS, TWO) == ["First.<end>", "Second.<end><pad>"]
    assert learnt(MOVES, [{"role": "system", "content": "Be brief, be kind."}, *TWO]) == ["First.<end>", "Second.<end>"]
    assert learnt(MOVES, [{"role": "system", "content": "no"}, user("yes"), says("yes")]) == ["yes<end>"]
    twice = MOVES.replace("'<end>'", "'<e><end>'")
    assert learnt(twice, [{"role": "system", "content": "Be brief."}, *TWO]) == ["First.<e><end>", "Second.<e><end>"]


def test_a_thought_of_the_words_of_its_answer_is_learnt_before_it() -> None:
    speech, said = made(ENDS), "Blue.</think>Blue."
    speech.add_tokens(["</think>"], special_tokens=True)
    talk = Template(speech).talk(*talk_of({"messages": [user("Sky?"), says(said), user("Sea?"), says(said)]}))
    assert [talk.text[a:b] for a, b in talk.spans] == [f"{said}<end>", f"{said}<end><pad>"]


def test_a_turn_without_an_end_is_learnt_up_to_the_token_that_begins_the_next() -> None:
    """With a thought that was dropped, as without one."""
    thought = says("First.", reasoning_content="hm")
    assert learnt(UNENDED, TWO) == learnt(UNENDED, [TWO[0], thought, *TWO[2:]]) == ["First.<m>", "Second."]
    assert learnt(UNENDED, [*TWO[:2], RESULT, TWO[3], says("More.")]) == ["First.<m>", "Second.", "More."], "no header of its own"


@pytest.mark.parametrize("tagged", [False, True])
def test_rows_are_the_same_tomorrow(tagged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no run goes on after midnight."""
    body = "{{ m['content'] + '<end>' }}"
    speech = made(DATED.replace("m['content'] + '<end>'", "'' }}{% if m.role == 'assistant' %}{% generation %}" + body
                                + "{% endgeneration %}{% else %}" + body + "{% endif %}{{ ''") if tagged else DATED)  # fmt: skip
    path = write(tmp_path / "talks.jsonl", [{"messages": TWO}])
    (today,) = in_memory(chat.Reader(speech), str(path), "", "", None)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime(2031, 1, 2)

    monkeypatch.setattr(of_transformers, "datetime", Tomorrow)
    assert render(speech, TWO).startswith("02 Jan 2031")  # what is served has the day's date
    (tomorrow,) = in_memory(chat.Reader(speech), str(path), "", "", None)
    assert today.tokens.tolist() == tomorrow.tokens.tolist() and today.loss_mask.tolist() == tomorrow.loss_mask.tolist()


def test_an_answer_in_channels_is_history_without_its_thought() -> None:
    speech, asked = made(CHANNELS), [user("Why?")]
    wanted = render(speech, asked, ask=True)
    whole = "<c>thought<m>because of that<e><s>assistant<c>final<m>So."
    tokens = speech(whole, add_special_tokens=False)["input_ids"]
    plain = speech.decode(tokens, skip_special_tokens=True)
    assert spoken(speech, plain, tokens) == whole and spoken(speech, "So.", tokens[-3:]) == "So."
    assert in_history(speech, asked, wanted, whole) == in_history(speech, asked, wanted, whole + "<end>") == "So."
    following = [*asked, says("So."), user("Sure?")]
    assert speech.decode(asking(speech, following)) == "<s>userWhy?<e><s>assistant<c>final<m>So.<e><s>userSure?<e><s>assistant"
    with pytest.raises(BadRow, match="cut before what it was to say"):
        in_history(speech, asked, wanted, "<c>thought<m>because of that<e><s>assistant<c>more<m>and of this")


def test_tables_fill_rows_with_the_keys_of_others() -> None:
    """Arrow has one type for a column, so each call would have the arguments of all."""
    tools = [{"name": "search", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}, {"name": "walk"}]
    rows = [{"messages": [user("a"), calls(place="Ulm"), RESULT, says("b")], "tools": tools},
            {"messages": [user("a"), calls(far=[{"x": 1}, {"y": 2}]), RESULT, says("b")], "tools": tools[1:]}]  # fmt: skip
    table = datasets.Dataset.from_list(rows)
    assert [talk_of(row) for row in table] == [talk_of(row) for row in rows]


@pytest.mark.parametrize("template", [TAGGED_PARTS, ONLY_PARTS])
def test_an_answer_that_was_cut_has_no_end_to_learn(template: str) -> None:
    """The target would have gone on. Ends of earlier answers are learnt."""
    talk = [user("One?"), says("First."), user("Two?"), says("Second", cut=True)]
    assert learnt(template, talk) == ["First.<end>", "Second"]
    assert learnt(template, talk, last=True) == ["Second"]
    assert learnt(template, [user("One?"), says("First.", cut=True), user("Two?"), says("Second.")])[-1] == "Second.<end>"
    assert learnt(template, [user("One?"), says("First."), user("Two?"), says("Second", cut=True, weight=0)]) == ["First.<end>"]
    assert learnt(template, [user("One?"), says("First.", cut="yes")]) == ["First.<end>"], "another column of that name"


def test_a_thought_that_was_cut_has_no_end_to_learn() -> None:
    """Where a template writes the end of a thought behind it, the target has not written it."""
    talk = [user("One?"), says("<think>Let me", cut=True)]
    closed = EACH + "{{ '<s>' + m['role'] + m['content'] + ('<e><end>' if m.role == 'assistant' else '<end>') }}" + END + (
        "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
    )  # fmt: skip
    assert learnt(closed, talk) == ["<think>Let me"]
    plain = closed.replace("<e><end>", " ###")
    assert learnt(plain, [user("One?"), says("Let me", cut=True)]) == ["Let me"], "an end in plain words"
    assert learnt(closed, [user("One?"), says("Look: <c>", cut=True)]) == ["Look: <c>"], "what it said is no end, though it looks like one"
