"""The door ``python -m trainers board``: a workspace of W&B with the charts that drafters are compared by.

python -m trainers board                            of the project headstart, in your own account
python -m trainers board project=mine entity=TEAM   name="..." is what the view is called

It makes a saved view and prints its address; runs appear in it as they are uploaded. Needs `pip install wandb-workspaces` and a login.
Without W&B's server: python -m trainers compare RUN...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.door.arguments import door_of_words
from headstart.heads.errors import UserError

OWN = {"project": "headstart", "entity": "", "name": "Drafters"}
# Sections of panels; a panel is its title, how it is drawn, and metrics (trainers/metrics.py).
BOARD: dict[str, list[tuple[str, str, list[str]]]] = {
    "What is gained": [
        (
            "Accepted length at T = 0: decoded and expected",
            "line",
            ["decode/T0/accepted_length", "decode/T0/expected_length"],
        ),
        (
            "Accepted length at T = 1: decoded and expected",
            "line",
            ["decode/T1/accepted_length", "decode/T1/expected_length"],
        ),
        ("Best accepted length, T = 0", "bar", ["decode/T0/accepted_length.max"]),
        ("Best accepted length, T = 1", "bar", ["decode/T1/accepted_length.max"]),
        ("Speed-up over plain decoding", "bar", ["decode/T0/speedup.max", "decode/T1/speedup.max"]),
        ("What was drafted and accepted", "table", ["decode/examples"]),
    ],
    "Over held-out text": [
        ("Expected length", "line", ["heldout/expected_length"]),
        ("Loss", "line", ["heldout/loss"]),
        *((f"Acceptance at depth {depth}", "line", [f"heldout/depth/{depth}/acceptance"]) for depth in (1, 2, 3)),
    ],
    "Training": [
        (title, "line", [f"train/{name}"])
        for title, name in (
            ("Loss", "loss"),
            ("Expected length", "expected_length"),
            ("Gradient norm", "gradient_norm"),
            ("Learning rate", "lr"),
        )
    ],
    "Speed and memory": [
        ("Tokens a second", "line", ["speed/tokens_per_second"]),
        ("Where time goes", "line", ["speed/data_share", "speed/target_share", "speed/step_share"]),
        ("Memory, GiB", "line", ["system/memory_gib", "system/gpu_memory_gib"]),
    ],
}


def main(words: Sequence[str]) -> str:
    """Save the workspace that ``words`` ask for; returns its address. Raises UserError where W&B cannot be asked."""
    own = dict(OWN)
    for word in words:
        key, given, value = word.partition("=")
        if not given or key not in OWN or not value:
            raise UserError(f"{word}: give project=, entity= or name=")
        own[key] = value
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ImportError:
        raise UserError("a board needs `pip install wandb-workspaces`; python -m trainers compare needs nothing") from None
    try:
        entity = own["entity"] or wandb.Api().default_entity
        return str(workspace(own["name"], entity, own["project"]).save().url)
    except Exception as e:  # raised by W&B's library, its server or the network
        raise UserError(f"wandb does not make the board ({' '.join(str(e).split())[:300]}): log in with `wandb login`, give entity=") from e


def workspace(name: str, entity: str, project: str) -> Any:
    """``BOARD`` as a workspace of W&B's library; nothing is uploaded yet."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def panel(title: str, kind: str, metrics: list[str]) -> Any:
        if kind == "table":
            return reports.WeavePanelSummaryTable(table_name=metrics[0])
        return reports.BarPlot(title=title, metrics=metrics) if kind == "bar" else reports.LinePlot(title=title, x="Step", y=metrics)

    sections = [workspaces.Section(name=about, panels=[panel(*each) for each in panels], is_open=True) for about, panels in BOARD.items()]
    return workspaces.Workspace(name=name, entity=entity, project=project, sections=sections)


if __name__ == "__main__":
    door_of_words("board", __doc__, lambda words: print(main(words)), bare=True)
