"""Compare a folder's model in transformers, here in one process, and here in a layout.

The model in transformers is observed under our names, by the table of names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...checkpoints import check_whole, read_source
from ...layers import IGNORE, routers
from ...models import Link
from ...parallel_state import BadInput, Box, Layout, require
from ...pipeline import check_schedule
from ...runs.launch import check_local
from ...storage.file_names import CONFIG
from ...system import counted
from ...system.refusals import refusal_of
from ...testing.layouts import Observation, Outputs, as_pieces, on_ranks
from ...testing.parity import Comparison, Question, compare, observe_ours
from ...testing.recorder import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest difference, relative to the largest number of a tensor, that rounding explains. In 16 bits much is
#: rounding: only gross errors show there.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}

#: transformers computes some things in fp32 whatever the model's dtype (rotary angles).
_OF_FP32 = 1e-5

#: Tokens of a batch: three forwards and backwards of more would take hours.
MOST_TOKENS = 2**18


def check(question: Question) -> None:
    """Refuse, before anything starts, a layout that cannot hold the model or a batch that cannot be cut."""
    check_local(question.layout, device=question.device)
    source = read_source(question.folder, implementation=question.implementation)
    layout = question.layout
    check_whole(source)
    if not (source.path / CONFIG).exists():
        expected, todo = "a Hugging Face folder", "`trilith convert FOLDER OUT --to hf` makes one"
        raise BadInput(question.folder, expected=expected, found="a checkpoint of trilith", todo=todo)
    source.family.declarations(source.model_config, layout, split=question.split)
    most = source.model_config.max_position_embeddings
    require(question.length <= most, "parity", "--sequence-length", f"at most {most}", question.length)
    if question.samples * question.length > MOST_TOKENS:
        expected = f"at most {counted(MOST_TOKENS // question.length, 'row')} of {question.length:,} tokens"
        raise BadInput("parity", "--samples", expected=expected, found=f"{question.samples:,}")
    rank_samples, rest = divmod(question.samples, layout.data)
    expected = f"a multiple of data={layout.data}, at least {layout.data * layout.pipeline}"
    require(not rest and rank_samples >= layout.pipeline, "parity", "--samples", expected, question.samples)
    check_schedule(question.schedule, layout, rank_samples, "parity")
    layout.check_length(question.length, "parity", "--sequence-length")


def compare_with_transformers(
    question: Question,
    *,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Compare one process with transformers, then the layout with one process (unless it is one).

    ``tolerance`` replaces ``TOLERANCES``. ``say`` is told what runs.
    """
    # Not every process need be in this one's directory: those of the pool may be older than a change of it.
    folder = read_source(question.folder, implementation=question.implementation).path.absolute()
    question = replace(question, folder=str(folder))
    single = replace(question, layout=Layout(), split=None)
    allowed = TOLERANCES[question.dtype] if tolerance is None else tolerance
    against = max(allowed, _OF_FP32) if tolerance is None else tolerance
    say("transformers")
    reference = observe_hf(single)
    _check_comparable(reference)
    say("one process")
    ours = observe_ours(single)
    comparisons = [compare(reference, ours, against, "one process / transformers")]
    if question.layout != Layout():
        say(str(question.layout))
        cut = observe_ours(question)
        comparisons.append(compare(ours, cut, allowed, f"{question.layout} / one process"))
    return comparisons


def _check_comparable(reference: Observation) -> None:
    """Refuse a model of whose numbers in transformers nothing can be told: not finite, or no gradient."""
    (loss,), todo = reference.losses, "Its weights are broken, or overflow: try --dtype float64"
    sizes = [abs(loss), *(float(part.abs().max()) for _, _, part in reference.gradients.values())]
    fits, expected = all(map(math.isfinite, sizes)), "finite numbers in transformers"
    require(fits, "parity", "loss and gradients", expected, "a NaN or an infinity", todo)
    require(any(sizes[1:]), "parity", "gradients", "some above 0 in transformers", "zeros alone", todo)


def observe_hf(question: Question, *, timeout: float = 600) -> Observation:
    """Run the folder's model with transformers in a process of its own; ``timeout`` in seconds."""
    observed: list[Observation] = on_ranks(observe_alone, 1, question, timeout=timeout)
    return observed[0]


def observe_alone(question: Question) -> Observation:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    source = read_source(question.folder, implementation=question.implementation)
    links, _ = source.family.links(source.model_config)
    model = _load(question, source.family.architecture)
    if any(routers(source.family.on_meta(source.model_config))):
        model.set_experts_implementation("eager")  # the other one has no fp64
    model.eval().to(question.device)
    counterparts = _counterparts(links)
    # Files of a model with experts bear other names than its modules; Gemma's embedding scales as well.
    scaled = {name for name, module in model.named_modules() if hasattr(module, "embed_scale")}
    recorder = Recorder(model, counterparts.keys() - scaled, outputs_only=True)
    input_ids, labels = (rows.to(question.device) for rows in question.batch(source.model_config))
    logits = model(input_ids, use_cache=False).logits
    inner = torch.promote_types(logits.dtype, torch.float32)
    summed = F.cross_entropy(
        logits.flatten(0, 1).to(inner), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = summed / (labels != IGNORE).sum()
    loss.backward()
    still = source.family.untrained(source.model_config)
    moved = [link for link in links if link.ours not in still]
    outputs: Outputs = {}
    for event, output in recorder.leave().forward.items():
        if event.leaf == 0 and output.ndim == 3:
            for ours, features in counterparts[event.module].items():
                part = torch.cat([output[..., feature] for feature in features], dim=-1).cpu()
                outputs[ours] = [(Box.whole(tuple(part.shape)), part)]
    outputs["logits"] = [(Box.whole(tuple(logits.shape)), logits.detach().cpu())]
    gradients = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
    whole = as_pieces(_gradients(moved, revert_weight_conversion(model, gradients)))
    return Observation([float(loss.detach())], gradients=whole, outputs=outputs)


def _load(question: Question, architecture: str) -> "PreTrainedModel":
    """Load the folder with transformers, which refuses some that we read with whatever exception it meets."""
    import transformers

    try:
        model: PreTrainedModel = getattr(transformers, architecture).from_pretrained(
            question.folder, dtype=question.dtype
        )
        return model
    except Exception as error:
        if refusal_of(error) is not None:
            raise
        expected = f"a folder that transformers {transformers.__version__} loads as well, to compare with"
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadInput(question.folder, expected=expected, found=reason) from error


def _counterparts(links: Sequence[Link]) -> dict[str, dict[str, list[slice]]]:
    """Return for each of their modules ours, or our block, and the features of its output that are ours."""
    counterparts: dict[str, dict[str, list[slice]]] = {}
    for link in links:
        ours, _, leaf = link.ours.rpartition(".")
        if leaf == "weight" and ours != "head":
            along = 1 if link.transpose else 0
            whole = len(link.hf_box.stop) == 1
            features = slice(None) if whole else slice(link.hf_box.start[along], link.hf_box.stop[along])
            counterparts.setdefault(link.hf.rpartition(".")[0], {}).setdefault(ours, []).append(features)
        if ours.startswith("layers."):
            number = ours.split(".")[1]
            before, _, _ = link.hf.partition(f".{number}.")
            counterparts.setdefault(f"{before}.{number}", {})[f"layers.{number}"] = [slice(None)]
    return counterparts


def _gradients(links: Sequence[Link], hf_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        stop = link.ours_box.stop
        shapes[link.ours] = tuple(map(max, shapes.get(link.ours, stop), stop))
    whole: dict[str, Tensor] = {}
    for link in links:
        assert link.hf in hf_gradients, f"{link.hf} has no gradient"
        piece = hf_gradients[link.hf][link.hf_box.slices]
        gradient = whole.setdefault(link.ours, torch.empty(shapes[link.ours], dtype=piece.dtype))
        gradient[link.ours_box.slices] = piece.T if link.transpose else piece
    return whole
