"""``python -m inference diagnose``: expected, decoded and served lengths of a folder, and why too few of its guesses are accepted."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError, counted


def diagnose(config: dict[str, Any]) -> None:
    """Print the expected and the decoded lengths, with ``url`` those of a running engine too, and every cause that is found for a
    difference, with its evidence and its cure.
    """
    from headstart.data.accepted import Accepting
    from headstart.data.endpoint import key_in
    from headstart.data.prompts import fitting
    from headstart.inference.decoding.policy import TreePolicy
    from headstart.inference.decoding.sampling import SamplingParams
    from headstart.inference.reports.lengths import error_text
    from headstart.inference.settings import open_target
    from headstart.inference.speculator import load_attached
    from headstart.trainers import diagnosis
    from headstart.trainers.gate import decode_beside

    with ExitStack() as opened:
        engine = None
        if config["url"] is not None:  # before the model is loaded: it may not answer
            engine = opened.enter_context(closing(Accepting(config["url"], config["model"], key_in(config["key"]))))
            guesses: int | None = config["guesses"] or engine.guesses
            if guesses is None:
                raise UserError(f"{engine.engine} does not say how many guesses a round has: give guesses=N, as it was started with")
        target = open_target(config["target"])
        drafter = load_attached(config["speculator"], target)
        about = of_run(Path(config["run"]), target, config) if config["run"] is not None else {"prompts": []}
        if config["prompts"] is not None:
            keys = ("prompts", "new_tokens", "on_long")
            about["prompts"] = fitting(config["prompts"], config["count"], target, config["new_tokens"], config["on_long"], keys=keys)
        case = diagnosis.Case(target, drafter, folder=Path(config["speculator"]), new_tokens=config["new_tokens"], **about)
        truth, _ = decode_beside(target, drafter, drafter, case.prompts, TreePolicy(), SamplingParams(), config["new_tokens"])
        for name, of in truth.table().items():
            for shape, row in of.items():
                parts = ": THEY PART" if row["apart"] else ""
                print(f"{shape} at {name.replace('_', ' ')}: expected {row['expected']:.3f}, decoded {row['decoded']:.3f} "
                      f"({error_text(row['standard_error'], ' of the difference')}){parts}")  # fmt: skip
        if engine is not None:
            assert guesses is not None
            case = served_too(case, engine, guesses, config["temperature"])
    if len(case.prompts) == 1:
        print("one prompt: chance is not told from a wrong connection of the drafter (its taps, norm, positions): give some eight prompts")
    print(*diagnosis.lines(diagnosis.diagnose(case)), sep="\n")


def served_too(case: Any, engine: Any, guesses: int, temperature: float) -> Any:
    """Let a running engine answer the prompts, and print what it accepts. Returns the case with its answers. ``guesses``: of its rounds.
    Raises UserError where its answers cannot be compared, and where it fails.
    """
    from headstart.inference.reports.progress import watched
    from headstart.trainers.diagnosis.served import apart, beside

    most, vocabulary = case.drafter.max_depth or guesses, case.target.shape.vocab_size
    if guesses > most:
        raise UserError(f"{engine.engine} makes {guesses} guesses a round, and this drafter at most {most}: does it serve this folder?")
    rooms = [min(case.room(p), (engine.longest or len(p) + case.new_tokens) - len(p)) for p in case.prompts]
    asked = [(prompt, room) for prompt, room in zip(case.prompts, rooms, strict=True) if room > 1]
    answers = watched(asked, f"prompts to {engine.engine}", len(asked))
    found = [engine.answer(prompt, room, case.target.stop_ids, temperature) for prompt, room in answers]
    answered = [each for each in found if len(each.tokens) > 1]
    if not asked:
        raise UserError(f"no prompt has room at {engine.engine}, which reads {engine.longest} tokens: give other prompts")
    if not answered:
        raise UserError(f"{engine.engine} answers all prompts with a single token: give other prompts, for no round can be counted")
    if any(token >= vocabulary for each in answered for token in each.tokens):
        raise UserError(f"{engine.engine} answers with tokens beyond the target's {vocabulary}: it runs another target")
    case = replace(case, answered=answered, guesses=guesses, sampled=temperature > 0)
    expected, here, there = beside(case)
    rounds, seconds = sum(there.rounds), sum(each.seconds for each in answered)
    same = sum(a == b for a, b in zip(here.rounds, there.rounds, strict=True))
    print(f"chain of {guesses} by {engine.engine} at temperature {temperature:g}: served {there.length:.3f}, expected {here.length:.3f} "
          f"over its texts, as many rounds in {same} of {counted(len(answered), 'answer')}, {sum(there.tokens) / seconds:.0f} tokens/s"
          f"{': THEY PART' if apart(here, there) else ''}")  # fmt: skip
    reached = [sum(column) / rounds for column in zip_longest(*(each.accepted for each in answered), fillvalue=0)]
    for name, shares in (("served", reached), ("expected", [n / expected.rounds for n in expected.reached])):
        if shares:
            print(f"acceptance by depth, {name}: {' '.join(f'{share:.0%}' for share in shares)}")
    return case


def settings_of(run: Path) -> dict[str, Any]:
    """The settings that a run was started with. Raises UserError where ``run`` is another folder with a config.json."""
    from headstart.heads.stored import read_json

    settings = read_json(run / "config.json")
    if not {"data", "trainer"} <= settings.keys():
        raise UserError(f"run={run} is not the folder of a run: give the folder that holds speculator/")
    return settings


def of_run(run: Path, target: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What a run folder knows of its training: the last weights, the target, some rows of the data, and prompts."""
    from headstart.data.source import open_source
    from headstart.heads.stored import read_json, read_tensors
    from headstart.trainers import checkpoint

    settings, known = settings_of(run), dict[str, Any]()
    if (run / "report.json").is_file():
        known["dtype"] = read_json(run / "report.json").get("dtype")
    live, newest = None, checkpoint.newest(run)
    if newest is not None:
        state = checkpoint.read_state(newest)
        live = read_tensors(newest / "drafter.safetensors")
        known |= {"step": state["step"], "weights": state["settings"].get("target", {}).get("weights")}
    try:
        source = open_source(settings["data"], target, length=settings["trainer"]["length"], seed=settings["trainer"]["seed"])
    except UserError as e:
        print(f"the run's data are not here, so its text is not looked at ({e})")
        return {"prompts": [], "rows": [], "live": live, "known": known}
    packed = source.held_out or source.packed
    rows = [packed.batch(slice(0, min(8, len(packed))))] if packed is not None else []
    asked = source.prompts(config["count"], config["new_tokens"]) if config["prompts"] is None else []
    return {"prompts": asked, "rows": rows, "live": live, "known": known}
