"""``python -m inference diagnose``: expected and decoded lengths of an exported folder, and why too few of its guesses are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.heads.errors import UserError


def diagnose(config: dict[str, Any]) -> None:
    """Print the expected and the decoded lengths, and every cause that is found for a difference, with its evidence and its cure."""
    from headstart.data.prompts import fitting
    from headstart.inference.decoding.policy import TreePolicy
    from headstart.inference.decoding.sampling import SamplingParams
    from headstart.inference.reports.lengths import error_text
    from headstart.inference.settings import open_target
    from headstart.inference.speculator import load_attached
    from headstart.trainers import diagnosis
    from headstart.trainers.gate import decode_beside

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
    if len(case.prompts) == 1:
        print("one prompt: chance is not told from a wrong connection of the drafter (its taps, norm, positions): give some eight prompts")
    print(*diagnosis.lines(diagnosis.diagnose(case)), sep="\n")


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
