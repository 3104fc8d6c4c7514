"""Converts conversations from the forms found in data sets to the one that chat templates read: columns, role names, tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from headstart.data.masks import CUT
from headstart.inference.serving.text import BadRow, Messages, conversation, text_of, with_system
from headstart.inference.serving.thoughts import THOUGHTS

DEEPEST = 64  # levels of nesting in tools and arguments, which templates and checks walk recursively
CALLS, RESULTS = "function_call", ("observation", "function_response")  # ``from`` in ShareGPT's files with tools


class Preset(NamedTuple):
    """A commonly used data set: its place on the hub, and the columns of a row that hold the conversation (see ``in_columns``)."""

    path: str
    split: str = "train"
    subset: str = ""
    columns: tuple[str, ...] = ()


# The columns and splits are those on the data sets' cards. Those of sharegpt, openhermes and perfectblend are taken from programs that
# read these sets.
PRESETS = {
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", columns=("messages",)),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", columns=("conversations",)),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-MT-300K-Filtered", columns=("conversations",)),
    "openhermes": Preset("teknium/OpenHermes-2.5", columns=("conversations",)),
    "ultrafeedback": Preset("HuggingFaceH4/ultrafeedback_binarized", "train_sft", columns=("messages",)),
    "nemotron": Preset("nvidia/Nemotron-Post-Training-Dataset-v2", "chat", columns=("messages",)),
    "nemotron_v1": Preset("nvidia/Nemotron-Post-Training-Dataset-v1", "chat", columns=("messages",)),
    "perfectblend": Preset("mlabonne/open-perfectblend", columns=("conversations",)),
}


def preset(path: str, split: str, subset: str, columns: Sequence[str] | None) -> Preset:
    """The data set that ``path`` stands for. If it names a preset, the preset's split, subset and columns replace those not given. Any
    other path is taken as it is.
    """
    given = Preset(path, split, subset, tuple(columns or ()))
    if (known := PRESETS.get(path)) is None:
        return given
    return Preset(known.path, known.split if split == "train" else split, subset or known.subset, given.columns or known.columns)


def logged(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a server's log with the whole conversation under ``messages``: what an OpenAI-style request asked, then the first choice of
    its reply. Any other row is returned as it is.

    Request and reply are under ``request`` and ``response``, or are the row itself; each may have a ``body``, as in OpenAI's batches. A
    reply that the target did not end itself gets the key ``CUT``. Raises BadRow where the request ends with another answer than the
    reply's.
    """
    request, reply = (_body(row[key] if isinstance(row.get(key), dict) else row) for key in ("request", "response"))
    asked, choices = request.get("messages"), reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    said = first.get("message") if isinstance(first, dict) else None
    if not isinstance(said, dict) or not isinstance(asked, list) or not asked:
        return row
    last = asked[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        if last.get("content") != said.get("content"):
            raise BadRow("its request ends with an assistant's message, and the reply says something else")
        asked = asked[:-1]
    tools = {"tools": request["tools"]} if "tools" in request else {}
    cut = {CUT: True} if isinstance(first, dict) and _was_cut(first) else {}
    return {**row, **tools, "messages": [*asked, {"role": "assistant", **said, **cut}]}


def _was_cut(choice: dict[str, Any]) -> bool:
    """Whether something else than the target ended a choice: its tokens ran out, a filter, or a stop string (vLLM's ``stop_reason``, which
    may also be the number of a token that ends answers).
    """
    return choice.get("finish_reason") in ("length", "content_filter", "abort") or isinstance(choice.get("stop_reason"), str)


def _body(said: dict[str, Any]) -> dict[str, Any]:
    body = said.get("body")
    return body if isinstance(body, dict) else said


def in_columns(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """The row with its conversation under ``messages``. ``columns`` is one column that holds the conversation, or two: the question (or the
    conversation up to the answer) and the answer. If empty, the row is returned as ``logged`` does. Raises BadRow for a missing column, and
    names those that the row has.
    """
    if not columns:
        row = logged(row)
        if not {"messages", "conversations"} & row.keys():
            text = "; plain text is data=text" if isinstance(row.get("text"), str) else ""
            if isinstance(request := row.get("request"), dict) and isinstance(_body(request).get("messages"), list):
                raise BadRow('a server\'s log without a whole reply (no "message" in its first choice): leave out failed requests, and '
                             "write the pieces of a streamed reply as one message")  # fmt: skip
            if "regenerated" in row:
                text = "; answers that the target gave to plain text are data=regenerated"
            raise BadRow(
                f'not a conversation: no list "messages" or "conversations", it has {columns_of(row)}: data.columns=[question,answer] '
                f"names the columns of a question and its answer, data.columns=[talk] that of a conversation{text}"
            )
        return row
    if absent := [column for column in columns if row.get(column) is None]:
        raise BadRow(f"no column {absent[0]!r}, it has {columns_of(row)}: data.columns=[...] says which")
    asked = row[columns[0]]
    if len(columns) == 1:
        return {**row, "messages": asked}
    said = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    return {**row, "messages": [*said, {"role": "assistant", "content": row[columns[1]]}]}


def columns_of(row: dict[str, Any]) -> str:
    """The names of a row's columns, for messages."""
    return ", ".join(map(repr, row))[:200] or "nothing"


def talk_of(row: dict[str, Any], columns: Sequence[str] = ()) -> tuple[Messages, list[Any] | None]:
    """The messages of a row, and the tools that the assistant may call in it (None: no tools). A message that is not to be learnt has
    OpenAI's ``weight`` 0; one that was cut has ``CUT``.

    Raises BadRow for a malformed conversation, tool or tool call.
    """
    row = in_columns(row, columns)
    given = with_system(row)
    tools = _object(row.get("tools"), "tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools are no list of objects")
    if not isinstance(given, list):
        return conversation({"messages": given}), tools  # raises BadRow with the reason
    calls = [_calls(message) for message in given]
    plain = [_plain(message, bool(call)) for message, call in zip(given, calls, strict=True)]
    messages = conversation({"messages": plain})
    for message, call, said in zip(messages, calls, given, strict=True):
        if call and message["role"] != "assistant":
            raise BadRow(f"tool calls of {message['role']}: only an assistant calls tools")
        if (weight := said.get("weight")) not in (None, 0, 1):
            raise BadRow(f"the weight of a message is 0 or 1, found {weight!r:.60}")
        if message["role"] == "assistant":
            thought = next((text_of(said[key]) for key in THOUGHTS if said.get(key)), "").strip()
            more = {"tool_calls": call, "reasoning_content": thought, "weight": 0 if weight == 0 else None}
            more |= {CUT: True} if said.get(CUT) is True else {}
            message |= {key: value for key, value in more.items() if value not in ([], "", None)}
        elif message["role"] == "tool":
            message |= {key: said[key] for key in ("name", "tool_call_id") if isinstance(said.get(key), str)}
    return messages, tools


def _plain(message: Any, calls: bool) -> Any:
    """The message without its tool calls. A message that only calls tools gets an empty text."""
    if not isinstance(message, dict):
        return message
    found = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    if found.get("from") == CALLS:
        return found | {"from": "gpt", "value": ""}
    if found.get("from") in RESULTS:
        return found | {"from": "tool"}
    if calls and found.get("content") is None and found.get("value") is None:
        return found | {"content": ""}
    return found


def _calls(message: Any) -> list[dict[str, Any]]:
    """The tool calls of a message as templates read them: {"type": "function", "function": {"name", "arguments": an object}}.

    Raises BadRow for a malformed call.
    """
    if not isinstance(message, dict):
        return []
    if message.get("from") == CALLS:
        found, exact = _object(message.get("value"), "function_call"), isinstance(message.get("value"), str)
    else:
        found, exact = message.get("function_call") or message.get("tool_calls") or [], False
    made = []
    for call in found if isinstance(found, list) else [found]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("tool calls need a function with a name each")
        arguments = _object(function.get("arguments"), "the arguments of tool calls", exact) or {}
        if not isinstance(arguments, dict):
            raise BadRow("the arguments of tool calls must be an object")
        about = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        made.append({**about, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return made


def _object(value: Any, what: str, exact: bool = False) -> Any:
    """A copy of the value. A string is parsed as JSON (None if it is blank). Data sets give all rows the same keys, and set those that a
    row lacks to None. So keys with the value None are left out, except in JSON text (``exact``: the value was parsed from one).

    ``what``: the name of the value, for the error. Raises BadRow for invalid JSON, and for values nested more than ``DEEPEST`` levels.
    """
    if not isinstance(value, str):
        return _copied(value, what, exact, DEEPEST)
    try:
        return _copied(json.loads(value), what, True, DEEPEST) if value.strip() else None
    except (ValueError, RecursionError):
        raise BadRow(f"{what}: not JSON") from None


def _copied(value: Any, what: str, exact: bool, levels: int) -> Any:
    if not levels:
        raise BadRow(f"{what}: nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        return {key: _copied(each, what, exact, levels - 1) for key, each in value.items() if exact or each is not None}
    return [_copied(each, what, exact, levels - 1) for each in value] if isinstance(value, list) else value
