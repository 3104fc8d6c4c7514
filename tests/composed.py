"""The settings of a command line. To save time, Hydra composes each choice of groups once; other keys are then set as Hydra would."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parent.parent / "conf"
Plain = dict[str, Any]


def composed(*overrides: str, door: str = "config") -> Plain:
    """``overrides`` as on a command line."""
    choices = [text for text in overrides if _is_choice(text)]
    config = copy.deepcopy(_composed(door, *choices))
    for text in overrides:
        if text not in choices:
            OmegaConf.update(config, *_parsed(text), merge=True)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in plain.items()}


def _is_choice(override: str) -> bool:
    """Whether Hydra must handle this override: it chooses a group, or adds or removes a key."""
    key = override.partition("=")[0]
    return not key[0].isalpha() or "@" in key or (CONF / key).is_dir()


@functools.cache
def _composed(door: str, *choices: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(door, list(choices))


@functools.cache
def _parsed(override: str) -> tuple[str, Any]:
    found = OverridesParser.create().parse_override(override)
    return found.key_or_group, found.value()
