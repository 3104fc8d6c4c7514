"""The frame of every door: Hydra composes the configuration, the door gets it as plain dictionaries, a user's error comes out as one line.

``train.py`` and the ``__main__.py`` of the folders are doors. Code below the doors knows neither Hydra nor the models that settings are
checked with (door/schema.py). Errors in settings are reported before torch and the target are loaded.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from headstart.door import idle, usage
from headstart.door.arguments import absent, as_typed, check_overrides, command_line, end, explain, of_now
from headstart.door.early import as_usual, never_ignored, one_line, reader_left
from headstart.door.places import called
from headstart.door.schema import DOORS
from headstart.door.sweep import Done, folder_of_all, label, overrides, swept, swept_in
from headstart.door.values import CONF
from headstart.door.words import explained
from headstart.heads.errors import UserError, counted
from headstart.heads.override import quoted
from headstart.heads.renamed import settings_of_now

Settings = dict[str, Any]


def enter(
    config_name: str, run: Callable[[Settings], None], commands: str = "", at_end: Callable[[list[Done], Path], None] | None = None
) -> None:
    """Compose ``conf/CONFIG_NAME.yaml`` with the command line and call ``run`` with it (once for each run of a --multirun).

    A wrong key, choice, type or missing value, and any ``UserError`` of ``run``, ends in one line and exit code 2; in a --multirun the
    other runs go on, and ``at_end`` gets all runs and a folder to write into. ``commands``: text that --help shows first.
    """
    done: list[Done] = []
    many: _Many | None = None
    started = False

    def job(config: DictConfig) -> None:
        nonlocal started
        started = True
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            done.append(_one_of_many(config, config_name, run, {} if many is None else many.wrong))
            return
        try:
            plain = _settings(config, config_name)
            with as_usual():
                run(plain)
        except (UserError, OmegaConfBaseException) as e:  # caught here: hydra would add a message of its own
            end(explain(e, config_name))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises what it would print; anything unforeseen keeps its trace
    with one_line(), never_ignored():
        try:
            options = command_line(config_name)
            if options.help:
                print(usage.text(config_name, commands, options.overrides), flush=True)
                return
            if not options.shell_completion:
                check_overrides(config_name, options.overrides)
            many = _look_ahead(config_name, options) if options.multirun else None
            try:
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)()
            finally:
                if not started:  # --cfg: a flush at Python's exit would raise where nobody can catch it
                    sys.stdout.flush()
            if many is not None and at_end is not None and not all(each.error for each in done):
                with as_usual():
                    at_end(done, many.folder)
            if failed := [each for each in done if each.error]:
                end(f"{len(failed)} of {len(done)} runs failed: {', '.join(each.label for each in failed)}")
        except (UserError, HydraException, OmegaConfBaseException) as e:
            end(explain(e, config_name))
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":  # printed once, not by every process
                print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:  # `--help | head`: the reader has what it wanted
            if started:
                raise
            reader_left()
        except (ValueError, AssertionError, OSError) as e:  # raised by hydra, for some command lines and for settings of its own
            about = [argument for argument in sys.argv[1:] if argument.startswith("hydra.")]
            if started or not (about or isinstance(e, ValueError)):
                raise
            end(explain(e, config_name) if isinstance(e, ValueError) else f"{about[0]}: {str(e) or 'hydra cannot use it'}")


def loading(config: Settings, more: str = "", what: str = "loading") -> None:
    """Print what is loaded, before imports that take seconds. A run of several processes prints nothing."""
    if "RANK" not in os.environ:
        print(f"{what} {called(config['target'])} ({config['target']['path']}){more} ...", flush=True)


def load_torch() -> None:
    """Import torch and what needs it, which takes seconds. Ctrl-C ends the process with one line: torch would turn a KeyboardInterrupt
    during its imports into another error.
    """
    with one_line():
        import headstart.heads.orders  # noqa: F401


class _Many(NamedTuple):
    """A --multirun whose runs have been checked."""

    folder: Path  # for what is written about all its runs
    wrong: dict[str, str]  # label of a run with a wrong setting -> the error


def _look_ahead(config_name: str, options: Any) -> _Many:
    """Check all runs of a --multirun before the first one starts. Raises UserError if all of them are wrong."""
    arguments, wrong, right = options.overrides, dict[str, str](), 0
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        folder, several = folder_of_all(config_name, arguments), swept_in(arguments)
        if options.config_dir is None and not any(argument.startswith("hydra") for argument in arguments):
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            (runs,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
            if not several or not runs:
                raise UserError("--multirun: there is nothing to try several values of: key=a,b, or group=a,b")
            print(f"{counted(len(runs), 'run')}, {folder}", flush=True)
            for run in runs:
                name = label(config_name, run, several)
                try:
                    config = hydra.compose(config_name, run)
                except (HydraException, OmegaConfBaseException) as e:  # because of it, hydra would start no run at all
                    why = explain(e, config_name, run)
                    raise UserError(why if why.startswith(f"{name}:") else f"{name}: {why}") from e
                try:
                    checked(config, config_name)
                    right += 1
                except (UserError, OmegaConfBaseException) as e:
                    wrong[name] = explain(e, config_name, run).replace("\n", "; ")
    if wrong and not right:
        raise UserError("\n".join(dict.fromkeys(wrong.values())))
    for name, why in wrong.items():
        print(f"error: {name}: {why}", file=sys.stderr, flush=True)
    if not any(argument.startswith("hydra.sweep.dir=") for argument in arguments):
        sys.argv.append(f"hydra.sweep.dir={quoted(str(folder))}")  # hydra writes multirun.yaml into it
    return _Many(folder, wrong)


def _one_of_many(config: DictConfig, config_name: str, run: Callable[[Settings], None], wrong: dict[str, str]) -> Done:
    """One run of a --multirun. If it fails, its error is printed and returned, and the other runs go on. With several processes they go on
    only if all processes have failed in this run. Otherwise SystemExit is raised, because the others may still wait for this one.
    """
    name, plain, why = label(config_name, overrides(), swept()), Settings(), ""
    if name in wrong:
        return Done(name, plain, wrong[name])
    print(f"{name}:", flush=True)
    try:
        plain = _settings(config, config_name)
        with as_usual():
            run(plain)
    except SystemExit as e:
        if not isinstance(e.code, int) or e.code == 0 or e.code > 128:  # interrupted: the others are not wanted either
            raise
        why = f"ended with exit code {e.code}"  # its processes have said why
    except Exception as e:
        if not isinstance(e, UserError | OmegaConfBaseException):
            traceback.print_exc()
        why = explain(e, config_name).replace("\n", "; ") or repr(e)
        print(f"error: {name}: {why}", file=sys.stderr, flush=True)
    if why and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from headstart.trainers.processes import failed_alike

        if not failed_alike(name):
            print(f"error: {name}: not all processes have failed alike: the remaining runs do not begin", file=sys.stderr, flush=True)
            raise SystemExit(2)
    return Done(name, plain, why)


# ---- the configuration ----


def _settings(config: DictConfig, config_name: str) -> Settings:
    """The checked settings of the run that is under way. Raises UserError, for settings without effect too."""
    plain = checked(config, config_name)
    idle.check(config_name, plain, overrides())
    return plain


def checked(config: DictConfig, config_name: str) -> Settings:
    """The settings, resolved and checked, as plain dictionaries and lists. Raises UserError with a line for each wrong setting."""
    plain = settings_of_now(_plain(config), config_name)
    model = DOORS[config_name]
    try:
        return model.model_validate(plain).model_dump(exclude_unset=True)
    except ValidationError as e:
        raise UserError("\n".join(explained(e, model, plain, lambda keys: absent(keys, config_name)))) from None


def compose_again(config_name: str, arguments: list[str]) -> Settings:
    """The checked settings of another command line, composed while hydra is running. Raises UserError for what is wrong in it."""
    arguments = of_now([as_typed(argument) for argument in arguments], config_name)
    try:
        with one_line():
            check_overrides(config_name, arguments)
            return checked(hydra.compose(config_name, arguments), config_name)
    except (HydraException, OmegaConfBaseException) as e:
        raise UserError(explain(e, config_name, arguments)) from e


def check_head(head: Settings) -> Any:
    """The drafter's class. Raises UserError where its constructor does not take these settings. Imports torch, and needs no target."""
    from headstart.heads import hub

    arguments = {key: value for key, value in head.items() if key != "name"}
    if type(arguments.get("draft_vocab")) is int and arguments["draft_vocab"] > 0:  # a number of tokens, which the data will choose
        arguments["draft_vocab"] = [0]
    return hub.check_arguments(head["name"], arguments)


def _plain(config: DictConfig) -> Settings:
    """The resolved configuration as a dictionary. Top-level settings without a value (the shorthand ``path``) are left out; for others
    OmegaConf raises an error.
    """
    with open_dict(config):
        for key in [k for k in config if OmegaConf.is_missing(config, k)]:
            del config[key]
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
