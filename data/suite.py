"""Evaluation suites: questions of one or more turns, by category. They are read from a local file or from the Hugging Face hub."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from headstart.data.forms import logged
from headstart.data.prompts import Size, check_sizes, say_skipped
from headstart.data.rows import Row, file_rows, hub_rows, parsed
from headstart.heads.errors import UserError, first_line
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.reports.evaluate import ALL, Question, Words
from headstart.inference.serving.text import BadRow, Messages, Reader, asking, conversation, ids, in_history, render, spoken, text_of

NAMES = ("question_id", "id", "prompt_id", "task_id", "unique_id")  # columns in which files and data sets keep a question's name
BETWEEN = "\n\n"  # separates an answer from the next turn in plain text


def questions(suite: dict[str, Any], path: str | None, count: int | None) -> list[Question]:
    """The questions of a suite (a YAML of conf/suite), from the file ``path``, or from the hub (None). ``count``: only the first so many of
    each group, of its categories in turn. Raises UserError for a source that cannot be read, a row that is not a question, and a suite
    without questions.
    """
    found = list[Question]()
    groups = {category: group for group, categories in suite["groups"].items() for category in categories}
    for row in _rows(suite, path):
        try:
            found.append(_question(parsed(row.value), row.number, suite, groups))
        except BadRow as error:
            raise UserError(f"{row.where}: {error}") from None
    if not found:
        raise UserError(f"{f'path={path}' if path else suite['hub']}: no prompts in it")
    return found if count is None else _first(found, count)


def _first(questions: Sequence[Question], count: int) -> list[Question]:
    """The first ``count`` questions of each group, in their order: one of each of its categories, then the second of each, and so on."""
    seen, of_group = Counter[str](), defaultdict[str, list[tuple[int, int]]](list)
    for place, question in enumerate(questions):
        of_group[question.group].append((seen[question.category], place))
        seen[question.category] += 1
    kept = sorted(place for places in of_group.values() for _, place in sorted(places)[:count])
    return [questions[place] for place in kept]


def _rows(suite: dict[str, Any], path: str | None) -> Iterator[Row]:
    if path is not None:
        yield from file_rows(path)
        return
    try:
        read = hub_rows(suite["hub"], suite["split"], suite["subset"])
    except UserError as error:
        what = f"the Hugging Face dataset {suite['hub']} did not load ({first_line(error.__cause__ or error)})"
        raise UserError(f"suite={suite['name']}: {what}: give path=FILE.jsonl, a local copy") from error
    for number, row in enumerate(read, 1):
        yield Row(f"{suite['hub']} row {number}", number, row)


def _question(row: dict[str, Any], number: int, suite: dict[str, Any], groups: dict[str, str]) -> Question:
    turns = _turns(row, suite["turns"])
    category = row.get("category") if suite["category"] is None else row.get(suite["category"], row.get("category"))
    category = suite["name"] if category is None else str(category)
    if (group := groups.get(category, category)) == ALL:
        raise BadRow(f"its category is called {ALL}, as the sum of all is: rename it, or sum it up as suite.groups={{NAME:[{category}]}}")
    name = next((row[key] for key in NAMES if isinstance(row.get(key), str | int)), number)
    return Question(name, category, group, turns)


def _turns(row: dict[str, Any], column: str) -> list[str]:
    """The user's turns. The answers of a recorded conversation are left out, because each evaluated side gives its own answers.

    Raises BadRow for a row without a question.
    """
    row = logged(row)
    said = next((row[key] for key in ("turns", column, "prompt") if row.get(key) is not None), None)
    if said is None and ("messages" in row or "conversations" in row):
        messages = conversation(row)
        if other := next((m["role"] for m in messages if m["role"] not in ("user", "assistant")), None):
            raise BadRow(f"a suite asks the turns of a user, and this conversation has a message of {other}: leave that out")
        said = [m["content"] for m in messages if m["role"] == "user"]
    if said is None and "text" in row:
        raise BadRow('a suite asks questions, and this is a "text": call it "prompt" (and give raw=true where no chat template is meant)')
    turns = [] if said is None else [text_of(turn) for turn in (said if isinstance(said, list) else [said])]
    if not turns or not all(turn.strip() for turn in turns):
        raise BadRow(f'not a question: no text in "turns", "{column}", "prompt" or "messages"')
    return turns


def words(tokenizer: Any, raw: bool) -> Words:
    """The conversion of questions to tokens and of answers to text. Questions go through the target's chat template. Without a template, or
    with ``raw``, they are plain text: a turn, its answer, an empty line, the next turn. ``ask`` raises UserError if the template refuses.
    """

    def as_text(turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        before = "".join(turn + answer + BETWEEN for turn, answer in zip(turns, answers, strict=False))
        return ids(tokenizer, before + turns[-1], special=True)

    def as_chat(turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        messages: Messages = []
        for turn, answer in zip(turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            said = in_history(tokenizer, messages, render(tokenizer, messages, ask=True), answer)
            messages.append({"role": "assistant", "content": said})
        return asking(tokenizer, [*messages, {"role": "user", "content": turns[-1]}])

    def ask(turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        try:
            return (as_text if raw or not tokenizer.chat_template else as_chat)(turns, answers)
        except BadRow as error:
            raise UserError(f"a prompt of the suite cannot be asked ({error}): {turns[-1]!r:.80}") from None

    def spell(prompt: Sequence[int], tokens: Sequence[int]) -> str:
        reader = Reader(tokenizer, prompt)
        return spoken(tokenizer, reader.push(tokens) + reader.end(), tokens)

    return Words(ask, spell)


def fitting(
    found: list[Question], words: Words, target: TargetInfo, new_tokens: int, on_long: str, path: str
) -> tuple[list[Question], int]:
    """The questions that fit the target's context in every turn, if each answer has ``new_tokens`` tokens. Also returns the tokens of the
    longest turn with its answer, at most the context. ``on_long`` is for questions that do not fit: "error" raises UserError that names
    them, "skip" leaves them out, and "cut" keeps them. Raises UserError if none fits.
    """
    limit = target.shape.max_positions
    if new_tokens >= limit:
        raise UserError(f"new_tokens={new_tokens} leave no room for a prompt in the target's context of {limit}")
    lengths = [[len(words.ask(q.turns[: i + 1], [""] * i)) + i * new_tokens for i in range(len(q.turns))] for q in found]
    sizes = [_worst([Size(str(q.name), n, longest(target, n)) for n in each], new_tokens) for q, each in zip(found, lengths, strict=True)]
    if on_long == "error":
        check_sizes(sizes, new_tokens, "new_tokens", ", or on_long=skip or cut")
    kept = [i for i, size in enumerate(sizes) if size.fits(new_tokens) or on_long == "cut"]
    if len(kept) < len(found):
        say_skipped(path, [size for size in sizes if not size.fits(new_tokens)], len(found), new_tokens)
    if not kept:
        raise UserError(f"{path}: no prompts in it that fit the target's context")
    return [found[i] for i in kept], min(max(max(lengths[i]) for i in kept) + new_tokens, limit)


def _worst(turns: Sequence[Size], new_tokens: int) -> Size:
    """The longest turn of a question that does not fit, else the longest one: a rope's turn may stop a turn that is not the longest."""
    return max(turns, key=lambda size: (not size.fits(new_tokens), size.tokens))
