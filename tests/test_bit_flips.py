"""One flipped bit in any file of a run, a conversion or a token set: it is refused, or nothing changes.

The files are those of a real run made here, so a kind that is added joins by itself. What is read from a
damaged folder must be what was written; else the answer is an error of one line with its documented code.
A Hugging Face folder is not among them: its format has no place for a checksum.
"""

import itertools
import json
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch.distributed as dist
from support.configs import TINIEST_LLAMA
from support.folders import contents
from support.short_runs import tiny_recipe
from trilith.checkpoints import ConversionOptions, convert, load_model, read_source, verify
from trilith.cli.app import run
from trilith.data import TokenFile
from trilith.data.token_writer import TokenWriter
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, Box
from trilith.recipes.foreign.translation import to_toml
from trilith.recipes.recipe import parse_recipe
from trilith.runs.report.record import read_run
from trilith.training.run_data import open_data

STEPS = 3
#: The answers to what was damaged: input, a rank or the disk, a checkpoint.
CODES = (2, 3, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make the folders to damage; each is read by the reader of the same name in ``READERS``."""
    root = tmp_path_factory.mktemp("flips") / "made"
    (root / "tokens").mkdir(parents=True)
    write_tokens(root / "tokens" / "ids", count=900)
    write_chat(root / "chat" / "ids")
    (root / "tokenizer").mkdir()
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
    del adapters["model"]["config"]
    adapters["model"]["init_from"] = str(root.parent / "hf")
    assert train(root, adapters) == 0
    return root


def write_chat(name):
    """Write a set of conversations, in which some of the tokens are to be learnt."""
    name.parent.mkdir()
    random = np.random.default_rng(5)
    with TokenWriter(name, vocab_size=131, eos_id=2, template_sha256="0" * 64) as writer:
        for _ in range(60):
            writer.add_documents(random.integers(0, 131, 8), [8], random.integers(0, 2, 8))
        writer.commit()


def recipe(root, steps, *, tokens="tokens", out="run"):
    model = {"config": TINIEST_LLAMA}
    if (root / "tokenizer").exists():
        model["tokenizer"] = str(root / "tokenizer")
    data = {"tokens": str(root / tokens / "ids"), "sequence_length": 8, "global_batch": 2, "micro_batch": 1}
    return tiny_recipe(
        root / out,
        root / tokens / "ids",
        steps=steps,
        model=model,
        data=data,
        checkpoint={"every": 1, "keep": 2},
    )


def train(root, recipe):
    path = root.parent / "recipe.toml"
    path.write_text("".join(f"{key} = {to_toml(value)}\n" for key, value in recipe.items()))
    try:
        return run(["train", str(path)])
    finally:
        if dist.is_initialized():  # a command that fails ends its process, and this one goes on
            dist.destroy_process_group()


def interrupted(source, out):
    """Stop a conversion when some of its work is noted as done."""
    out.parent.mkdir()
    moved = []

    def stop(done):
        moved.append(done)
        if len(moved) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, tensor=2, options=ConversionOptions(workers=1, note_every=1, progress=stop))
    assert list(out.parent.rglob("journal*"))


def all_of(folder):
    """Return all that a checkpoint says and holds."""
    source = read_source(folder)
    assert source.manifest is not None
    if source.warnings:  # a damaged newest checkpoint was passed over, and the user is told
        raise Refused(4)
    verify(source.path, source.manifest)
    links = source.links()
    numbers = {
        name: source.read(name, Box.whole(whole.shape), links).numpy().tobytes()
        for name, whole in source.catalog.items()
    }
    companions = {path.name: path.read_bytes() for path in source.companions}
    said = source.manifest.model_dump(mode="json", exclude={"version"})
    return source.path.name, said, numbers, companions


@dataclass(frozen=True)
class Run:
    """Hold what a run's folder says: newest checkpoint, steps and events by number, weights."""

    checkpoint: object
    steps: dict[str, frozenset[str]]
    events: dict[str, frozenset[str]]
    weights: object


def facts(line):
    return frozenset(f"{key}={value!r}" for key, value in line.items())


def read_a_run(folder, weights):
    """Read the run as the report, ``inspect`` and ``generate`` do."""
    record = read_run(folder)
    steps = {str(line["step"]): facts(line) for line in record.steps}
    events = {str(one.get("time")): facts(one) for one in record.events}
    return Run(all_of(folder), steps, events, weights(folder))


def resume(root):
    """One more step: its loss, its gradient norm, and every number of its checkpoint."""
    code = train(root, recipe(root, STEPS + 1))
    if code:
        raise Refused(code)
    lines = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert last["step"] == STEPS
    return all_of(root / "run"), last["loss"], last["grad_norm"]


class Refused(Exception):
    """A command ended with this exit code."""

    def __init__(self, code):
        super().__init__(f"exit code {code}")
        self.exit_code = code


def all_tokens(root, tokens):
    """Every id by itself, which are to be learnt, and as the batches of a run have them."""
    file = TokenFile.open(root / tokens / "ids")
    batches = open_data(parse_recipe(recipe(root, STEPS, tokens=tokens)))
    rows = [batches.batch(number, 0, 1) for number in range(8)]
    inputs = [(row.input_ids.numpy().tobytes(), row.labels.numpy().tobytes()) for row in rows]
    count = len(file.tokens)
    learnt = None if file.targets is None else file.learnt(0, count).tobytes()
    return file.ids(0, count).tobytes(), learnt, file.documents.tobytes(), file.fingerprint, inputs


def exported(folder):
    """The run's adapters in PEFT's format."""
    out = folder.with_name("peft")
    convert(folder, out, to="peft")
    return contents(out)


def load_all(folder):
    model = load_model(folder)
    return {name: value.detach().numpy().tobytes() for name, value in model.named_parameters()}


def finish(root):
    """Call the interrupted conversion again, and return the tensors of its output."""
    out = root / "interrupted" / "out"
    convert(
        root.parent.parent / "made" / "run", out, tensor=2, options=ConversionOptions(workers=1, note_every=1)
    )
    return all_of(out)


READERS = {
    "tokens": [lambda root: all_tokens(root, "tokens")],
    "chat": [lambda root: all_tokens(root, "chat")],
    "lora": [lambda root: read_a_run(root / "lora", exported)],
    "run": [lambda root: read_a_run(root / "run", load_all), resume],
    "cut": [lambda root: all_of(root / "cut")],
    "weights": [lambda root: all_of(root / "weights"), lambda root: load_all(root / "weights")],
    "interrupted": [finish],
}


def kind_of(path, made):
    """Files that differ in numbers alone are of one kind."""
    return re.sub(r"[0-9a-f]{16}|[0-9]+", "N", str(path.relative_to(made)))


def files_by_kind(made):
    kinds = defaultdict(list)
    for path in sorted(made.rglob("*")):
        if path.is_file() and path.stat().st_size:
            kinds[kind_of(path, made)].append(path)
    return kinds


def flipped(data, random):
    """One bit: in half of the cases among the first 4,096 bytes, where formats keep what they say."""
    near = random.random() < 0.5
    at = random.randrange(min(len(data), 4096) if near else len(data))
    changed = bytearray(data)
    changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def answer(read, root):
    """Return what was read, or the exit code of the refusal."""
    try:
        return read(root)
    except (BadInput, Refused) as error:
        assert "\n" not in str(error), str(error)
        return int(error.exit_code)


def campaign(made, count, resumes, seed):
    random, outcomes = Random(seed), Counter[str]()
    scratch = made.parent / "scratch"
    kinds = files_by_kind(made)  # of an empty file, which a run's lock is, there is no bit to flip
    assert {path.relative_to(made).parts[0] for files in kinds.values() for path in files} == READERS.keys()

    def fresh():
        shutil.rmtree(scratch, ignore_errors=True)
        return Path(shutil.copytree(made, scratch / "made"))

    whole = {}
    bad = []
    for number in itertools.count():
        if outcomes.total() + len(bad) == count:
            break
        kind = sorted(kinds)[number % len(kinds)]
        top = kind.split("/")[0]
        readers = READERS[top]
        if resume in readers:
            which = readers.index(resume) if number < resumes * len(kinds) else 0
        else:
            which = random.randrange(len(readers))
        if (top, which) not in whole:
            whole[top, which] = answer(readers[which], fresh())
            assert not isinstance(whole[top, which], int), (top, which, whole[top, which])
        root = fresh()
        path = root / random.choice(kinds[kind]).relative_to(made)
        data = path.read_bytes()
        damaged = flipped(data, random)
        path.write_bytes(damaged)
        found = answer(readers[which], root)
        if isinstance(found, int):
            assert found in CODES, (kind, found)
            outcomes["refused"] += 1
        elif same(found, whole[top, which]):
            outcomes["no effect"] += 1
        else:
            at = next(i for i, (a, b) in enumerate(zip(data, damaged, strict=True)) if a != b)
            bad.append(f"{kind} (reader {which}): byte {at}: {data[max(0, at - 30) : at + 30]!r}")
    print(f"kinds: {len(kinds)}: {', '.join(sorted(kinds))}")
    assert not bad, f"{len(bad)} of {count} accepted with another meaning:\n" + "\n".join(bad)
    return outcomes


def same(found, whole):
    """Equal; of a run's steps and events it is enough that those which are there are as they were."""
    if not isinstance(found, Run) or not isinstance(whole, Run):
        return found == whole
    return (
        (found.checkpoint, found.weights) == (whole.checkpoint, whole.weights)
        and all(whole.steps.get(step, {"new"}) <= said for step, said in found.steps.items())
        and all(whole.events.get(when, {"new"}) <= said for when, said in found.events.items())
    )


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
