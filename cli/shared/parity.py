"""Compare a folder's model in transformers, here in one process, and here in a layout."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...checkpoints import check_whole, read_source
from ...parallel_state import BadInput, Layout
from ...pipeline import check_schedule
from ...runs.launch import check_local
from ...storage.file_names import CONFIG
from ...system import counted
from ...testing.parity.case import Comparison, Question, compare
from ...testing.parity.ours import observe_ours
from .in_transformers import observe_hf

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
    if question.length > most:
        raise BadInput("parity", "--sequence-length", expected=f"at most {most}", found=question.length)
    if question.samples * question.length > MOST_TOKENS:
        expected = f"at most {counted(MOST_TOKENS // question.length, 'row')} of {question.length:,} tokens"
        raise BadInput("parity", "--samples", expected=expected, found=f"{question.samples:,}")
    each, rest = divmod(question.samples, layout.data)
    if rest or each < layout.pipeline:
        expected = f"a multiple of data={layout.data}, at least {layout.data * layout.pipeline}"
        raise BadInput("parity", "--samples", expected=expected, found=question.samples)
    check_schedule(question.schedule, layout, each, "parity")
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
    question = replace(question, folder=str(read_source(question.folder).path.absolute()))
    single = replace(question, layout=Layout(), split=None)
    allowed = TOLERANCES[question.dtype] if tolerance is None else tolerance
    against = max(allowed, _OF_FP32) if tolerance is None else tolerance
    say("transformers")
    reference = observe_hf(single)
    say("one process")
    ours = observe_ours(single)
    comparisons = [compare(reference, ours, against, "one process / transformers")]
    if question.layout != Layout():
        say(str(question.layout))
        cut = observe_ours(question)
        comparisons.append(compare(ours, cut, allowed, f"{question.layout} / one process"))
    return comparisons
