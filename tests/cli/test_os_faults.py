"""Every command meets every fault of the system: one line, a documented code, nothing left, within 5 s.

The table is made from the commands' own signatures: a new command or path option joins by itself, and fails
here until it refuses, or until ``VALID`` says how the new command is called. The seconds are those of a
machine that has a core to spare: what a command computes, and what it lives without waiting for a core.
"""

import importlib
import inspect
import json
import os
import shutil
import stat
import sys
import tempfile
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trilith
import typer
from safetensors.torch import save_file
from support.configs import TINY_LLAMA
from support.forked import (
    few_descriptors,
    little_memory,
    may_mount,
    mount_full,
    mount_read_only,
    no_more_processes,
    obey_permissions,
    own_mounts,
    run_forked,
    small_files_only,
)
from trilith.checkpoints import convert
from trilith.cli.app import COMMANDS, run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.ranks import pool, processes

#: Seconds after which a command counts as hanging, on a machine that others use; and those of a refusal.
HANGS, REFUSED_WITHIN = 120.0, 5.0
OUTPUTS = {"out", "dst", "write", "html"}
#: How an output's name ends; ``tokenize`` is given the name without it.
SUFFIXES = {"recipe": ".toml", "schedule": ".svg", "tokenize": ".bin"}

#: How each command is called so that nothing is wrong. ``{}`` is the folder with the inputs; an output, which
#: this table does not have, is a new path.
VALID = {
    "quickstart": {},
    "models": {"+": ["gpt2"]},
    "doctor": {"folders": ["{}"]},
    "bench": {"+": ["--device=cpu", "--quick", "--only=speed"]},
    "convert": {"src": ["{}/hf"]},
    "reshard": {"src": ["{}/sharded"]},
    "inspect": {"source": ["{}/hf"]},
    "diff": {"a": ["{}/hf"], "b": ["{}/sharded"]},
    "verify": {"source": ["{}/sharded"]},
    "parity": {"folder": ["{}/hf"]},
    "train_tokenizer": {
        "inputs": ["{}/text.txt"],
        "chat_template": ["{}/template.jinja"],
        "+": ["--vocab-size=300"],
    },
    "tokenize": {
        "inputs": ["{}/chat.jsonl"],
        "tokenizer": ["{}/tokenizer"],
        "chat_template": ["{}/template.jinja"],
        "+": ["--workers=1", "--quiet"],
    },
    "plan": {"model": ["llama-3.2-1b"], "machine": ["{}/bench.json"], "+": ["--gpus=1", "--seq=512"]},
    "train": {"recipe": ["{}/recipe.toml"]},
    "launch": {"system": ["slurm"], "recipe": ["{}/recipe.toml"]},
    "status": {"run": ["{}/ended"], "since": ["{}/hf/config.json"]},
    "report": {"runs": ["{}/run"]},
    "merge_lora": {"base": ["{}/hf"], "adapter": ["{}/adapter"]},
    "recipe": {"origin": ["from-deepspeed"], "file": ["{}/deepspeed.json"]},
    "schedule": {"+": ["--name=1f1b", "--stages=2", "--microbatches=2"]},
    "generate": {
        "source": ["{}/hf"],
        "prompts": ["{}/prompts.txt"],
        "tokenizer": ["{}/tokenizer"],
        "adapter": ["{}/adapter"],
        "+": ["--max-new-tokens=1"],
    },
}
#: Good inputs of options that only inputs of other projects need: no valid call above has them.
NEEDLESS = {"config": "{}/hf"}
#: A step of a run.
STEP = {
    **{"step": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 16},
    **{"tokens_per_second": 1.0, "seconds": 1.0},
}
#: The status of a rank that has finished.
ENDED = {
    **{"rank": 0, "code": 0, "phase": "step", "step": 1, "error": "", "time": 0.0, "pid": 1},
    **{"host": "elsewhere", "cause": True, "run": "one", "started": 0},
}
#: What `trilith bench` measured of a machine of one device.
BENCH = {
    "machine": {"device": "cuda", "gpus": 1, "names": ["one"], "memory": 80 * 10**9},
    "rows": [
        {"part": "speed", "status": "done", "figures": {
            "matmul, bf16: TFLOP/s": 300.0, "matmul, fp32: TFLOP/s": 30.0,
            "attention, bf16: TFLOP/s": 200.0, "attention, fp32: TFLOP/s": 20.0,
            "module, forward and backward: us": 42.0, "copy: GB/s read and written": 2000.0,
        }},
    ],
}  # fmt: skip
#: Paths that a recipe names.
RECIPE_INPUTS = {
    "model.config": "{}/hf/config.json",
    "model.init_from": "{}/hf",
    "model.tokenizer": "{}/tokenizer",
    "data.tokens": "{}/tokens",
    "evaluation.tokens": "{}/tokens",
    "lora.init_from": "{}/adapter",
}
#: The other keys that such a key needs, and keys that replace ``model.config``.
BESIDE = {
    "evaluation.tokens": ["evaluation.every=1"],
    "lora.init_from": ["model.init_from={}/hf", "dtype=float32"],
}
NO_CONFIG = {"model.init_from", "lora.init_from"}


@dataclass(frozen=True)
class Place:
    """Name a path of a command line: an argument or option of a command, or a key of the recipe."""

    command: str
    name: str
    output: bool
    suffix: str = ""

    def __str__(self):
        return f"{self.command}-{self.name}"


def path_parameters(command):
    """The names of a command's parameters that are paths, without what only launched ranks are given."""
    for name, hint in typing.get_type_hints(command, include_extras=True).items():
        kind, *about = typing.get_args(hint) or (hint,)
        if (kind is Path or Path in typing.get_args(kind)) and not about[0].hidden:
            yield name


def places():
    for command in COMMANDS:
        valid = VALID.get(command.__name__, {})
        for name in path_parameters(command):
            given = valid.get(name, [""])[0]
            suffix = Path(given).suffix if name not in OUTPUTS else SUFFIXES.get(command.__name__, "")
            yield Place(command.__name__, name, name in OUTPUTS, suffix)
    yield Place("train", "recipe: out", True)
    for key in RECIPE_INPUTS:
        yield Place("train", f"recipe: {key}", False, ".json" if key == "model.config" else "")


def words(command, inputs, place, fault=None, at=None):
    """Return the command's words, all valid, outputs in ``place``, except the path ``at`` with the fault.

    Without ``at`` the place of ``fault`` is as valid as the others.
    """
    function = next(one for one in COMMANDS if one.__name__ == command)
    valid, said = VALID[command], [command.replace("_", "-")]
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "context":
            continue
        about = typing.get_args(typing.get_type_hints(function, include_extras=True)[name])[1]
        values = [one.format(inputs) for one in valid.get(name, [])]
        if name in OUTPUTS:
            suffix = SUFFIXES.get(command, "")
            stem = "out" if name in ("out", "dst") else name
            values = [str(place / f"{stem}{suffix}").removesuffix(".bin")]
        if fault is not None and name == fault.name and at is not None:
            values = [at]
        if isinstance(about, typer.models.ArgumentInfo):
            said += values
        elif values:
            flag = next(iter(about.param_decls or ()), f"--{name.replace('_', '-')}")
            said += [word for value in values for word in (flag, value)]
        del parameter
    if command == "train":
        said.append(f"out={place / 'out'}")
        key = "" if fault is None else fault.name.removeprefix("recipe: ")
        if key in NO_CONFIG:
            said[1] = str(inputs / "without_model.toml")
        if key in RECIPE_INPUTS or (key == "out" and at is not None):
            said.append(f"{key}={at or RECIPE_INPUTS[key].format(inputs)}")
        said += [word.format(inputs) for word in BESIDE.get(key, [])]
    return said + valid.get("+", [])


@pytest.fixture(scope="module")
def inputs():
    """A folder with one good input of each kind, and every module of the house imported."""
    root = Path(trilith.__path__[0])
    for file in sorted(root.glob("*/*.py")):
        if (
            (file.parent / "__init__.py").exists()
            and file.name != "__main__.py"
            and file.parent.name != "tests"
        ):
            importlib.import_module(f"trilith.{file.parent.name}.{file.stem}".removesuffix(".__init__"))
    folder = Path(tempfile.mkdtemp(prefix="trilith-faults-"))
    folder.chmod(0o755)
    config = {**TINY_LLAMA, "vocab_size": 300}
    write_hf_folder(folder / "hf", config)
    convert(folder / "hf", folder / "sharded", tensor=1)
    text = "The quick brown fox jumps over the lazy dog.\n" * 40
    (folder / "text.txt").write_text(text)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    (folder / "template.jinja").write_text(template)
    train_tokenizer([text], folder / "tokenizer", vocab_size=300)
    talk = {"messages": [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]}
    (folder / "chat.jsonl").write_text(json.dumps(talk) + "\n")
    (folder / "prompts.txt").write_text("dog\n")
    (folder / "deepspeed.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}'
    )
    write_tokens(folder / "tokens")
    run(["--help"])  # what it reads and imports, forks need not read again
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    (folder / "ended" / "status").mkdir(parents=True)
    (folder / "ended" / "status" / "rank0.json").write_text(json.dumps(ENDED))
    (folder / "bench.json").write_text(json.dumps(BENCH))
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    shapes = {"A": (2, 32), "B": (32, 2)}
    blocks = [f"base_model.model.model.layers.{n}.self_attn.q_proj" for n in range(3)]
    parts = {
        f"{block}.lora_{one}.weight": torch.ones(shape) for block in blocks for one, shape in shapes.items()
    }
    save_file(parts, folder / "adapter" / "adapter_model.safetensors")
    data = f'[data]\ntokens = "{folder}/tokens"\nsequence_length = 16\nglobal_batch = 1\n'
    model = f'[model]\nconfig = "{folder}/hf/config.json"\n'
    for name, section in (("recipe", model), ("without_model", "")):
        (folder / f"{name}.toml").write_text(f'out = "nowhere"\nsteps = 1\n{section}{data}')
    yield folder
    shutil.rmtree(folder)


def _text_of_no_kind(path):
    path.write_bytes(b"\xff\xfe\x00\xff" * 10)


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(10 << 30)


def _closed(path):
    path.write_text("{}")
    path.chmod(0)


#: Faults in the place of an input.
INPUT_FAULTS = {
    "missing": lambda path: None,
    "unreadable": _closed,
    "pipe": os.mkfifo,
    "dev-zero": lambda path: path.symlink_to("/dev/zero"),
    "dev-null": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "broken-link": lambda path: path.symlink_to("nowhere"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "10-GB": _sparse,
    "not-UTF-8": _text_of_no_kind,
    "name-too-long": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}


def _no_writing(path):
    path.parent.mkdir()
    path.parent.chmod(0o555)


#: Faults of a file inside a folder that is an input.
INSIDE_FAULTS = {
    **{
        name: fault
        for name, fault in INPUT_FAULTS.items()
        if name not in ("name-too-long", "a-file-as-folder")
    },
    "empty": Path.touch,
}


#: Faults in the place of an output.
OUTPUT_FAULTS = {
    "read-only": _no_writing,
    "full-disk": lambda path: None,
    "full-mount": lambda path: path.parent.mkdir(),
    "read-only-mount": lambda path: path.parent.mkdir(),
    "pipe": os.mkfifo,
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "dev-full": lambda path: path.symlink_to("/dev/full"),
    "link-loop": lambda path: path.symlink_to(path.name),
    "name-too-long": lambda path: None,
    "a-file-as-folder": lambda path: path.parent.write_text("mine"),
}
#: The exit codes of each fault, where they are not those of bad input or of a bad checkpoint.
CODES = {"full-disk": {3}, "full-mount": {2, 3}, "dev-full": {2, 3}}
MOUNTS = {"full-mount": mount_full, "read-only-mount": mount_read_only}
#: Commands that go on from what they left, so that their folder stays when the disk is full.
STAYS = {"quickstart", "train"}


def tree(folder):
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, 0 if path.is_dir() else path.lstat().st_size)
        for path in sorted(folder.rglob("*"))
    }


def check(work, where, codes, said):
    """Run it and look at its end, and at its time once more if it was long; the exit code."""
    text = " ".join(said)
    for again in (True, False):
        ended = run_forked(work, where, limit=HANGS)
        assert ended.code is not None, f"hangs: {text}"
        assert ended.code in codes, f"code {ended.code} of: {text}\n{ended.err}"
        assert not ended.left_processes, f"{text}\n{ended.err}"
        if ended.code == 0:
            return 0
        assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, f"{text}\n{ended.err}"
        assert "unexpected" not in ended.err, f"{text}\n{ended.err}"
        if max(ended.computed, ended.took) < REFUSED_WITHIN:
            break
        assert again, f"{ended.computed:.1f} s of computing in {ended.took:.1f} s: {text}"
    return ended.code


def alone(said, where, limit=lambda: None):
    """Return the work of a child process: take the limit upon itself, then run the command."""

    def work():
        os.environ.update(TMPDIR=str(where / "tmp"), TOKENIZERS_PARALLELISM="false")
        tempfile.tempdir = None
        # The ranks that this process has already started answer to its parent.
        pool._pool, processes.templates._templates = pool.Pool(), []
        limit()
        return run(said)

    return work


def path_of(fault, where, suffix):
    """Return the path at which a fault is made; some faults need a folder or a name of their own."""
    if fault in ("read-only", "a-file-as-folder", *MOUNTS):
        return where / "inner" / f"x{suffix}"
    return where / (("n" * 300 if fault == "name-too-long" else "x") + suffix)


#: Faults that make a command wait, or that leave a part of a file. The others run with the slow tests.
FIRST = {"pipe", "dev-zero", "unreadable", "read-only", "full-disk"}
CASES = [
    pytest.param(place, fault, id=f"{place}-{fault}", marks=[] if fault in FIRST else pytest.mark.slow)
    for place in places()
    for fault in (OUTPUT_FAULTS if place.output else INPUT_FAULTS)
]


@pytest.mark.parametrize(("place", "fault"), CASES)
def test_a_fault_is_one_line_and_leaves_nothing(inputs, place, fault):
    if fault in MOUNTS and not may_mount():
        # A container may forbid mounts; "full-disk" and "read-only" make such faults without them.
        pytest.skip("this system does not let the user mount")
    if fault == "device" and os.geteuid():
        # The kernel lets only root make a device; "dev-zero" is one that every user has.
        pytest.skip("only root may make a device")
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        path = path_of(fault, where, place.suffix)
        (OUTPUT_FAULTS if place.output else INPUT_FAULTS)[fault](path)
        (where / "tmp").mkdir()
        said = words(place.command, inputs, where, place, str(path).removesuffix(".bin"))
        before = tree(where), tree(inputs)
        stays = "full" in fault and place.command in STAYS

        def limit():
            obey_permissions()
            if fault == "full-disk":
                small_files_only(16)

        def mounted():
            """Nobody else sees the mount, so its content is looked at here."""
            own_mounts()
            MOUNTS[fault](path.parent)
            empty = tree(path.parent)
            code = alone(said, where, limit)()
            left = (
                {} if stays else {name: size for name, size in tree(path.parent).items() if name not in empty}
            )
            print(*left, sep="\n", end="", file=sys.stderr)
            return code

        check(
            mounted if fault in MOUNTS else alone(said, where, limit), where, CODES.get(fault, {2, 4}), said
        )
        assert tree(inputs) == before[1], " ".join(said)
        if not stays:
            assert tree(where) == before[0], " ".join(said)


def cheap(names, *, first):
    """All of the names as parameters; those which are not first are for the slow tests."""
    return [pytest.param(name, marks=[] if name in first else pytest.mark.slow) for name in names]


FOLDERS = [place for place in places() if not place.output and not place.suffix]


@pytest.mark.parametrize("fault", cheap(INSIDE_FAULTS, first={"pipe"}))
@pytest.mark.parametrize("place", FOLDERS, ids=str)
def test_a_fault_inside_a_folder_is_one_line_or_without_effect(inputs, place, fault):
    """Damage each file in turn. A command that does not need the file succeeds."""
    for file in files_of(place, inputs):
        with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
            where = Path(folder)
            (where / "tmp").mkdir()
            given = where / input_of(place, inputs).name
            for one in files_of(place, inputs):
                (given.parent / one).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(inputs / one, given.parent / one)
            (given.parent / file).unlink()
            INSIDE_FAULTS[fault](given.parent / file)
            said = words(place.command, inputs, where, place, str(given))
            before = tree(where), tree(inputs)
            code = check(alone(said, where, obey_permissions), where, {0, 2, 4}, said)
            assert tree(inputs) == before[1], " ".join(said)
            after = tree(where)
            assert (before[0].items() <= after.items()) if code == 0 else after == before[0], " ".join(said)


def input_of(place, inputs):
    """Return the good input of a place."""
    key = place.name.removeprefix("recipe: ")
    known = {name: [path] for name, path in (RECIPE_INPUTS | NEEDLESS).items()}
    (given,) = known.get(key) or VALID[place.command][place.name]
    return Path(given.format(inputs))


def files_of(place, inputs):
    """Return the files of an input that is a folder, or has several files, below the folder of inputs."""
    given = input_of(place, inputs)
    found = given.rglob("*") if given.is_dir() else given.parent.glob(f"{given.name}.*")
    return sorted(path.relative_to(inputs) for path in found if path.is_file())


def gone():
    """Delete the working directory."""
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


#: Resources of which the machine has too little. A command that needs none of them succeeds.
TOO_LITTLE = {
    "descriptors": lambda: few_descriptors(0),
    "descriptors-3": lambda: few_descriptors(3),
    "descriptors-20": lambda: few_descriptors(20),
    "descriptors-63": lambda: few_descriptors(63),
    "memory": lambda: little_memory(0),
    "memory-1-MiB": lambda: little_memory(2**20),
    "memory-8-MiB": lambda: little_memory(2**23),
    "memory-200-MiB": lambda: little_memory(200 << 20),
    "memory-300-MiB": lambda: little_memory(300 << 20),  # enough to begin
    "threads": no_more_processes,
}


@pytest.mark.parametrize("what", cheap(TOO_LITTLE, first={"descriptors-3", "memory-1-MiB", "threads"}))
@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_too_little_of_something_is_one_line_and_leaves_nothing(inputs, command, what):
    if command in LONG and what == "memory-300-MiB":
        # Enough memory to begin: nothing is refused, and the whole work of these would follow.
        pytest.skip("it goes on, for minutes")
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        (where / "tmp").mkdir()
        for one in (where, where / "tmp"):  # another user works there where threads are few
            one.chmod(0o777)
        said = words(command, inputs, where)
        before = tree(where), tree(inputs)
        code = check(
            alone(said, where, TOO_LITTLE[what]), where, {3} if "descriptors" in what else {0, 3}, said
        )
        assert tree(inputs) == before[1]
        if code:
            assert command in STAYS or tree(where) == before[0], " ".join(said)


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_a_deleted_working_directory_is_one_line_or_without_effect(inputs, command):
    """Inputs are named from the root, outputs from the directory that is gone."""
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        (where / "tmp").mkdir()
        said, before = words(command, inputs, Path()), (tree(where), tree(inputs))
        writes = {place.name for place in places() if place.command == command and place.output}
        check(alone(said, where, gone), where, {2} if writes else {0, 2}, said)
        assert (tree(where), tree(inputs)) == before, " ".join(said)


#: Numbers that count nothing: any of them will do.
NO_COUNT = {"seed"}


def counts():
    """Return each option of each command that is a whole number and counts something."""
    for command in COMMANDS:
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            kind, *about = typing.get_args(hint) or (hint,)
            if (kind is int or int in typing.get_args(kind)) and name not in NO_COUNT:
                flag = next(iter(about[0].param_decls or ()), f"--{name.replace('_', '-')}")
                yield command.__name__, flag


@pytest.mark.parametrize(("command", "flag"), counts())
def test_an_enormous_count_is_one_line_or_without_effect(inputs, command, flag):
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        (where / "tmp").mkdir()
        said, before = [*words(command, inputs, where), f"{flag}={10**15}"], tree(inputs)
        left = tree(where)
        code = check(alone(said, where, lambda: little_memory(4 << 30)), where, {0, 2}, said)
        assert tree(inputs) == before and (code == 0 or tree(where) == left), " ".join(said)


def test_each_command_is_in_the_table():
    assert VALID.keys() == {command.__name__ for command in COMMANDS}


#: Not tried here: they take a minute, and have tests of their own.
LONG = {"quickstart", "parity", "doctor", "bench"}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place, marks=[] if place.command in {"inspect", "tokenize", "report"} else pytest.mark.slow
        )
        for place in places()
        if place.command not in LONG
    ],
    ids=str,
)
def test_each_way_of_calling_is_valid(inputs, place):
    """Else a command would be refused for another reason, and the table would prove nothing."""
    with tempfile.TemporaryDirectory(prefix="trilith-case-") as folder:
        where = Path(folder)
        (where / "tmp").mkdir()
        said = words(place.command, inputs, where, place)
        check(alone(said, where), where, {0}, said)
