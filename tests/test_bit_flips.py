"""One flipped bit in any file of a run, a conversion or a token set: it is refused, or nothing changes.

The files are those of a real run made here, so a kind that is added joins by itself. What is read from a
damaged folder must be what was written; else the answer is an error of one line with its documented code.
A Hugging Face folder is not among them: its format has no place for a checksum.
"""

import json
import re
import shutil
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.damage import flip_bit
from support.folders import contents
from support.short_runs import tiny_recipe, write_recipe
from support.token_files import batch_at, write_token_file
from trilith.checkpoints import ConversionOptions, convert, load, read_source, verify
from trilith.cli.app import run
from trilith.data import TokenFile
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.recipes.recipe import parse_recipe
from trilith.runs.report.record import read_run
from trilith.training.run_data import open_data

STEPS = 3
#: The answers to what was damaged: input, a rank or the disk, a checkpoint.
CODES = (2, 3, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make the folders to damage; each is read by the readers of the same name in ``READERS``."""
    root = tmp_path_factory.mktemp("flips") / "made"
    for name in ("tokens", "chat", "tokenizer"):
        (root / name).mkdir(parents=True)
    write_tokens(root / "tokens" / "ids", count=900)
    random = np.random.default_rng(5)
    chat = random.integers(0, 131, (60, 8)), random.integers(0, 2, (60, 8))
    write_token_file(root / "chat" / "ids", *chat, vocab_size=131, eos_id=2)
    for name in ("tokenizer.json", "generation_config.json"):
        (root / "tokenizer" / name).write_text(json.dumps({"name": name, "number": 12.5}))
    assert train(root, recipe(root, STEPS)) == 0
    shutil.rmtree(root / "tokenizer")
    convert(root / "run", root / "cut", tensor=2)
    interrupted(root / "run", root / "interrupted" / "out")
    convert(root / "run", root.parent / "hf", to="hf")
    convert(root.parent / "hf", root / "weights", tensor=2, pipeline=2)
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    adapters = recipe(root, 1, out="lora") | {"lora": lora, "dtype": "float32"}
    adapters["model"] = {"init_from": str(root.parent / "hf")}
    assert train(root, adapters) == 0
    return root


def recipe(root, steps, *, tokens="tokens", out="run"):
    model = {"config": TINIEST_LLAMA}
    if (root / "tokenizer").exists():
        model["tokenizer"] = str(root / "tokenizer")
    data = {"sequence_length": 8, "global_batch": 2, "micro_batch": 1}
    path, checkpoint = root / tokens / "ids", {"every": 1, "keep": 2}
    return tiny_recipe(root / out, path, steps=steps, model=model, data=data, checkpoint=checkpoint)


def train(root, recipe):
    try:
        return run(["train", str(write_recipe(root.parent / "recipe.toml", recipe))])
    finally:
        if dist.is_initialized():  # a command that fails ends its process, and this one goes on
            dist.destroy_process_group()


def interrupted(source, out):
    """Stop a conversion when some of its work is noted as done."""
    reports = iter(range(9))

    def stop(done):
        if next(reports) == 8:
            raise KeyboardInterrupt

    out.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, tensor=2, options=ConversionOptions(workers=1, note_every=1, progress=stop))
    assert list(out.parent.rglob("journal*"))


class Refused(Exception):
    """A command ended with this exit code."""

    def __init__(self, code):
        super().__init__(f"exit code {code}")
        self.exit_code = code


def checkpoint(folder):
    """Return all that a checkpoint says and holds."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        source = read_source(folder)
    assert source.manifest is not None
    if told:  # a damaged newest checkpoint was passed over
        raise Refused(4)
    verify(source.path, source.manifest)
    numbers = {name: tensor.read().numpy().tobytes() for name, tensor in source.ours.items()}
    companions = {path.name: path.read_bytes() for path in source.companions}
    return source.path.name, source.manifest.model_dump(mode="json", exclude={"version"}), numbers, companions


@dataclass(frozen=True)
class Run:
    """Hold what a run's folder says: newest checkpoint, weights, and the facts of its steps and events."""

    checkpoint: object
    weights: object
    lines: dict[str, frozenset[str]]

    def agrees_with(self, whole):
        """The lines that are there are as they were; some may be missing."""
        return (self.checkpoint, self.weights) == (whole.checkpoint, whole.weights) and all(
            whole.lines.get(at, {"new"}) <= facts for at, facts in self.lines.items()
        )


def a_run(folder, weights):
    """Read the run as the report, ``inspect`` and ``generate`` do."""
    record = read_run(folder)
    named = [(f"step {line['step']}", line) for line in record.steps]
    named += [(f"event {line.get('time')}", line) for line in record.events]
    lines = {at: frozenset(f"{key}={value!r}" for key, value in line.items()) for at, line in named}
    return Run(checkpoint(folder), weights(folder), lines)


def resume(root):
    """One more step: its loss, its gradient norm, and every number of its checkpoint."""
    if code := train(root, recipe(root, STEPS + 1)):
        raise Refused(code)
    last = json.loads((root / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS
    return checkpoint(root / "run"), last["loss"], last["grad_norm"]


def all_tokens(root, name):
    """Every id by itself, which are to be learnt, and as the batches of a run have them."""
    file = TokenFile.open(root / name / "ids")
    batches = open_data(parse_recipe(recipe(root, STEPS, tokens=name)))
    rows = [batch_at(batches, number, 0, 1) for number in range(8)]
    inputs = [(row.input_ids.numpy().tobytes(), row.labels.numpy().tobytes()) for row in rows]
    count = len(file.tokens)
    learnt = None if file.targets is None else file.learnt(0, count).tobytes()
    return file.ids(0, count).tobytes(), learnt, file.documents.tobytes(), file.fingerprint, inputs


def exported(folder):
    """The run's adapters in PEFT's format."""
    convert(folder, folder.with_name("peft"), to="peft")
    return contents(folder.with_name("peft"))


def weights(folder):
    return {name: value.detach().numpy().tobytes() for name, value in load(folder).model.named_parameters()}


def finish(root):
    """Call the interrupted conversion again, and return the tensors of its output."""
    source, out = root.parent.parent / "made" / "run", root / "interrupted" / "out"
    convert(source, out, tensor=2, options=ConversionOptions(workers=1, note_every=1))
    return checkpoint(out)


READERS = {
    "tokens": [lambda root: all_tokens(root, "tokens")],
    "chat": [lambda root: all_tokens(root, "chat")],
    "lora": [lambda root: a_run(root / "lora", exported)],
    "run": [lambda root: a_run(root / "run", weights), resume],
    "cut": [lambda root: checkpoint(root / "cut")],
    "weights": [lambda root: checkpoint(root / "weights"), lambda root: weights(root / "weights")],
    "interrupted": [finish],
}
#: What is read without writing beside it, but for a run that goes on.
ONLY_READ = {"tokens", "chat", "run", "cut", "weights"}


def files_by_kind(made):
    """Return the files that have a bit to flip; those which differ in numbers alone are of one kind."""
    kinds = defaultdict(list)
    for path in sorted(made.rglob("*")):
        if path.is_file() and path.stat().st_size:
            file = path.relative_to(made)
            kinds[re.sub(r"[0-9a-f]{16}|[0-9]+", "N", str(file))].append(file)
    assert {file.parts[0] for files in kinds.values() for file in files} == READERS.keys()
    return kinds


def answer(read, root):
    """Return what was read, or the exit code of the refusal."""
    try:
        return read(root)
    except (BadInput, Refused) as error:
        assert "\n" not in str(error), str(error)
        return int(error.exit_code)


def campaign(made, count, resumes, seed):
    """Flip a bit in a file of each kind in turn; return how often it was refused or had no effect."""
    random, outcomes, whole, bad = Random(seed), Counter[str](), {}, []
    kinds, scratch = files_by_kind(made), made.parent / "scratch"

    def fresh():
        shutil.rmtree(scratch, ignore_errors=True)
        return Path(shutil.copytree(made, scratch / "made"))

    root = fresh()
    for number in range(count):
        kind = sorted(kinds)[number % len(kinds)]
        top = kind.split("/")[0]
        if resume in READERS[top]:
            read = READERS[top][number < resumes * len(kinds)]
        else:
            read = random.choice(READERS[top])
        if read not in whole:
            whole[read] = answer(read, root)
            assert not isinstance(whole[read], int), (top, whole[read])
            root = fresh()
        path = root / random.choice(kinds[kind])
        size = path.stat().st_size
        # In half of the cases among the first 4,096 bytes, where formats keep what they say.
        at, bit = random.randrange(random.choice((min(size, 4096), size))), random.randrange(8)
        flip_bit(path, at, bit)
        read_now = answer(read, root)
        if isinstance(read_now, int):
            assert read_now in CODES, (kind, read_now)
            outcomes["refused"] += 1
        elif read_now.agrees_with(whole[read]) if isinstance(read_now, Run) else read_now == whole[read]:
            outcomes["no effect"] += 1
        else:
            bad.append(f"{kind}: bit {bit} of byte {at}: {path.read_bytes()[max(0, at - 30) : at + 30]!r}")
        if top in ONLY_READ and read is not resume:
            flip_bit(path, at, bit)  # it is as it was
        else:
            root = fresh()
    assert not bad, f"{len(bad)} of {count} accepted with another meaning:\n" + "\n".join(bad)
    return outcomes


@pytest.mark.filterwarnings("ignore::UserWarning:trilith")  # about checkpoints that are passed over
@pytest.mark.parametrize(
    ("count", "resumes"),
    [
        pytest.param(120, 1, id="short"),
        pytest.param(2000, 20, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_no_flipped_bit_is_accepted_with_another_meaning(made, count, resumes, capsys):
    outcomes = campaign(made, count, resumes, seed=count)
    assert outcomes["refused"] > count // 2
    with capsys.disabled():
        print(f"\n{count} flips: {dict(outcomes)}")
