"""The frame of every door: Hydra composes the configuration, plain dictionaries go in, errors of the user come out as one line.

``train.py`` and the ``__main__.py`` of the folders are doors. Below them nothing knows of Hydra.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from heads.errors import UserError

CONF = Path(__file__).resolve().parent / "conf"

# What may replace a value of each type on the command line; null may replace anything.
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str, int, float), "a word"),
    ListConfig: ((ListConfig,), "a list: [a, b]"),
    DictConfig: ((DictConfig,), "a dictionary: {key: value}"),
}


def command_of(*known: str) -> str:
    """The command that the command line begins with, taken out of it; "" where it begins with a setting or an option."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in known:
        del sys.argv[1]
        return word
    if re.fullmatch(r"[\w-]+", word) and not word.startswith("-"):
        _end(UserError(f"there is no command {word!r}{_near(word, list(known))}: give {', '.join(known)}, or key=value alone"), "")
    return ""


def enter(config_name: str, run: Callable[[dict[str, Any]], None], commands: str = "") -> None:
    """Compose ``conf/CONFIG_NAME.yaml`` with the command line and call ``run`` with it (once per job of a --multirun).

    A wrong key, choice, type or missing value, and any ``UserError`` of ``run``, ends in one line and exit code 2. ``commands``: what
    --help says before all else.
    """

    started = False

    def job(config: DictConfig) -> None:
        nonlocal started
        started = True
        try:
            _check_overrides(config, config_name, overrides())
            run(_plain(config))
        except (UserError, OmegaConfBaseException) as e:
            _end(e, config_name)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises what it would print; anything unforeseen keeps its trace
    try:
        if commands and {"-h", "--help"} & set(sys.argv[1:]):
            print(commands)
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
        finally:
            if not started:  # --help, --cfg: what is written as Python ends would raise where nobody can catch it
                sys.stdout.flush()
    except (HydraException, OmegaConfBaseException) as e:
        _end(e, config_name)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `--help | head`: it has what it wanted
        if started:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as e:  # hydra's own for some command lines (head=null)
        if started:
            raise
        _end(e, config_name)


def overrides() -> list[str]:
    """The command line of the job that is running."""
    return list(HydraConfig.get().overrides.task)


def compose_again(config_name: str, arguments: list[str]) -> dict[str, Any]:
    """Within a job: the configuration of another command line. Raises UserError for what is wrong in it."""
    try:
        config = hydra.compose(config_name, arguments)
        _check_overrides(config, config_name, arguments)
        return _plain(config)
    except (HydraException, OmegaConfBaseException) as e:
        raise UserError(_explain(e, config_name)) from e


def _plain(config: DictConfig) -> dict[str, Any]:
    """Resolved, as plain dictionaries and lists. A shorthand of the first level may stay missing where nothing needs it."""
    with open_dict(config):
        for key in [k for k in config if OmegaConf.is_missing(config, k)]:
            del config[key]
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _end(error: Exception, config_name: str) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (process {rank})"
    print(f"error{where}: {_explain(error, config_name)}", file=sys.stderr)
    raise SystemExit(2)


def _explain(error: Exception, config_name: str) -> str:
    """One line that names the key and the nearest valid ones."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    if isinstance(error, InterpolationKeyError | MissingMandatoryValue):
        wanted = re.search(r"Interpolation key '(\S+)' not found", text)
        return f"{error.full_key} has no value: give {wanted[1] if wanted else error.full_key}=..."
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r} on the command line: {text.splitlines()[0]}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        known = list(error.options or ())
        return f"{group}={choice}: there is no such choice, {group} is one of {', '.join(known)}{_near(choice, known)}"
    if wrong := re.search(r"Could not (?:override|find|append to config) '?([\w./@]+)'?", text):
        return _no_such_key(wrong[1].replace("/", "."), config_name)
    return " ".join(text.split())


def _no_such_key(key: str, config_name: str) -> str:
    known = list(_keys(_defaults(config_name, sys.argv[1:])))
    if f"+{key}" in (a.partition("=")[0].replace("++", "+") for a in sys.argv[1:] if not a.partition("=")[2].startswith("{")):
        if key in known:
            return f"{key} is there already: give {key}=... without +"
    elif key in known:  # hydra means a key within the dictionary that was given
        add = f"++{key}={{...}}" if key.count(".") > 1 else f"++{key}.KEY=..."
        return f"{key}: a key that is given within it is new to it: {add} adds it"
    parent = key.rpartition(".")[0]
    beside = [k for k in known if k.rpartition(".")[0] == parent] or [k for k in known if "." not in k]
    add = f"; to add an entry: +{key}=..." if key.count(".") > 1 else ""
    return f"there is no key {key!r}{_near(key, known)}; beside it: {', '.join(beside)}{add}"


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    for key in map(str, config) if isinstance(config, DictConfig) and not config._is_none() else ():
        yield prefix + key
        if not (OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key)):
            yield from _keys(config[key], f"{prefix}{key}.")


def _groups(config_name: str) -> set[str]:
    primary = OmegaConf.load(CONF / f"{config_name}.yaml")
    assert isinstance(primary, DictConfig)
    return {str(group) for item in primary.defaults if isinstance(item, DictConfig) for group in item}


def _defaults(config_name: str, arguments: list[str]) -> DictConfig:
    """The configuration with the choices of groups that the command line makes, and none of its values."""
    groups = _groups(config_name)
    pairs = [a.partition("=")[::2] for a in arguments]
    choices = [f"{group}={choice}" for group, choice in pairs if group in groups and (CONF / group / f"{choice}.yaml").is_file()]
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, choices)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(config_name, choices)


def _check_overrides(config: DictConfig, config_name: str, given: list[str]) -> None:
    """A value has the type of the value it replaces; a key that is added must lie within an open dictionary (loss.terms, head.config)."""
    defaults, groups = _defaults(config_name, given), _groups(config_name)
    for override in given:
        key, _, value = override.partition("=")
        if key in groups and value.startswith("["):  # hydra would lay one over the other
            raise UserError(f"{override}: one choice of {key} in a run; for one run each: --multirun {key}={value.strip('[]')}")
        if key.startswith("+") and key.count(".") < 2:
            raise UserError(_no_such_key(key.lstrip("+"), config_name))
        if key.startswith("~"):
            raise UserError(f"{override}: nothing can be taken out of the configuration, only changed")
        if key in groups or not re.fullmatch(r"[\w.]+", key):
            continue
        parent, _, last = key.rpartition(".")
        above = OmegaConf.select(defaults, parent) if parent else defaults
        if not isinstance(above, DictConfig) or OmegaConf.is_missing(above, last) or OmegaConf.is_interpolation(above, last):
            continue
        new = OmegaConf.select(config, key)
        allowed, name = KINDS.get(type(above[last]), ((object,), ""))
        if new is not None and (not isinstance(new, allowed) or (isinstance(new, bool) and bool not in allowed and object not in allowed)):
            raise UserError(f"{key} must be {name}, got {new!r}")
