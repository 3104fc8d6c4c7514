"""Predicts what a run needs before anything is loaded: GPU memory by part, disk space, operations, time.

What can be counted is counted. The target is built from its config without weights. The drafter's unroll runs on tensors that have shapes
but no values (torch's FakeTensorMode), and the sizes of the tensors that autograd saves are added up. So the plan also holds for a new
drafter. The loss and the target's activations have closed forms. Time is operations divided by the GPU's peak and by the share of the
peak that trainings reach. That share is the only guess, so time is given as a range.

No shape suffixes. All sizes are bytes, all operations floating-point operations, all times seconds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from headstart.data.storage import STORAGES, bytes_of, own_taps
from headstart.heads import hub
from headstart.heads.base import Drafter, Roots, TargetEnds, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.unroll import unroll
from headstart.heads.vocab import most_frequent
from headstart.inference.decoding.gathered import AT_ONCE
from headstart.inference.decoding.info import DTYPES, read_names
from headstart.inference.decoding.placement import is_sharded, tensor_size
from headstart.inference.settings import config_of
from headstart.trainers.chunks import guesses_of, strip_of
from headstart.trainers.gpus import gpu_of
from headstart.trainers.operations import Operations, of_losses
from headstart.trainers.optimizer import open_optimizers, parameters
from headstart.trainers.parallel import BUCKET, DDP
from headstart.trainers.plan_joint import Adapted, adapted
from headstart.trainers.prepare import needs_layers, runs_target
from headstart.trainers.shapes import Kept, as_on_a_gpu, one_expert, width_of, without_numbers, without_weights
from headstart.trainers.start import as_started
from headstart.trainers.terms import in_kernel

Settings = dict[str, Any]
USABLE = 0.92  # share of a GPU's memory: the rest is the CUDA context, libraries' workspaces and fragments
REACHED, MEASURED = (0.3, 0.55), (0.42, 0.58)  # shares of a GPU's peak operations: assumed; of one H100 (benchmarks/results/gpu.md)


@dataclass
class Plan:
    """What one run needs."""

    gpu: str  # a name of GPUS
    gpus: int  # of all nodes
    processes: int
    target_parameters: int
    drafters: dict[str, int]  # arm -> trained parameters; of an adapter under "ARM adapter"
    memory: dict[str, float]  # part -> bytes on the GPU of the process that has most
    tokens: int  # of the whole run
    captured: float  # bytes on disk if the states are captured beforehand as bf16
    captured_fp8: float  # the same as fp8
    flops: dict[str, float]  # part -> operations of one process for one micro-batch
    seconds: tuple[float, float]  # of the whole run: shortest, longest

    @property
    def needed(self) -> float:
        """Bytes that one GPU needs."""
        return sum(self.memory.values())

    @property
    def usable(self) -> float:
        """Bytes of a GPU that the run can use. Raises UserError for an unknown GPU."""
        return USABLE * gpu_of(self.gpu).memory

    @property
    def fits(self) -> bool:
        """Whether the bytes needed are at most the usable ones."""
        return self.needed <= self.usable


def plan(settings: Settings) -> Plan:
    """The plan of a run. ``settings``: those of ``trainers.run.run``, and ``nodes``, ``gpus`` (per node) and ``gpu`` (a name of GPUS).

    Raises UserError for an unknown GPU, a target whose shapes are not known, and for ``trainer.epochs``.
    """
    trainer, target, gpu = settings["trainer"], settings["target"], gpu_of(settings["gpu"])
    _, hf = config_of(target)
    model = without_weights(hf)
    shape, weights = TargetShape.of(hf), parameters_of(model, hf)
    if trainer["epochs"] is not None:
        raise UserError("trainer.epochs: a plan does not read the data, so it does not know how many steps that is: give trainer.steps")
    dtype = DTYPES.get(shape.dtype if target["dtype"] == "auto" else target["dtype"], torch.bfloat16)
    gpus = settings["nodes"] * settings["gpus"]
    processes = 1 if target["device"] == "map" else gpus
    arms = settings["arms"] or {"": {k: settings[k] for k in ("head", "loss", "trainer")}}
    arms = {name: as_started(arm, shape) for name, arm in arms.items()}
    half, device = trainer["precision"] != "fp32", torch.device("cpu" if target["device"] == "cpu" else "cuda")
    with FakeTensorMode(), one_expert(), nullcontext() if device.type == "cpu" else as_on_a_gpu():
        without_numbers(model)
        counted = {name: _count(arm, model, shape, trainer, half, device, dtype) for name, arm in arms.items()}
    counts = list(counted.values())

    taps = {tap for c in counts for tap in c.taps}
    rows = trainer["batch_size"] * trainer["length"]  # tokens of a micro-batch
    tokens = rows * trainer["accumulate"] * processes * trainer["steps"]
    captured = {how: float(bytes_of(STORAGES[how], shape.hidden_size, len(own_taps(taps, shape.layers)), tokens, tokens))
                for how in ("bf16", "fp8")}  # fmt: skip
    live = runs_target(settings["data"], settings.get("served"))
    loaded = needs_layers(settings["data"], arms, settings.get("served")) or any(c.shares for c in counts)
    tables = {id(x): x for x in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}  # tied ones count once
    ends = sum(x.numel() for x in tables.values())
    passing = rows * (6 * shape.hidden_size + 3 * width_of(hf, shape)) * dtype.itemsize if live else 0  # one layer's activations
    parallel = settings.get("parallel", DDP)
    late = processes == 1 or parallel["name"] in ("ddp", "zero1")  # whether a process holds whole gradients, which come one after another
    memory = {
        "target": dtype.itemsize * _held(target["device"], gpus, sum(weights.values()), ends, shape.layers if loaded else 0),
        **_spread(parallel, processes, counts, trainer["accumulate"] > 1),
        "states of the target": rows * shape.hidden_size * dtype.itemsize * len(taps | {shape.layers}),
        "activations": max([passing, *(max(c.kept + c.loss - late * c.late, c.moving) for c in counts)]),
    }
    flops = {"target": _pass(weights["dense"] + weights["active"] - ends, shape, trainer) if live else 0.0}
    flops |= {f"{name} drafter".strip(): c.flops for name, c in counted.items()}
    flops |= {f"{name} adapted target".strip(): c.target.flops for name, c in counted.items() if c.target.trained}
    whole = sum(flops.values()) * trainer["accumulate"] * trainer["steps"]
    drafters = {name: c.trained - c.target.trained for name, c in counted.items()}
    drafters |= {f"{name} adapter".strip(): c.target.trained for name, c in counted.items() if c.target.trained}
    return Plan(
        settings["gpu"], gpus, processes, sum(weights.values()), drafters, memory, tokens, captured["bf16"], captured["fp8"], flops,
        seconds=(whole / (gpu.flops * REACHED[1]), whole / (gpu.flops * REACHED[0])),
    )  # fmt: skip


# What is counted -----------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """The needs of one drafter, in bytes unless noted, for one process."""

    trained: int  # parameters, with those of an adapter (trainer.lora)
    weights: float
    moments: float
    kept: float  # tensors that autograd saves of the unroll
    loss: float  # buffers of the loss, without gradients of weights
    late: float  # gradients that exist only after the loss is computed
    moving: float  # Muon's temporary tensors for its largest matrix
    flops: float  # operations for one micro-batch
    taps: tuple[int, ...]
    shares: bool  # whether the drafter uses layers of the target, which must be loaded then
    target: Adapted  # with trainer.lora: what the adapted target needs, which is contained in the other figures but not in ``flops``


def _held(device: str, gpus: int, weights: int, ends: int, layers: int) -> float:
    """Weights of the target on one GPU. ``device``: target.device. ``ends``: those of embedding and output head. ``layers``: how many
    are loaded; 0: the ends alone. A sharded target also has all of the ends, and AT_ONCE layers if these are gathered as they run.
    """
    if not layers:
        return ends
    if not is_sharded(device):
        return weights / (gpus if device == "map" else 1)
    among = gpus if device == "tp" else tensor_size(device)
    return weights / gpus + ends + (AT_ONCE * max(weights - ends, 0) / layers / among if among < gpus else 0)


def _spread(parallel: Settings, world: int, counted: list[Count], added: bool) -> dict[str, float]:
    """Peak bytes per process of drafters, gradients and moments under ``parallel`` (trainers/parallel.py), with ``world`` processes.
    ``added``: whether the gradients of several micro-batches are added up.
    """
    weights, moments = sum(c.weights for c in counted), sum(c.moments for c in counted)
    gradients, learnt = 4.0 * sum(c.trained for c in counted), 4.0 * max(c.trained for c in counted)  # learnt: by one arm's backward pass
    name, share = parallel["name"], 1 / world
    if name == "deepspeed":  # it updates an fp32 copy of its share of the weights
        held = 0.0 if parallel["offload"] else share
        travelling = 4.0 * BUCKET if world > 1 else 0.0
        reduced = gradients * (share if parallel["stage"] == 2 else 1) + travelling
        return {"drafter": weights + gradients * held, "gradients": reduced, "moments": moments * held}
    if world == 1:
        return {"drafter": weights, "gradients": gradients + learnt * added, "moments": moments}
    if name == "fsdp":  # one arm's whole weights exist during its passes
        whole = max(c.weights for c in counted)
        return {"drafter": weights * share + whole, "gradients": gradients * share + learnt, "moments": moments * share}
    # the buckets, in which all gradients are added up, and those of one arm's backward pass
    return {"drafter": weights, "gradients": gradients + learnt, "moments": moments * (share if name == "zero1" else 1)}


def parameters_of(model: torch.nn.Module, hf: Any) -> dict[str, int]:
    """Numbers of a model's parameters: outside the experts (``dense``), in the experts that a token uses (``active``), in the others
    (``idle``), in what reads images (``unread``). ``hf``: the transformers config of its layers; None where it has no experts.
    """
    text = None if hf is None else hf.get_text_config()
    experts = next((n for k in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(text, k, None))), 0)
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    read, everything = read_names(model), sum(p.numel() for p in model.parameters())
    sizes = {name: p.numel() for name, p in model.named_parameters() if name.startswith(read)}
    whole, routed = sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)
    active = round(routed * share)
    return {"dense": whole - routed, "active": active, "idle": routed - active, "unread": everything - whole}


def _pass(weights: int, shape: TargetShape, trainer: Settings) -> float:
    """Operations of the target's forward pass: two per parameter and token, and causal attention. ``weights``: the number that a token
    uses, without the embedding and the output head (which counts as loss).
    """
    rows, T = trainer["batch_size"], trainer["length"]
    attention = 2 * shape.layers * shape.heads * shape.head_dim * T * T * rows
    return 2.0 * weights * rows * T + attention


def _count(arm: Settings, model: Any, shape: TargetShape, trainer: Settings, half: bool, device: torch.device, kind: torch.dtype) -> Count:
    """Build the arm's drafter and run its unroll without values, under the FakeTensorMode of ``model``. ``kind``: the target's dtype."""
    drafter, layers_asked = _drafter(arm["head"], model, shape)
    own, loss = trainer | arm["trainer"], arm["loss"]
    optimizers = open_optimizers(drafter, own["optimizer"], own["lr"], own["betas"], own["weight_decay"])
    depth = (drafter.max_depth or loss["depth"]) if drafter.unrolls else 1
    with Operations() as counts, torch.autocast("cpu", torch.bfloat16, enabled=half):
        kept, rows, hidden, vocab = _unroll(drafter, model, trainer, depth, kind, own["gradient_checkpointing"])
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    weights = sum(x.numel() * x.element_size() for x in {id(x): x for x in [*drafter.parameters(), *drafter.buffers()]}.values())
    heads = {id(b): b for d in range(1, (drafter.max_depth or 1) + 1) for b in drafter.unembedding(d).blocks}.values()
    learnt = sum(b.numel() for b in heads if b.requires_grad)
    strip = 1 if in_kernel(loss["kernel"], loss["terms"], device) else strip_of(device)  # a kernel keeps strips in registers
    places, chunk = min(trainer["batch_size"] * trainer["length"], rows), guesses_of(loss["chunk"], depth, vocab, device)
    # a block of a matrix's gradient before it is added up: on a CPU it exists in bf16 and in fp32
    block = (6 if half else 4) * strip_of(device) if learnt and device.type == "cpu" else 0
    buffers = _loss(chunk, places, rows, depth, vocab, shape.vocab_size, half, strip, block)
    buffers += (2 if half else 4) * rows * hidden + 2 * half * sum(b.numel() for b in heads)  # gradients of hidden states; heads as bf16
    passes = 4.0 if own["gradient_checkpointing"] else 3.0  # a backward pass costs two forward passes
    teacher = 2.0 * trainer["batch_size"] * trainer["length"] * shape.hidden_size * shape.vocab_size
    sizes = [(p.numel(), isinstance(x, torch.optim.Muon)) for x in optimizers for p in parameters(x)]
    target = adapted(model, drafter, arm, trainer, half, kind) if own.get("lora") else Adapted()
    return Count(
        trained=trained + target.trained,
        weights=weights + 4.0 * target.trained,
        moments=sum(4.0 * size * (1 if muon else 2) for size, muon in sizes) + 8.0 * target.trained,
        kept=kept + target.kept,
        loss=max(buffers, target.loss),
        late=4.0 * (trained - learnt + target.trained),
        moving=max(12.0 * size * muon for size, muon in sizes),
        flops=passes * counts.count + of_losses(rows, drafter.unembedding(1), teacher, loss),
        taps=drafter.taps,
        shares=bool(layers_asked),
        target=target,
    )


def _drafter(head: Settings, model: Any, shape: TargetShape) -> tuple[Drafter, list[bool]]:
    """A drafter without values, attached to ``model``, and a list that is empty until the drafter asks for the target's layers."""
    arguments, layers_asked = {k: v for k, v in head.items() if k != "name"}, list[bool]()
    with unset_fake_temporarily():  # the constructor reads the values of the token list
        if isinstance(arguments.get("draft_vocab"), int):  # any tokens do: only their number matters
            arguments["draft_vocab"] = most_frequent(torch.zeros(shape.vocab_size), arguments["draft_vocab"])
        with torch.device("meta"):
            drafter = hub.build(head["name"], shape, **arguments)

    def whole() -> Any:
        layers_asked.append(True)
        return model

    without_numbers(drafter.train())
    drafter.attach(TargetEnds(model.get_input_embeddings(), model.get_output_embeddings().weight, whole=whole, config=model.config))
    return drafter, layers_asked


def _loss(chunk: int, places: int, rows: int, depth: int, vocab: int, whole: int, half: bool, strip: int, block: int) -> float:
    """Bytes of the fused loss's buffers for a chunk. The batch has ``rows`` guesses, judged at ``places`` positions. ``vocab`` and
    ``whole`` are the vocabulary sizes of drafter and target; ``block``: bytes that exist when the strips are done.
    """
    wide, chunk = 2 if half else 4, min(chunk, rows)
    judged = chunk * places // rows  # positions of a chunk
    # The fp32 tensors of a strip are the larger of two sets. First set: the teacher's log-probabilities and probabilities, those of the
    # strip before, and a product of the two. Second set: the teacher's two, and for the guesses of one depth: copies of the two,
    # log-softmax, two gradients, and in half precision the logits. A trimmed vocabulary is gathered from the whole one, which is added.
    numbers = vocab * max(5.0, 2 + (5 + half) * rows / places / depth) + (whole if vocab < whole else 0)
    return wide * (chunk * vocab + judged * whole) + max(4 * min(judged, max(1, strip // vocab)) * numbers, block)


def _unroll(drafter: Drafter, model: Any, trainer: Settings, depth: int, kind: torch.dtype, again: bool) -> tuple[float, int, int, int]:
    """Returns the bytes that autograd saves of an unroll, the number of drafts of all depths, their width H, and the drafter's vocabulary
    size. ``kind``: the target's dtype. ``again``: with gradient checkpointing.
    """
    B, T = trainer["batch_size"], trainer["length"]
    tokens, positions = torch.zeros(B, T, dtype=torch.int64), torch.arange(T).expand(B, -1)
    seen = Roots(tokens, tokens, {tap: torch.empty(B, T, drafter.shape.hidden_size, dtype=kind) for tap in drafter.taps}, positions)
    roots = seen if torch.is_autocast_enabled("cpu") else seen.to(torch.float32)  # as the learner does it: perhaps a copy
    anchors = min(drafter.anchors, T) if drafter.anchors else 0
    ask = torch.zeros(B, anchors, dtype=torch.int64) if anchors else None
    kept = Kept([*drafter.parameters(), *drafter.buffers(), *model.parameters(), *seen.states.values()])
    memory = Memory()
    with kept.saving():
        drafts = unroll(drafter, roots, None, depth, ask_BA=ask, checkpointing=again, memory=memory)
    read = [d.hidden_BNH if d.first_BTH is None else d.first_BTH for d in drafts]  # what the loss reads
    for hidden in [*read, *roots.states.values()]:
        kept.add(hidden)
    anew = 0.0
    if again:  # the tensors that depths pass on, and those that one depth recomputes in the backward pass
        handed = [*(d.state_BNH for d in drafts), *(x for layer in memory.layers.values() for pair in layer for x in pair)]
        for x in handed:
            if x is not None:
                kept.add(x)
        anew = _unroll(drafter, model, trainer, 1, kind, False)[0]
    vocab = drafter.unembedding(1).weight_VH.shape[0]
    return anew + kept.total, sum(hidden[..., 0].numel() for hidden in read), read[0].shape[-1], vocab
