"""Settings that cannot be meant are one line of an error that names the key, before anything is loaded or decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from headstart.door.infer import say_limit
from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.placement import check_device
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.elsewhere import Elsewhere
from headstart.inference.proposers.pipelined import Pipelined
from headstart.inference.settings import config_of, open_decode, open_guesser, open_target
from headstart.inference.speculator import load_speculator
from tests.drafters import make, random_tokens
from tests.tiny_targets import tiny_target

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
DECODES: dict[str, dict[str, Any]] = {
    kind: {"proposer": {"kind": kind}} for kind in ("drafter", "cascade", "union", "hybrid", "ngram", "suffix", "early_exit", "swift")
} | {"pipelined": {"proposer": {"kind": "pipelined"}, "kind": "chain"}}


def settings(group: str, name: str, **changes: Any) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    return found | changes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rule": "best"}, "no verification rule 'best'"),
        ({"kind": "fixed", "paths": [1]}, r"paths must be lists of child ranks, .* found \[1\]"),
        ({"kind": "fixed", "paths": [["a"]]}, "paths must be lists of child ranks"),
        ({"kind": "fixed"}, "paths are needed"),
    ],
)
def test_what_decode_cannot_be(change: dict[str, Any], says: str) -> None:
    open_decode(settings("decode", "auto", expand=None))
    with pytest.raises(UserError, match=says):
        open_decode(settings("decode", "auto", **change))


def test_a_fixed_tree_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text("[[0], [1], [0, 0]]")
    given = settings("decode", "auto", kind="fixed", paths=str(path), rule="without_replacement")
    assert open_decode(given).policy.paths == ((0,), (1,), (0, 0)) == open_decode(given | {"paths": [[0], [1], [0, 0]]}).policy.paths
    for wrong, says in (("[[0], 1]", "must hold a list of lists"), ("{}", "must hold a list of lists"), ("[[0]", "cannot be read")):
        path.write_text(wrong)
        with pytest.raises(UserError, match=rf"decode\.paths=.*tree\.json:? .*{says}"):
            open_decode(given)
    path.unlink()
    with pytest.raises(UserError, match=r"decode\.paths=.*tree\.json cannot be read .*give a JSON file"):
        open_decode(given)


def test_what_a_target_cannot_be() -> None:
    with pytest.raises(UserError, match="target folder 5 does not exist"):
        open_target(settings("target", "tiny", path=5))
    for device in ("nonsense", "map"):
        with pytest.raises(UserError, match=f"drafter_device={device} is not usable here"):
            check_device(device, "drafter_device")


@pytest.mark.slow
def test_a_tree_of_as_many_nodes_as_levels_is_no_chain_elsewhere_either() -> None:
    """What says so comes along from the drafter's device: read as a chain, its guesses would be judged by other texts."""
    target, texts = tiny_target(), [random_tokens(n, seed=n) for n in range(5, 13)]
    drafter, apart = make("eagle", target).eval(), 0
    for n in (2, 3, 4):
        policy = TreePolicy(depth=n, nodes=n, branch=n)
        for text in texts:
            plain = generate(target, None, text, new_tokens=16).tokens
            assert generate(target, Elsewhere(drafter, target), text, new_tokens=16, policy=policy).tokens == plain
            context = Context(target, drafter.taps)
            drafting = Elsewhere(drafter, target)
            states, _ = context.read(torch.tensor(text))
            drafting.start(context, 64)
            drafting.absorb(Roots(torch.tensor([text]), torch.tensor([[*text[1:], plain[0]]]), states, torch.arange(len(text))[None]))
            apart += not drafting.propose(policy, CounterRNG.of(), SamplingParams()).is_chain
    assert apart == 3 * len(texts)


def test_a_shipped_target_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, config = config_of(settings("target", "tiny"))
    assert Path(path).is_dir() and config.model_type == "llama"


def test_a_target_that_drafts_for_itself_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.load(str(ROOT / "assets" / "tiny"), device="cpu")
    load_speculator(ROOT / "assets" / ".." / "assets" / "tiny", target)  # the same folder, spelled otherwise
    assert "is the target itself" in capsys.readouterr().out
    load_speculator(ROOT / "assets" / "tiny_eagle", target)
    assert capsys.readouterr().out == ""


def test_where_a_drafter_can_be_placed(tmp_path: Path) -> None:
    """One that guesses alone or beside the target, on a device that is there; for all others it is said that it cannot be."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path)
    here = {kind: open_decode(settings("decode", "auto", **DECODES[kind])) for kind in DECODES}
    for kind, made in (("drafter", Elsewhere), ("pipelined", Pipelined)):
        drafter, proposer, _ = open_guesser(here[kind], str(tmp_path), target, "cpu")
        assert drafter is None and isinstance(proposer, made)
    asked = open_decode(settings("decode", "auto", kind="tuned", proposer={"kind": "ngram"}))
    with pytest.raises(UserError, match=r"^decode\.kind=tuned takes .* with decode\.proposer\.kind=ngram take decode\.kind=auto$"):
        open_guesser(asked, None, tiny_target())
    assert open_decode(settings("decode", "auto", kind="tuned", rule="block")).tuned  # decode.json may hold chains
    with pytest.raises(
        UserError, match=r"decode=tuned measures the drafter on the target's device, not on drafter_device=cpu: take decode=auto"
    ):
        open_guesser(here["drafter"]._replace(tuned=True), str(tmp_path), target, "cpu")
    own = here["drafter"]._replace(proposer={"kind": "drafter", "folder": str(tmp_path)})
    assert isinstance(open_guesser(own, None, target)[1], Drafting)
    with pytest.raises(UserError, match=r"decode\.proposer: kind drafter has no key 'foldr' \(did you mean folder"):
        open_guesser(own._replace(proposer={"kind": "drafter", "foldr": "x"}), str(tmp_path), target)
    for kind, decode in here.items():
        with pytest.raises(UserError, match="drafter_device=nonsense is not usable here"):
            open_guesser(decode, str(tmp_path), target, "nonsense")
        if kind not in ("drafter", "pipelined"):
            with pytest.raises(UserError, match=rf"drafter_device=cpu is not for decode\.proposer\.kind={kind}: it places"):
                open_guesser(decode, str(tmp_path), target, "cpu")
        elif kind == "drafter":
            with pytest.raises(UserError, match="give speculator=DIR"):
                open_guesser(decode, None, target, "cpu")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_first_of_several_processes_names_the_tree(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("headstart.inference.settings.open_speculator", lambda *_: object())
    monkeypatch.setattr("headstart.inference.settings.load_plans", lambda *_: {1: TreePolicy("chain", depth=2)})
    open_guesser(open_decode(settings("decode", "auto", kind="tuned")), "x", tiny_target())
    assert capsys.readouterr().out.count("tree of decode.json: chain of 2\n") == lines


def test_a_limit_of_prompts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_limit([[1], [2]], "decode.prompts", 3)
    say_limit([[1], [2]], "count", None)
    assert not capsys.readouterr().out
    say_limit([[1], [2]], "decode.prompts", 2)
    assert capsys.readouterr().out == "the first 2 prompts of the file, as decode.prompts says\n"
