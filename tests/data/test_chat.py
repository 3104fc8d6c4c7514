"""The mask supervises the assistant's words and nothing else, and a wrong one never passes in silence."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headstart.data.mask_check import check_masks
from headstart.data.packed import Document
from headstart.data.prompts import read
from headstart.heads.errors import UserError
from tests.data.chats import documents

TALKS = [
    [("user", "What is a heap, in one line?"), ("assistant", "A tree in an array."), ("user", "And a trie?"), ("assistant", "yes")],
    [("system", "Be brief, please, and friendly."), ("user", "yes"), ("assistant", "  Two  spaces,\nnaïve café 🙂")],
    [("user", "Once more with feeling"), ("assistant", "Now?"), ("user", "Now and forever"), ("assistant", "Now!")],
]
HEAD = "{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
PLAIN = HEAD + "{{ m['content'] + '<|end|>\\n' }}{% endfor %}" + ASK
OTHER = "{% else %}{{ m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}" + ASK
SPOKEN = "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
TAGGED = HEAD + "{% if m['role'] == 'assistant' %}" + SPOKEN + OTHER
USERS = HEAD + "{% if m['role'] == 'user' %}" + SPOKEN + OTHER
EMPTY = HEAD + "{% if m['role'] == 'nobody' %}" + SPOKEN + OTHER
FULL = "{% generation %}" + PLAIN + "{% endgeneration %}"
HEADER_TOO = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ '<|start|>assistant\\n' + m['content'] + '<|end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ '<|start|>' + m['role'] + '\\n' }}{{ m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}"
    + ASK
)
# As reasoning models do: thinking is dropped from every turn but the last.
DROPS = (
    HEAD + "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].strip() + '<|end|>\\n' }}"
    "{% else %}{{ m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}" + ASK
)
# The last turn ends with another token than the same turn in history (and both users below say what assistants say).
ENDS = HEAD + "{{ m['content'] + ('<|start|>' if loop.last and m['role'] == 'assistant' else '<|end|>\\n') }}{% endfor %}" + ASK
# Asks for thinking that the conversation does not have.
ASKS_THINKING = PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
SHOUTS = HEAD + "{{ (m['content'] if loop.last else m['content'] | upper) + '<|end|>\\n' }}{% endfor %}" + ASK
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + PLAIN


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = [content for talk in TALKS for _, content in talk]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|start|>", "<|end|>"]
    made.train_from_iterator(
        words * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    )
    return made


@pytest.fixture
def tokenizer(bpe):
    def make(template: str | None) -> PreTrainedTokenizerFast:
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", additional_special_tokens=["<|start|>"])
        fast.chat_template = template
        return fast

    return make


def messages_of(talk):
    return {"messages": [{"role": role, "content": content} for role, content in talk]}


@pytest.fixture
def write(tmp_path):
    def make(rows, name="chats.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return make


def supervised(tokenizer, document):
    return tokenizer.decode(document.tokens[document.loss_mask].tolist())


@pytest.mark.parametrize("template", [TAGGED, PLAIN, DROPS], ids=["tagged", "plain", "drops"])
def test_exactly_the_assistants_text_is_supervised(template, tokenizer, write):
    fast = tokenizer(template)
    made = documents(write(map(messages_of, TALKS)), fast)
    assert len(made) == len(TALKS)
    for talk, document in zip(TALKS, made, strict=True):
        said = "".join((text.strip() if template is DROPS and i < len(talk) - 1 else text) + "<|end|>"
                       for i, (role, text) in enumerate(talk) if role == "assistant")  # fmt: skip
        assert supervised(fast, document) == said
        whole = fast.apply_chat_template(messages_of(talk)["messages"], tokenize=False)
        assert fast.decode(document.tokens.tolist()) == whole
        assert len(document.tokens) == len(document.loss_mask)


@pytest.mark.parametrize("template, end", [(ENDS, "<|start|>"), (ASKS_THINKING, "<|end|>")], ids=["ends", "asks"])
def test_turns_are_found_though_prefixes_differ(template, end, tokenizer, write):
    talk = [("user", "yes"), ("assistant", "yes"), ("user", "assistant"), ("assistant", "assistant")]
    fast = tokenizer(template)
    (document,) = documents(write([messages_of(talk)]), fast)
    assert supervised(fast, document) == "yes<|end|>assistant" + end
    starts = np.flatnonzero(np.diff(document.loss_mask.astype(int)) == 1) + 1
    before = [fast.decode(document.tokens[:at].tolist()) for at in starts]
    assert [text.count("<|start|>assistant\n") for text in before] == [1, 2]  # the assistant's words, not the user's


def test_agrees_with_transformers_own_mask(tokenizer, write):
    fast = tokenizer(TAGGED)
    for talk, document in zip(TALKS, documents(write(map(messages_of, TALKS)), fast), strict=True):
        theirs = fast.apply_chat_template(messages_of(talk)["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert document.tokens.tolist() == theirs["input_ids"]
        assert document.loss_mask.astype(int).tolist() == theirs["assistant_masks"]


def test_both_forms_give_the_same(tokenizer, write):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"conversations": [{"from": names[role], "value": text} for role, text in talk]} for talk in TALKS]
    mixed = [{"conversations": messages_of(talk)["messages"]} for talk in TALKS]
    parts = [
        {"messages": [{"role": r, "content": [{"type": "text", "text": t[:3]}, {"type": "text", "text": t[3:]}]} for r, t in talk]}
        for talk in TALKS
    ]
    for template in (TAGGED, PLAIN):
        ways = [documents(write(rows), tokenizer(template)) for rows in (list(map(messages_of, TALKS)), sharegpt, mixed, parts)]
        for way in ways[1:]:
            for ours, theirs in zip(ways[0], way, strict=True):
                assert np.array_equal(ours.tokens, theirs.tokens)
                assert np.array_equal(ours.loss_mask, theirs.loss_mask)


def test_dropped_thinking_is_followed(tokenizer, write):
    talk = [("user", "One?"), ("assistant", "<think>\nhm, one\n</think>\n\n1"), ("user", "1"), ("assistant", "<think>\ntwo\n</think>\n\n2")]
    fast = tokenizer(DROPS)
    (document,) = documents(write([messages_of(talk)]), fast)
    assert supervised(fast, document) == "1<|end|><think>\ntwo\n</think>\n\n2<|end|>"
    assert "hm, one" not in fast.decode(document.tokens.tolist())


def test_an_answer_that_is_said_again_with_its_thought_is_found_where_it_was_said(tokenizer, write):
    said = "It is blue by day.\n</think>\n\nBlue."
    talk = [("user", "Sky?"), ("assistant", said), ("user", "And the sea?"), ("assistant", said)]
    fast = tokenizer(DROPS)
    (document,) = documents(write([messages_of(talk)]), fast)
    assert supervised(fast, document) == f"Blue.<|end|>{said}<|end|>"


@pytest.mark.parametrize(
    "template, says",
    [(EMPTY, "empty in all 3"), (FULL, "full in all 3"), (USERS, "shifted: message 2 .assistant. is not all"), (HEADER_TOO, "header")],
)
def test_wrong_masks_are_refused(template, says, tokenizer, write):
    with pytest.raises(UserError, match=says):
        documents(write(map(messages_of, TALKS)), tokenizer(template))


@pytest.mark.parametrize("by", [-2, -1, 1, 2, 5])
@pytest.mark.parametrize("template", [TAGGED, PLAIN], ids=["tagged", "plain"])
def test_a_mask_shifted_by_a_few_tokens_is_refused(by, template, tokenizer, write):
    fast = tokenizer(template)
    made = documents(write(map(messages_of, TALKS)), fast)
    talks = [messages_of(talk)["messages"] for talk in TALKS]
    check_masks(fast, talks, made, ["a", "b", "c"])
    shifted = [Document(document.tokens, np.roll(document.loss_mask, by)) for document in made]
    with pytest.raises(UserError, match="a: the loss mask is shifted"):
        check_masks(fast, talks, shifted, ["a", "b", "c"])
    with pytest.raises(UserError, match="c: the loss mask is shifted"):
        check_masks(fast, talks, [*made[:2], shifted[2]], ["a", "b", "c"])


def test_an_answer_that_is_left_out_is_found_however_short(tokenizer, write):
    fast = tokenizer(PLAIN)
    made = documents(write(map(messages_of, TALKS)), fast)
    began = np.flatnonzero(np.diff(made[0].loss_mask.astype(int)) == 1)[-1] + 1  # that of "yes"
    made[0].loss_mask[began:] = False
    with pytest.raises(UserError, match=r"a: the loss mask is shifted: message 4 \(assistant\) is not all supervised"):
        check_masks(fast, [messages_of(talk)["messages"] for talk in TALKS], made, ["a", "b", "c"])


def test_one_conversation_may_be_all_the_assistants(tokenizer, write):
    fast = tokenizer(TAGGED)
    made = documents(write(map(messages_of, TALKS)), fast)
    ids = np.array(fast("Once more with feeling")["input_ids"], dtype=np.int32)
    talks = [*(messages_of(talk)["messages"] for talk in TALKS), [{"role": "assistant", "content": "Once more with feeling"}]]
    check_masks(fast, talks, [*made, Document(ids, np.ones(len(ids), dtype=np.bool_))], ["a", "b", "c", "d"])


def test_what_a_tokenizer_normalizes_is_found(tokenizer, write):
    fast = tokenizer(PLAIN)
    fast.backend_tokenizer.normalizer = normalizers.Lowercase()
    for talk, document in zip(TALKS, documents(write(map(messages_of, TALKS)), fast), strict=True):
        assert supervised(fast, document) == "".join(text.lower() + "<|end|>" for role, text in talk if role == "assistant")


def test_a_mask_with_the_user_in_it_is_refused(tokenizer, write):
    fast = tokenizer(TAGGED)
    talks = [messages_of(talk)["messages"] for talk in TALKS]
    wide = []
    for document in documents(write(map(messages_of, TALKS)), fast):
        mask = document.loss_mask.copy()
        mask[2 : np.flatnonzero(mask)[0] - 3] = True  # not the header: that is refused for itself
        wide.append(Document(document.tokens, mask))
    for first, said in ((0, r"a: the loss mask is shifted: message 1 \(user\)"), (1, r"b: the loss mask is shifted: message 1 \(system\)")):
        with pytest.raises(UserError, match=f"{said} is supervised"):
            check_masks(fast, talks[first:], wide[first:], ["a", "b", "c"][first:])


def test_an_untellable_template_is_refused(tokenizer, write):
    with pytest.raises(UserError, match=r"line 1: .*does not show where message 2 .*generation"):
        documents(write(map(messages_of, TALKS)), tokenizer(SHOUTS))


BAD = [
    ("{not json", "not JSON"),
    ("How do I sort a list?", r"plain text is data=text"),
    ("[1, 2]", "not an object"),
    ({"text": "hello"}, "no list"),
    ({"messages": []}, "no list"),
    ({"messages": ["hello"]}, "a message is not an object"),
    ({"messages": [{"role": "wizard", "content": "hm"}]}, "'wizard'"),
    ({"messages": [{"role": "user", "content": None}]}, "content is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "parts that are not text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "tool calls"),
    (messages_of([("user", "hi")]), "the assistant says nothing"),
]


@pytest.mark.parametrize("row, says", BAD, ids=[says for _, says in BAD])
def test_a_bad_line_has_its_number(row, says, tokenizer, write):
    good = messages_of(TALKS[0])
    path = write([good, "", row, good])  # empty lines count, and are no rows
    with pytest.raises(UserError, match=rf"chats.jsonl line 3: .*{says}"):
        documents(path, tokenizer(TAGGED))
    assert len(documents(path, tokenizer(TAGGED), on_bad="skip")) == 2


def test_dropped_lines_are_counted(tokenizer, write, caplog):
    rows = [messages_of(TALKS[0]), "x", "y", "z", "w"]
    with caplog.at_level(logging.WARNING):
        documents(write(rows), tokenizer(PLAIN), on_bad="skip")
    assert "dropped 4 of 5 rows" in caplog.text
    assert all(f"line {n}:" in caplog.text for n in (2, 3, 4))
    assert "line 5:" not in caplog.text
    with pytest.raises(UserError, match=r"no conversations in it .*line 1: not JSON"):
        documents(write(["x"]), tokenizer(PLAIN), on_bad="skip")


def test_a_template_that_refuses_is_a_bad_line(tokenizer, write):
    path = write(map(messages_of, TALKS))
    with pytest.raises(UserError, match=r"line 2: the chat template refuses it .no system role here"):
        documents(path, tokenizer(STRICT))
    assert len(documents(path, tokenizer(STRICT), on_bad="skip")) == 2


def test_other_bad_input(tokenizer, write, tmp_path):
    path = write(map(messages_of, TALKS))
    with pytest.raises(UserError, match="no chat template"):
        documents(path, tokenizer(None))
    with pytest.raises(UserError, match=r"gone\.jsonl: no such file"):
        documents(str(tmp_path / "gone.jsonl"), tokenizer(PLAIN))
    with pytest.raises(UserError, match="no conversations"):
        documents(write([""], "empty.jsonl"), tokenizer(PLAIN))


def test_a_dataset_by_name(tokenizer, monkeypatch, write):
    import datasets

    rows = datasets.Dataset.from_list([messages_of(talk) for talk in TALKS])
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: asked.update(name=name, split=split) or rows)
    made = documents("someone/chats", tokenizer(PLAIN), split="train[:3]")
    assert asked == {"name": ("someone/chats", None), "split": "train[:3]"}
    for ours, theirs in zip(made, documents(write(map(messages_of, TALKS)), tokenizer(PLAIN)), strict=True):
        assert np.array_equal(ours.loss_mask, theirs.loss_mask)

    def fails(*name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UserError, match=r"someone/chats.*no route"):
        documents("someone/chats", tokenizer(PLAIN))


def test_prompts(tokenizer, write):
    fast, raw = tokenizer(PLAIN), tokenizer(None)
    rows = [
        {"id": "q1", "turns": ["One?", "Two?"]},
        {"prompt": "One?"},
        {"text": "One?"},
        messages_of(TALKS[0]),
        {"question_id": 7, "conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]},
        {"id": None, "question_id": "q6", "turns": None, "messages": None, "prompt": "One?"},  # of a data set whose rows differ
    ]

    def prompts(rows, tokenizer):
        return list(read(write(rows), tokenizer, "prompts"))

    found = prompts(rows, fast)
    asked = "<|start|>user\nOne?<|end|>\n<|start|>assistant\n"
    assert [p["id"] for p in found] == ["q1", "2", "3", "4", "7", "q6"]
    texts = [fast.decode(p["tokens"]) for p in found]
    assert texts[0] == texts[1] == texts[4] == texts[5] == asked
    assert texts[2] == "One?"
    assert texts[3] == fast.apply_chat_template(messages_of(TALKS[0])["messages"][:3], tokenize=False, add_generation_prompt=True)
    assert [raw.decode(p["tokens"]) for p in prompts(rows[:3], raw)] == ["One?"] * 3
    for bad, says in [({"question": "?"}, "not a prompt"), ({"prompt": "  "}, "empty"), ("{", "not JSON"), ({"turns": [3]}, "not text")]:
        with pytest.raises(UserError, match=f"line 2: .*{says}"):
            prompts([rows[0], bad], fast)
    with pytest.raises(UserError, match="no chat template"):
        prompts(rows[3:4], raw)
