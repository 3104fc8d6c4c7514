"""Under the chat templates there are, a conversation reads as it was generated: what the target said stands where it said it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from headstart.data.answers import Answer
from headstart.data.talks import Item, Made, _add, _known, converse
from headstart.inference.serving.text import BadRow, Reader, asking, ids, render
from tests.inference.serving.speech import tokenizer, wrapped

EACH, END = "{% for m in messages %}", "{% endfor %}"
USER = "{% if m['role'] == 'user' %}"
TAGS = "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"


def turns(head: str, tail: str, content: str = "m['content']", ask: str = "") -> str:
    """Header, text and closing, the same for every role."""
    body = f"{{{{ {head} + {content} + {tail} }}}}"
    return EACH + body + END + "{% if add_generation_prompt %}{{ " + head.replace("m['role']", "'assistant'") + ask + " }}{% endif %}"


IM = "'<|im_start|>' + m['role'] + '\\n'"
LAST = "m['content'].split('</think>')[-1].lstrip('\\n')"
THOUGHT = "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m['content'] else '' %}"
TEMPLATES = {
    "llama2": EACH + USER + "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}" + END,
    "mistral": "{{ bos_token }}" + EACH + TAGS + "{{ ' ' + m['content'] + eos_token }}{% endif %}" + END,
    "mistral, as it stands": "{{ bos_token }}" + EACH + TAGS + "{{ m['content'] + eos_token }}{% endif %}" + END,
    "chatml": turns(IM, "'<|im_end|>\\n'"),
    "zephyr": turns("'<|' + m['role'] + '|>\\n'", "eos_token + '\\n'"),
    "llama3": turns("'<|header|>' + m['role'] + '<|/header|>\\n\\n'", "'<|eot|>'", "m['content'] | trim"),
    "gemma": turns("'<turn>' + m['role'].replace('assistant', 'model') + '\\n'", "'</turn>\\n'", "m['content'] | trim"),
    # thinking stays behind the last question only, and an answer without one is given an empty one there
    "qwen3": EACH + THOUGHT + f"{{{{ {IM} }}}}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    f"{{{{ {LAST} + '<|im_end|>\\n' }}}}" + END + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    # asks for a thought, and writes messages as they are
    "begun": turns(IM, "'<|im_end|>\\n'", ask=" + '<think>\\n'"),
    # asks for a thought, and drops every one
    "dropped": turns(IM, "'<|im_end|>\\n'", LAST, ask=" + '<think>\\n'"),
}  # fmt: skip
SAID = [
    "Hello",
    " Hello",
    "  Two  words ",
    "\nWell\n",
    "\n\nNo",
    "",
    " ",
    "<think>\nhm\n</think>\n\nYes",
    "so\n</think>\n\nYes ",
    "<think>\nendless",
]
WHITE = ["", " ", "\n", "  ", "\n\n", " \n", "   "]


def pieces() -> Any:
    """As SentencePiece: spaces are a letter, and one at the beginning of a text is lost when it is decoded."""
    letters = [*map(chr, range(33, 127)), "\n", "▁"]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(["<pad>", "<s>", "<end>", *letters, "▁▁", "▁H"])}, [("▁", "▁"), ("▁", "H")]))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return wrapped(made, None)


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def plain(request: pytest.FixtureRequest) -> Any:
    return tokenizer(None, size=400) if request.param == "bytes" else pieces()


def held(speech: Any, said: list[str]) -> tuple[Made, list[tuple[list[int], str, list[int]]]]:
    """A conversation in which the target says so; and what it was asked, the text that came of its answer, and its tokens."""
    messages = [{"role": role, "content": f"q{i}"} for i in range(len(said)) for role in ("user", "assistant")]
    talk = converse(Item(1, "here", "1", messages, [], ""), speech, "all", lambda prompt: None)
    asked, found = next(talk), []
    for text in said:
        tokens = (ids(speech, text, special=False) if text else []) + [speech.eos_token_id]
        reader = Reader(speech, asked)
        text = reader.push(tokens[:-1]) + reader.end()
        found.append((asked, text, tokens))
        try:
            asked = talk.send(Answer(tokens, text, "stop", len(tokens)))
        except StopIteration as end:
            return end.value, found
    raise AssertionError


def possible(speech: Any, before: list[dict[str, str]], text: str) -> bool:
    """Some content or other comes out where the text was generated."""
    wanted = render(speech, before, ask=True) + text
    cores = {text, text.strip(), f"<think>\n{text}", f"<think>\n{text}".strip()}
    for core, a, b in product(cores, WHITE, WHITE):
        try:
            if render(speech, [*before, {"role": "assistant", "content": a + core + b}]).startswith(wanted):
                return True
        except BadRow:
            continue
    return False


@pytest.mark.parametrize("style", TEMPLATES)
def test_what_was_said_stands_where_it_was_said(style: str, plain: Any) -> None:
    plain.chat_template = TEMPLATES[style]
    stands, talks = 0, [talk for text in SAID for talk in ((text, " Hello"), (" Hello", text))]
    for said in talks:
        made, turns = held(plain, list(said))
        messages = made.record["messages"]
        spans = [(d["tokens"][:a], d["tokens"][a:b]) for d in made.record["documents"] for a, b in d["answers"]]
        assert spans == [(asked, tokens) for asked, _, tokens in turns]  # whatever the template does to history: as generated
        for i, (asked, text, tokens) in enumerate(turns):
            before = messages[: 2 * i + 1]
            assert asked == asking(plain, before)  # after what the template makes of the history
            finished = render(plain, messages[: 2 * i + 2])
            if possible(plain, before, text):
                stands += 1
                assert finished.startswith(render(plain, before, ask=True) + text)
                if not text.endswith(" "):  # pieces may join the template's space with it
                    assert ids(plain, finished, special=False)[: len(asked) + len(tokens) - 1] == asked + tokens[:-1]
                assert messages[2 * i + 1]["content"].strip() in (text.strip(), f"<think>\n{text}".strip())
        if len(made.record["documents"]) == 1:  # each turn was asked after exactly what had been said
            assert turns[1][0][: len(turns[0][0]) + len(turns[0][2])] == turns[0][0] + turns[0][2]
    as_is = {"mistral, as it stands", "chatml", "zephyr", "begun"}
    assert stands == 2 * len(talks) if style in as_is else stands >= 2


def test_the_template_says_how_an_answer_is_called(plain: Any) -> None:
    called = {
        "llama2": [(" Hello", "Hello"), ("Hello", "Hello")],
        "mistral": [(" Hello", "Hello"), ("  Hello ", " Hello "), ("Hello", "Hello")],
        "mistral, as it stands": [(" Hello", " Hello"), ("Hello", "Hello")],
        "chatml": [("Hello", "Hello"), ("\nHello\n", "\nHello\n")],
        "llama3": [("\nHello ", "Hello")],
        "begun": [("hm\n</think>\n\nYes", "<think>\nhm\n</think>\n\nYes")],
        "dropped": [("hm\n</think>\n\nYes", "<think>\nhm\n</think>\n\nYes")],
    }
    for style, answers in called.items():
        plain.chat_template = TEMPLATES[style]
        for text, content in answers:
            assert held(plain, [text])[0].record["messages"][-1]["content"] == content, style


def test_a_conversation_that_the_template_repeats_is_one_document(plain: Any) -> None:
    plain.chat_template = TEMPLATES["mistral"]
    made, turns = held(plain, [" Hello", " Yes", " No"])
    assert len(made.record["documents"]) == 1
    assert plain.decode(turns[2][0]).replace(" ", "") == "<s>[INST]q0[/INST]Hello<end>[INST]q1[/INST]Yes<end>[INST]q2[/INST]"


def test_a_conversation_is_kept_as_text_where_tokens_of_some_answers_are_missing() -> None:
    """As of an endpoint that returns them now and then."""
    documents = list[dict[str, Any]]()
    for prompt, tokens in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([7], [8]), ([7, 8], None), ([7, 8, 9], [1])):
        _add(documents, prompt, Answer(tokens, "", "stop", 1))
    whole = [{"tokens": [1, 2, 3, 4, 5, 6], "answers": [[2, 4], [5, 6]]}, {"tokens": [7, 8], "answers": [[1, 2]]}]
    assert documents[:2] == whole and _known(documents[:2]) == {"documents": whole}
    assert documents[2] == {} and _known(documents) == {}
