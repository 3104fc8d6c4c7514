"""The command line: corrections before hydra reads it, and the error messages where hydra cannot read it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, MissingMandatoryValue

from headstart.door import usage
from headstart.door.early import one_line, reader_may_leave
from headstart.door.sweep import defaults, given
from headstart.door.values import choices, of_yaml, readers
from headstart.door.words import listed, no_key
from headstart.heads.errors import UserError, near
from headstart.heads.override import quoted
from headstart.heads.renamed import override_of_now

LONGEST, DEEPEST = 2000, 100  # most characters of an error; most nested brackets of a setting (hydra hardly gets through more)
ARMS = """arms="{a:'head=NAME',b:'head=NAME loss=tv'}\""""  # as a shell wants it
ERRORS = "HEADSTART_ERRORS"  # the number of an open file, for the errors of a process that door/launch.py started


def command_of(*known: str) -> str:
    """Take the command that the command line begins with out of ``sys.argv`` and return it; "" if it begins with a setting or an option.
    An unknown command ends the process with an error.
    """
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in known:
        del sys.argv[1]
        return word
    if re.fullmatch(r"[\w-]+", word) and not word.startswith("-"):
        end(f"there is no command {word!r}{near(word, known)}: give {', '.join(known)}, or key=value alone")
    return ""


def examples(doc: str | None, command: str = "") -> str:
    """The text that --help shows first: a door's docstring without its first paragraph; for a command only the lines that call it."""
    lines = (doc or "").partition("\n\n")[2].splitlines()
    return "\n".join(line for line in lines if not command or f" {command} " in line)


def door_of_words(command: str, doc: str | None, run: Callable[[Sequence[str]], object], bare: bool = False) -> None:
    """Run a door that takes plain words, not settings of conf/. ``run`` gets the words that follow ``command``. --help prints ``doc``
    without its first paragraph; so does a command line without words, unless the door can run without any (``bare``).
    """
    if sys.argv[1:2] == [command]:
        del sys.argv[1]
    if {"-h", "--help"} & {*sys.argv[1:]} or not (bare or sys.argv[1:]):
        with reader_may_leave():
            print(examples(doc).strip())
        raise SystemExit(0)
    with one_line(), reader_may_leave():
        try:
            run(sys.argv[1:])
        except UserError as e:
            end(str(e))


def command_line(config_name: str) -> Any:
    """Parse hydra's options, which may stand anywhere, and put ``sys.argv`` in the order that hydra reads. Raises UserError for options
    that a door does not take.
    """
    parser = get_args_parser()
    with suppress(PackageNotFoundError):  # not installed: --version then shows hydra's own
        next(action for action in parser._actions if action.dest == "version").version = f"headstart {version('headstart')}"  # type: ignore[attr-defined]

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; settings are key=value, --help lists them")

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(sys.argv[1:])
    for name in ("config_name", "config_path", "experimental_rerun"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is not for this command, whose settings are those of conf/: give key=value, or --config-dir=DIR "
                            "with YAMLs of your own (DIR/experiment/NAME.yaml)")  # fmt: skip
    if deep := next((argument for argument in options.overrides if _depth(argument) > DEEPEST), None):
        raise UserError(f"{deep.partition('=')[0][:80]}: more than {DEEPEST} brackets lie within each other")
    if not options.shell_completion:
        options.overrides = of_now([as_typed(argument) for argument in options.overrides], config_name)
        dashed = [f"--{name.replace('_', '-')}" for name in ("multirun", "run", "resolve", "hydra_help") if getattr(options, name)]
        valued = [
            f"--{name.replace('_', '-')}={value}" for name in ("cfg", "package", "config_dir", "info") if (value := getattr(options, name))
        ]
        sys.argv[1:] = [*dashed, *valued, *options.overrides]
    return options


def _depth(argument: str) -> int:
    """How deep brackets are nested; an unmatched closing bracket is ignored."""
    now = most = 0
    for sign in argument:
        now = max(0, now + (sign in "[{(") - (sign in "]})"))
        most = max(most, now)
    return most


def as_typed(argument: str) -> str:
    """The argument, its value quoted where hydra could not read it: so key=a=b (a run folder, say) can be typed without quotes."""
    key, equals, value = argument.partition("=")
    if equals and not value.startswith(("[", "{", "'", '"')) and "${" not in value:
        try:
            OverridesParser.create().parse_override(argument)
        except HydraException:
            return f"{key}={quoted(value)}"
    return argument


def of_now(arguments: Sequence[str], config_name: str) -> list[str]:
    """The command line with the present names of keys that were renamed (heads/renamed.py)."""
    head = re.split(r"[,\[\] ]+", given(arguments).get("head", "").strip("[]"))[0]
    return [override_of_now(argument, config_name, head) for argument in arguments]


def check_overrides(config_name: str, arguments: Sequence[str]) -> None:
    """Raises UserError for arguments that hydra would misread, or report in its own terms."""
    groups, not_taken = usage.groups(config_name), usage.not_taken(config_name)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if own := not_taken.get(key.lstrip("+")):
            raise UserError(f"{argument} is for a report: {own}")
        if key in groups and value.startswith("[") and not _apart(key, value):  # hydra would merge them
            raise UserError(f"{argument}: one choice of {key} in a run; for one run each: --multirun {key}={value.strip('[]')}")
        if key in groups and {each.strip(" '\"") for each in value.split(",")} & {"null", ""}:
            raise UserError(f"{argument}: {key} is one of {', '.join(choices(key))}, or left out")
        if key.startswith("+") and key.lstrip("+") in groups:
            raise UserError(f"{key.lstrip('+')} is there already: give {argument.lstrip('+')}")
        if key.startswith("~"):
            raise UserError(f"{argument}: nothing can be taken out of the configuration, only changed")


def _apart(group: str, several: str) -> bool:
    """Whether these choices of a group can be combined: no key is in two of them. (Trackers may share keys: they mean the same to each.)"""
    words = [word.strip() for word in several.strip("[]").split(",")]
    found = [key for word in words if word in choices(group) for key in of_yaml(group, word)]
    return len(words) > 1 and (group == "tracker" or len(found) == len(set(found)))


# ---- what went wrong ----


def end(text: str) -> NoReturn:
    """Print each line on stderr as an error, and exit with code 2."""
    for line in text.splitlines():
        _tell(line if len(line) < LONGEST else line[:LONGEST] + " ...")
    raise SystemExit(2)


def _tell(line: str) -> None:
    """Print an error, or pass it to the launcher, which prints those of all processes."""
    rank, file = os.environ.get("RANK", "0"), os.environ.get(ERRORS)
    if file is not None:
        with suppress(OSError, ValueError):  # a full disk
            os.write(int(file), f"{json.dumps([int(rank), line])}\n".encode())
            return
    where = "" if rank == "0" else f" (process {rank})"
    print(f"error{where}: {line}", file=sys.stderr)


def explain(error: Exception, config_name: str, arguments: Sequence[str] | None = None) -> str:
    """The line for an error, with the key and the nearest valid ones. ``arguments``: the command line that it is about, if not this one."""
    given_here = sys.argv[1:] if arguments is None else list(arguments)
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    if isinstance(error, MissingMandatoryValue):
        return absent([str(error.full_key)], config_name, given_here)
    if isinstance(error, InterpolationKeyError) and (wanted := re.search(r"Interpolation key '(\S+)' not found", text)):
        known = defaults(config_name, chosen(config_name, given_here)).keys
        if wanted[1] in known:
            return absent([wanted[1]], config_name, given_here)
        return f"{_with('${', given_here)} refers to {wanted[1]}, which is not there{near(wanted[1], known)}"
    if several := re.search(r"Ambiguous value for argument '([\w.]+)=(\S+?)'", text):
        key, values = several[1], several[2]
        beside = f"'{key}=[{values}]' trains them side by side, " if (config_name, key) == ("config", "head") else ""
        return f"{key}={values} has several values: {beside}--multirun {key}={values} makes a run for each"
    if isinstance(error, OverrideParseException):
        how = f": give {ARMS}, with both kinds of quotes" if error.override.startswith("arms=") else f": {text.splitlines()[0]}"
        if "=" not in error.override:
            how = ": settings are key=value"
            is_folder = os.path.isdir(error.override)  # noqa: PTH112 (Path.is_dir raises for names that are too long)
            if is_folder and "speculator" in defaults(config_name, ()).keys:
                how += f" (speculator={error.override}?)"
        return f"cannot read {error.override!r} on the command line{how}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_choice(*error.missing_cfg_file.partition("/")[::2], list(error.options or ()))
    if wrong := re.search(r"(?:Could not (?:override|find|append to config)|An item is already at) '?([\w./@]+)'?", text):
        return no_such_key(wrong[1].replace("/", "."), config_name, given_here)
    if isinstance(error, InterpolationResolutionError):
        return f"{_with('${', given_here)} cannot be resolved: {' '.join(text.split())}"
    return " ".join(text.split())


def _no_choice(group: str, choice: str, found: Sequence[str]) -> str:
    """The error for an unknown choice of a group. For target and data it adds how to give a path, or a name on the hub."""
    known = found or choices(group)
    others = {
        "target": f"; any other, a folder or a name on the hub: target=folder target.path={choice}",
        "data": f"; for a file, a folder or a data set: data=chat path={choice} (conversations) or data=text path={choice}",
    }
    meant = "" if "/" in choice else near(choice, known)
    return f"{group}={choice}: there is no such choice, {group} is one of {', '.join(known)}{meant}{others.get(group, '')}"


def absent(keys: Sequence[str], config_name: str, arguments: Sequence[str] | None = None) -> str:
    """The error for keys without a value; for a single one with its comment in conf/."""
    if len(keys) > 1:
        return f"{listed(keys, 'and')} have no value: give {' '.join(f'{key}=...' for key in keys)}"
    about = usage.about(config_name, given(sys.argv[1:] if arguments is None else arguments)).get(keys[0], "")
    return f"{keys[0]} has no value: give {keys[0]}=..." + (f" ({about})" if about else "")


def _with(sign: str, arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if sign in argument), "a setting")


def chosen(config_name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments that take an existing choice of a group."""
    groups = usage.groups(config_name)
    return tuple(f"{group}={choice}" for group, choice in given(arguments).items() if group in groups and choice in choices(group))


def no_such_key(key: str, config_name: str, arguments: Sequence[str]) -> str:
    """The error for a key that hydra does not find: how to give it, or which known keys are near."""
    known = defaults(config_name, chosen(config_name, arguments)).keys
    if key == "path" and "data" in known:
        return f"path=... is for data that are read from a file or folder: give one of {readers()} too"
    if f"+{key}" in (a.partition("=")[0].replace("++", "+") for a in arguments if not a.partition("=")[2].startswith("{")):
        if key in known:
            return f"{key} is there already: give {key}=... without +"
    elif key in known:  # the unknown key is within the dictionary that was given
        add = f"++{key}={{...}}" if key.count(".") > 1 else f"++{key}.KEY=..."
        return f"{key}: a key that is given within it is new to it: {add} adds it"
    parent = key.rpartition(".")[0]
    beside = [k for k in known if k.rpartition(".")[0] == parent] or [k for k in known if "." not in k]
    add = f"; to add an entry: +{key}=..." if key.count(".") > 1 else ""
    return no_key(key, known, beside) + add
