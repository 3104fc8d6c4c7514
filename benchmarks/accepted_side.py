"""The peer's side of accepted.py: trains speculators' EAGLE-3 with its own trainer. Runs in that library's environment without our code.

    PYTHON benchmarks/accepted_side.py BATCHES OUT SETTINGS

BATCHES: a folder of 00000.safetensors, ..., one file per step: ``tokens``, ``documents``, ``mask`` [B, T], ``states`` [B, T, taps x D],
``final`` [B, T, D] (after the target's norm). SETTINGS (JSON): settings that differ from the library's defaults; ``draft``: those of its
layer; ``betas`` and ``shares`` (factor of the learning rate per step): for an optimiser that its settings cannot describe. OUT: an
EAGLE-3 folder with a flat config.json, as engines read it, and ``losses.json``.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Collate = Callable[[list[Any]], dict[str, Any]]
Weights = dict[str, Tensor]


def samples(row: Weights) -> Iterator[Weights]:
    """The documents of a row [T], without those of one token: after the library's shift nothing of them is left."""
    sizes = torch.unique_consecutive(row["documents"], return_counts=True)[1].tolist()
    for part in (part for part in torch.arange(len(row["tokens"])).split(sizes) if len(part) > 1):
        of = {"input_ids": "tokens", "hidden_states": "states", "verifier_last_hidden_states": "final", "loss_mask": "mask"}
        yield {theirs: row[ours][part] for theirs, ours in of.items()} | {
            "lengths": torch.tensor([len(part)]),
            "position_ids": torch.arange(len(part)),
        }


class Batches(torch.utils.data.Dataset[Any]):
    """The batches, one per step, [B, T], with the rows laid out as the library does. ``joined``: all rows as one row [1, B x T]."""

    def __init__(self, folder: Path, collate: Collate, joined: bool) -> None:
        self.files, self.collate, self.joined = sorted(folder.glob("*.safetensors")), collate, joined

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, step: int) -> dict[str, Any]:
        given = load_file(self.files[step])
        found = [list(samples({name: x[i] for name, x in given.items()})) for i in range(len(given["tokens"]))]
        rows = [self.collate(row) for row in ([[*itertools.chain(*found)]] if self.joined else found)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "error_records"} | {"error_records": 0}


def row_by_row(model: nn.Module) -> None:
    """Feed the model one row at a time. It expects all samples of a step in one row and computes attention over the whole row. Row by
    row the mean is the same, except for guesses across the border of two rows, and takes half the time on a CPU.
    """
    forward = model.forward

    def rows(**given: Any) -> Any:
        of = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        made = [forward(**given | {name: x[i : i + 1] for name, x in of.items()}) for i in range(len(of["input_ids"]))]
        share = of["loss_mask"].sum(1) / of["loss_mask"].sum()
        return made[0][0], sum(weight * loss for weight, (_, loss, _) in zip(share, made, strict=True)), made[0][2]

    model.forward = rows


@torch.no_grad()
def losses(model: nn.Module, collate: Collate, given: Weights, how: dict[str, Any]) -> list[float]:
    """The losses per depth over the first document, of the guesses whose token lies in it."""
    row = collate([next(samples({name: x[0] for name, x in given.items()}))])
    row["loss_mask"] &= torch.arange(row["loss_mask"].shape[1]) + 1 < row["loss_mask"].sum()
    found = model(**row, **how)[2]
    return [float(found[f"loss_{k}_sum"]) / how["ttt_step_loss_decay"] ** k for k in range(how["ttt_steps"])]


def train(batches: Path, out: Path, settings: dict[str, Any]) -> None:
    """Train as the library's command does, but in fp32 and without checkpoints or validation."""
    import speculators.train.trainer as theirs
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import create_transformer_layer_config, set_seed
    from speculators.train.config.schema import TrainConfig
    from speculators.train.data import CollateFn

    draft, betas, shares, device = (settings.pop(key, None) for key in ("draft", "betas", "shares", "device"))
    here = {"speculator_type": "eagle3", "draft_attn_impl": "sdpa", "loss_implementation": "eager"}  # other implementations need a GPU
    args = TrainConfig.from_flat(here | settings).flatten()
    set_seed(args["seed"], False)
    window = args["sliding_window"], [0]  # rows are shorter than the window, so layer 0 gets none
    layer = create_transformer_layer_config(args["verifier_name_or_path"], 1, args["draft_arch"], args["draft_hidden_act"], *window)
    layer.update(draft)
    model = Eagle3DraftModel.from_training_args(layer, **args | {"draft_vocab_size": layer.vocab_size})
    model.verifier_norm = nn.Identity()  # the given states are already normed
    joined = device != "cpu"
    if not joined:
        row_by_row(model)
    first = load_file(min(batches.glob("*.safetensors")))
    size = first["tokens"].numel() if joined else first["tokens"].shape[1]
    collate = CollateFn(size, layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    how = model.get_trainer_kwargs(**args)[0]
    theirs.get_local_rank = lambda: torch.device(device)  # a number would mean a GPU
    torch.accelerator.synchronize = lambda *_: None
    with tempfile.TemporaryDirectory() as never:
        told = {key: args[key] for key in theirs.TrainerConfig._fields if key in args} | {"num_epochs": 1, "save_path": never}
        told |= {"train_call_kwargs": how, "hidden_states_dtype": torch.float32, "resume_from_checkpoint": False}
        loader = torch.utils.data.DataLoader(Batches(batches, collate, joined), batch_size=None)
        trainer = theirs.Trainer(model, theirs.TrainerConfig(**told), loader)
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups if betas and "betas" in group):
            group["betas"] = tuple(betas)
        if shares:
            trainer.schedulers = [torch.optim.lr_scheduler.LambdaLR(each, shares.__getitem__) for each in trainer.optimizers]
        trainer.train_epoch(0)
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if not name.startswith(("verifier_", "embed_tokens."))}
    save_file(weights, out / "model.safetensors")
    switches = {key: getattr(model.config, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    config = layer.to_dict() | switches | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.vocab_size}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "losses.json").write_text(json.dumps(losses(model.cpu(), collate, first, how)) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
