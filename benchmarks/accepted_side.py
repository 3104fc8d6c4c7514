"""The other library's side of accepted.py: it trains its own EAGLE-3 by its own trainer. Runs in its environment, and imports nothing of ours.

    PYTHON benchmarks/accepted_side.py BATCHES OUT SETTINGS

BATCHES: a folder of ``000.safetensors``, ...: ``tokens``, ``documents`` [B, T], ``states`` [B, T, taps x D] and ``final`` [B, T, D], behind
the target's norm; a step each, in that order. SETTINGS (JSON): what of the library's settings is not its default (``draft``: of its
layer), and for another optimiser than it has ``betas`` and ``shares``, of the learning rate by step. OUT: an EAGLE-3 folder, config.json as
engines read it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Batches(torch.utils.data.Dataset[Any]):
    """A step each, [B, T]: a row as the library lays out its samples, which here are documents."""

    def __init__(self, folder: Path, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.files, self.collate = sorted(folder.glob("*.safetensors")), collate

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, step: int) -> dict[str, Any]:
        given = load_file(self.files[step])
        rows = [self.collate(list(samples({name: x[row] for name, x in given.items()}))) for row in range(len(given["tokens"]))]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "error_records"} | {"error_records": 0}


def samples(row: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Its documents, but for those of a single token, of which nothing is left once it is shifted."""
    for part in torch.split(torch.arange(len(row["tokens"])), torch.unique_consecutive(row["documents"], return_counts=True)[1].tolist()):
        if len(part) > 1:
            yield {
                "input_ids": row["tokens"][part], "hidden_states": row["states"][part], "loss_mask": row["mask"][part],
                "verifier_last_hidden_states": row["final"][part], "lengths": torch.tensor([len(part)]),
                "position_ids": torch.arange(len(part)),
            }  # fmt: skip


def row_by_row(model: nn.Module) -> None:
    """It takes one row, in which the samples of a step stand side by side, and attends from all of it to all of it. Row by row it is the
    same mean, but for guesses that it would train across the border of two rows, in half the time.
    """
    forward = model.forward

    def rows(*, error_records: int, **given: Any) -> Any:
        of = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        made = [forward(**given | {name: x[i : i + 1] for name, x in of.items()}) for i in range(len(of["input_ids"]))]
        share = of["loss_mask"].sum(1) / of["loss_mask"].sum()
        return made[0][0], sum(weight * loss for weight, (_, loss, _) in zip(share, made, strict=True)), made[0][2]

    model.forward = rows  # type: ignore[method-assign]


def train(batches: Path, out: Path, settings: dict[str, Any]) -> None:
    """As ``speculators train`` does, on a CPU, in fp32, without checkpoints or validation."""
    import speculators.train.trainer as theirs
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import create_transformer_layer_config, set_seed
    from speculators.train.config.schema import TrainConfig
    from speculators.train.data import CollateFn

    draft, betas, shares = settings.pop("draft"), settings.pop("betas", None), settings.pop("shares", None)
    args = TrainConfig.from_flat(
        {"speculator_type": "eagle3", "draft_attn_impl": "sdpa", "loss_implementation": "eager", **settings}
    ).flatten()
    set_seed(args["seed"], False)
    layer = create_transformer_layer_config(args["verifier_name_or_path"], 1, args["draft_arch"], args["draft_hidden_act"], 2048, [0])
    layer.update(draft)
    model = Eagle3DraftModel.from_training_args(layer, **args | {"draft_vocab_size": layer.vocab_size})
    model.verifier_norm = nn.Identity()  # what is given is behind it
    first = load_file(min(batches.glob("*.safetensors")))
    collate = CollateFn(first["tokens"].shape[1], layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    row_by_row(model)
    loader = torch.utils.data.DataLoader(Batches(batches, collate), batch_size=None)
    how = model.get_trainer_kwargs(**args)[0]
    with tempfile.TemporaryDirectory() as never:
        own = {key: args[key] for key in theirs.TrainerConfig._fields if key in args}
        own |= dict(num_epochs=1, save_path=never, train_call_kwargs=how, hidden_states_dtype=torch.float32)
        theirs.get_local_rank = lambda: torch.device("cpu")  # a number is an accelerator's
        torch.accelerator.synchronize = lambda *_: None
        trainer = theirs.Trainer(model, theirs.TrainerConfig(**own | {"resume_from_checkpoint": False}), loader)
        for optimizer in trainer.optimizers if betas else ():
            for group in (g for g in optimizer.param_groups if "betas" in g):
                group["betas"] = tuple(betas)
        if shares:
            trainer.schedulers = [
                torch.optim.lr_scheduler.LambdaLR(o, lambda t: shares[min(t, len(shares) - 1)]) for o in trainer.optimizers
            ]
        trainer.train_epoch(0)
    out.mkdir(parents=True)
    (out / "losses.json").write_text(json.dumps(losses(model, collate, first, how)) + "\n")
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if not name.startswith(("verifier_", "embed_tokens."))}
    save_file(weights, out / "model.safetensors")
    switches = {key: getattr(model.config, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    config = layer.to_dict() | switches | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.vocab_size}
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=1) + "\n")


@torch.no_grad()
def losses(
    model: nn.Module, collate: Callable[[list[Any]], dict[str, Any]], given: dict[str, Tensor], settings: dict[str, Any]
) -> list[float]:
    """By depth, of the first document: of guesses whose token is in it."""
    row = collate([next(samples({name: x[0] for name, x in given.items()}))])
    row["loss_mask"] &= torch.arange(row["loss_mask"].shape[1]) + 1 < row["loss_mask"].sum()
    found = model(**row, **settings)[2]
    return [float(found[f"loss_{k}_sum"]) for k in range(settings["ttt_steps"])]


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("batches", type=Path)
    cli.add_argument("out", type=Path)
    cli.add_argument("settings", type=json.loads)
    args = cli.parse_args()
    torch.set_num_threads(1)
    train(args.batches, args.out, args.settings)


if __name__ == "__main__":
    main()
