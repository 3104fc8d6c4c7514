"""The Hydra tree: everything composes and is what door/schema.py says, drafters accept their YAML, every key has a comment."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from headstart.door import checked, usage
from headstart.door.groups import Data, Decode, Export, Lora, Loss, OnPolicy, Target
from headstart.door.schema import DOORS
from headstart.door.values import choices, said
from headstart.heads.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())
CHOICES = [(group, p.stem) for group in GROUPS for p in sorted((CONF / group).glob("*.yaml"))]
HEADS = [choice for group, choice in CHOICES if group == "head"]
YAMLS = sorted(p.stem for p in CONF.glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def hydra_conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def filled(*overrides: str, door: str = "config") -> Any:
    """The composed configuration, with something in the places that the user must fill."""
    config = compose(door, list(overrides))
    shorthands = [str(key) for key in config if OmegaConf.is_missing(config, str(key))]  # first: others refer to them
    for key in shorthands:
        config[key] = "given"
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "given")
    return config


def plain(*overrides: str, door: str = "config") -> dict[str, Any]:
    return unchanged(filled(*overrides, door=door), door)


def unchanged(config: Any, door: str) -> dict[str, Any]:
    """Its settings, which are what its schema says and come out as they went in."""
    found = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(found, dict) and checked(config, door) == found
    return found


# ---- it composes, and is what the schema says ----


@pytest.mark.parametrize("door", YAMLS)
def test_every_door_composes_and_has_a_schema(door: str) -> None:
    config = plain(*(["run=given"] if door == "diagnose" else []), door=door)  # which wants one of two
    assert "target" not in DOORS[door].model_fields or config["target"]["name"]
    assert set(config) - {"path"} == set(DOORS[door].model_fields) - {"path"}


def test_every_schema_has_its_yaml() -> None:
    assert sorted(DOORS) == YAMLS


TOGETHER = [group for group in GROUPS if group in usage.groups("config") and group != "experiment"]  # an experiment chooses others


@pytest.mark.parametrize("turn", range(max(len(choices(group)) for group in TOGETHER)))
def test_every_choice_is_what_the_schema_says(turn: int) -> None:
    chosen = {group: (known := choices(group))[turn % len(known)] for group in TOGETHER}
    config = plain(*(f"{group}={choice}" for group, choice in chosen.items()))
    assert config["out"] == f"runs/{chosen['head']}-{chosen['target']}-{chosen['data']}"
    for group in ("head", "target", "data"):
        assert config[group]["name"] == chosen[group]  # the same word for file, class, YAML and saved type


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_is_what_the_schema_says(experiment: str) -> None:
    assert plain(f"experiment={experiment}")["out"].startswith("runs/")


@pytest.mark.parametrize("turn", range(max(len(choices(group)) for group in ("head", "decode"))))
def test_every_choice_at_other_doors(turn: int) -> None:
    """A capture goes with every head, whatever else it chooses (some bring a loss), a chat with every proposer."""
    head, decode = (choices(group)[turn % len(choices(group))] for group in ("head", "decode"))
    assert plain(f"head={head}", door="capture")["head"]["name"] == head
    assert plain(f"decode={decode}", door="chat")["decode"]["proposer"]["kind"]


def test_no_setting_of_a_schema_is_without_a_yaml() -> None:
    """Nothing can be set that is not written down."""
    whole = plain("loss=on_policy_samples", "experiment=medusa2")
    for group in GROUPS:
        own = [OmegaConf.to_container(OmegaConf.load(CONF / group / f"{choice}.yaml")) for choice in choices(group)]
        known = {key for settings in own for key in settings.get(group, settings)} | set(whole.get(group, {}))
        fields = getattr(DOORS["config"].model_fields.get(group, FieldInfo()).annotation, "model_fields", {})
        assert set(fields) <= known, group
    assert set(OnPolicy.model_fields) == set(whole["loss"]["on_policy"]) and set(Lora.model_fields) == set(whole["trainer"]["lora"])


def test_the_words_of_the_schema_are_those_of_the_code() -> None:
    """Checked before torch is loaded, so they are written down twice."""
    from headstart.data.source import open_source
    from headstart.inference.decoding.policy import KINDS
    from headstart.inference.decoding.sampling import RULES
    from headstart.inference.decoding.target import DTYPES
    from headstart.inference.proposers.open import KEYS
    from headstart.trainers.divergences import names
    from headstart.trainers.terms import BESIDE, WEIGHTINGS

    def words(model: Any, field: str) -> set[str]:
        return set(get_args(model.model_fields[field].annotation))

    assert words(Decode, "kind") == {*KINDS, "tuned"} and words(Decode, "rule") == set(RULES)
    assert words(Export, "dtype") == words(Target, "dtype") == {*DTYPES, "auto"}
    assert words(Loss, "weighting") == set(WEIGHTINGS)
    assert {term for terms in said("loss", "terms") for term in terms} == {*names(), *BESIDE}
    assert {proposer["kind"] for proposer in said("decode", "proposer")} == set(KEYS)
    target: Any = SimpleNamespace(sharded=False)
    with pytest.raises(UserError) as told:
        open_source({"name": "?"}, target, length=1, seed=0)
    assert set(str(told.value).rpartition("there are ")[2].split(", ")) == set(choices("data"))
    assert Data.model_fields["name"].is_required()


def test_numbers_may_be_names_and_whole_numbers_numbers() -> None:
    config = checked(filled("target.name=7", "out=8", "trainer.lr=1", "++loss.terms.tv=2"), "config")
    assert (config["target"]["name"], config["out"], config["trainer"]["lr"], config["loss"]["terms"]["tv"]) == ("7", "8", 1.0, 2.0)


def test_a_home_folder_is_found_without_a_shell() -> None:
    assert checked(filled("out='~/runs/a'"), "config")["out"] == str(Path("~/runs/a").expanduser())


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as told:
        checked(filled("trainer.steps=0", "trainer.optimizer=mun", "trainer.warmup=-1", "decode.depth=0", "loss.terms.kl=-1"), "config")
    assert str(told.value).splitlines() == [
        "loss.terms.kl must be a number of at least 0, found -1",
        "trainer.steps must be a whole number of at least 1, found 0",
        "trainer.optimizer must be muon or adamw, found 'mun' (did you mean muon?)",
        "trainer.warmup must be a whole number of steps, or a share of them between 0 and 1, found -1",
        "decode.depth must be a whole number of at least 1, found 0",
    ]


# ---- what each choice is ----


def test_every_group_has_a_default_and_every_choice_a_comment() -> None:
    assert {group for door in YAMLS for group in usage.groups(door)} >= set(GROUPS)
    for group, choice in CHOICES:
        assert (CONF / group / f"{choice}.yaml").read_text().startswith("#"), f"{group}/{choice}.yaml says nothing about itself"


@pytest.mark.parametrize("head", HEADS)
def test_a_head_takes_what_its_yaml_gives(head: str) -> None:
    from headstart.door import check_head
    from headstart.heads.hub import drafter_class

    settings = plain(f"head={head}")["head"]
    assert settings.keys() - {"name"} == inspect.signature(drafter_class(head)).parameters.keys() - {"shape"}
    check_head(settings)


def test_a_trimmed_vocabulary_may_be_a_number() -> None:
    from headstart.door import check_head

    check_head(plain("head.draft_vocab=100")["head"])
    with pytest.raises(UserError, match=r"head\.draft_vocab must be a list of whole numbers or null, found 0"):
        check_head(plain("head.draft_vocab=0")["head"])


@pytest.mark.parametrize("choice", choices("decode"))
def test_trees_are_valid_and_go_with_their_rule(choice: str) -> None:
    from headstart.inference.settings import open_decode

    decode = plain(f"decode={choice}")["decode"]
    opened = open_decode(decode)
    policy = opened.policy
    policy.check(decode["rule"])
    assert choice == ("tuned" if opened.tuned else policy.kind if decode["proposer"]["kind"] == "drafter" else decode["proposer"]["kind"])
    assert (
        policy.kind == "auto" or policy.depth <= 2 * plain()["loss"]["depth"]
    )  # a module shared by all depths guesses on, but not for ever
