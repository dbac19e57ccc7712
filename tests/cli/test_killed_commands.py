"""Commands that write, killed at random moments; some start twice at once on one output.

A start counts its calls of the file system. At one of them, drawn at random, it tells the test and pauses;
the test ends it with SIGKILL or SIGTERM after a random time, shorter or longer than the pause. So kills fall
on reading, writing, commit and clean-up alike, however fast or loaded the machine is. Each start is a fork of
this warm process.
"""

import faulthandler
import itertools
import os
import select
import signal
import sys
import time
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from typing import get_type_hints

import pytest
from support.configs import TINY_LLAMA
from support.folders import contents
from support.forked_launch import Forked
from support.inputs import write_adapter, write_line_of_metrics
from support.kills import Campaign, below, wait_for
from support.short_runs import run_recipe, tiny_recipe
from support.token_files import TURNS, write_json_lines
from trilith.checkpoints import convert
from trilith.cli.app import COMMANDS, run
from trilith.data import token_writer
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.testing import run_parallel

#: Seconds of a pause; and those after which a start counts as hanging, on a machine that others use: one that
#: has workers of its own imports torch.
PAUSE, HANGS = 0.05, 300.0


EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "os.scandir"}
CALLS = ("fsync", "write", "pwrite", "pread", "preadv")
CONFIG = {**TINY_LLAMA, "vocab_size": 320}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
TOKENIZE = ["tokenize", "--quiet", "--tokenizer", "tokenizer", "--out", "{out}"]
#: The commands, below the folder of inputs, and the file without which the output counts as absent.
WORK = {
    "to sharded": (["convert", "hf", "{out}", "--tensor", "2", "--pipeline", "3"], "out"),
    "to hf": (["convert", "sharded", "{out}", "--to", "hf"], "out"),
    "to peft": (["convert", "lora-run", "{out}", "--to", "peft"], "out"),
    "reshard": (["convert", "run", "{out}", "--to", "sharded", "--tensor", "4"], "out"),
    "merge-lora": (["merge-lora", "hf", "adapter", "{out}"], "out"),
    "tokenize": ([*TOKENIZE, "a.txt", "--split-paragraphs", "--workers", "2"], "out.json"),
    "tokenize chat": ([*TOKENIZE, "chat.jsonl", "--chat", "--workers", "1"], "out.json"),
    "train-tokenizer": (["train-tokenizer", "a.txt", "--vocab-size", "300", "--out", "{out}"], "out"),
    "report": (["report", "run", "--out", "{out}"], "out"),
}
#: Commands that write and are not killed here, and why.
ELSEWHERE = {
    "quickstart": "trains; tests/training/test_kill_campaign.py kills training",
    "recipe": "writes one file, as report does",
    "new": "writes one file, as report does",
    "schedule": "writes one file, as report does",
    "generate": "writes one file, as report does",
    "bench": "writes two files, each as report does",
    "launch": "writes one file, as report does",
}


def test_every_command_that_writes_is_killed_here_or_says_where():
    writing = {c.__name__ for c in COMMANDS if {"out", "dst"} & {*get_type_hints(c)}}
    killed = {words[0].replace("-", "_") for words, _ in WORK.values()}
    assert killed | {*ELSEWHERE} == writing and not killed & {*ELSEWHERE}


def make_inputs(root):
    write_hf_folder(root / "hf", CONFIG)
    convert(root / "hf", root / "sharded", tensor=2, pipeline=2)
    tokens = write_tokens(root / "tokens")
    run_parallel(run_recipe, 2, tiny_recipe(root / "run", tokens, steps=1, layout={"data": 2, "zero": 1}))
    lora = {"model": {"init_from": str(root / "hf")}, "lora": LORA, "dtype": "float32"}
    raw = tiny_recipe(root / "lora-run", tokens, steps=1)
    run_parallel(run_recipe, 1, {**raw, **lora})
    write_line_of_metrics(root / "run")
    write_adapter(root / "adapter", root / "hf")
    texts = [f"number {i} of many words" for i in range(300)]
    (root / "a.txt").write_text("\n\n".join(texts))
    train_tokenizer(texts, root / "tokenizer", vocab_size=300)
    (root / "tokenizer" / "chat_template.jinja").write_text(TURNS)
    talks = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in texts]
    write_json_lines(root / "chat.jsonl", [{"messages": talk} for talk in talks])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The folder of inputs, which is the working directory; and a mark for each of many blocks of text."""
    root = tmp_path_factory.mktemp("inputs")
    make_inputs(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setattr(token_writer, "MARK_EVERY", 0.0)
        patch.setitem(read_blocks.__kwdefaults__, "size", 1000)
        yield root


class Start:
    """Run a command in a fork of this process, and pause it at the call ``at`` of the file system."""

    def __init__(self, words, said, at):
        self.said = said
        self._pipe, theirs = os.pipe()

        def main(words):
            sys.stdout = sys.stderr = os.fdopen(2, "w", 1)  # not pytest's
            faulthandler.enable(sys.stderr)  # a crash says where
            # Let multiprocessing start servers of its own in a fork of a process that has them.
            server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
            server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
            tracker._fd = tracker._pid = None
            watch_calls(theirs, at)
            code = run(words)
            sys.stderr.flush()
            sys.exit(code)

        with said.open("w") as out:
            self._process = Forked(main, words, os.environ.copy(), stdout=out, stderr=out, keep=[theirs])
        self.pid = self._process.pid
        os.close(theirs)

    def came(self):
        """Wait for the pause; false if the process ended without one."""
        assert select.select([self._pipe], [], [], HANGS)[0], "it hangs"
        return os.read(self._pipe, 1) != b""

    def end(self):
        """Wait for its end; the exit code, negative for a signal."""
        self.calls = 0
        while True:
            assert select.select([self._pipe], [], [], HANGS)[0], "it hangs"
            if not (read := os.read(self._pipe, 1 << 16)):
                break
            self.calls += len(read)
        os.close(self._pipe)
        return self._process.wait()


def watch_calls(pipe, at):
    """Announce the call ``at``, 1 for the first, and pause there; with 0 announce all and never pause."""
    announce, numbers = os.write, itertools.count(1)

    def meet():
        if (number := next(numbers)) == at or not at:
            announce(pipe, b".")
            time.sleep(PAUSE if number == at else 0)

    def hook(event, arguments):
        if event in EVENTS and "/site-packages/" not in str(arguments[0]):
            meet()

    def met(call):
        def wrapped(*arguments):
            meet()
            return call(*arguments)

        return wrapped

    for name in CALLS:
        setattr(os, name, met(getattr(os, name)))
    sys.addaudithook(hook)


def state(home):
    return contents(home), sorted(home.rglob("*"))


class Commands(Campaign):
    """Kill one command after another, and check the rules after each kill."""

    def __init__(self, inputs, folder, seed):
        super().__init__(seed)
        self.inputs, self.folder = inputs, folder
        self.before = contents(inputs)
        self.whole = {}
        self.calls = {}
        self.count = Counter()
        self.homes = 0

    def learn(self, name):
        """Start the command undisturbed; note its output and its number of calls."""
        home = self.folder / f"whole {name}"
        home.mkdir()
        start = self._start(name, home, 0)
        assert start.end() == 0, start.said.read_text()
        self.whole[name], self.calls[name] = contents(home), start.calls
        if name in ("to sharded", "to hf", "reshard", "merge-lora"):
            assert run(["verify", str(home / "out")]) == 0
        self.already = below(os.getpid())  # the server that workers are forks of among them

    def kill_until_through(self, name):
        """Kill starts on one output, one after another, then let a start finish."""
        if name not in self.whole:
            self.learn(name)
        self.homes += 1
        home = self.folder / f"{self.homes} {name}"
        home.mkdir()
        while True:
            self._kill_one(name, home)
            if self._committed(name, home) or self.random.random() < 0.5:
                break
        there = self._committed(name, home)
        start = self._start(name, home, 0)
        self._check_code(name, start, start.end(), refused=there)
        left = {path for path in contents(home) if path not in self.whole[name]}
        assert not left and contents(home) == self.whole[name], (name, left)
        assert {path.name for path in home.iterdir()} == {path.split("/")[0] for path in self.whole[name]}

    def _kill_one(self, name, home):
        """Start one command, or two that race, and kill at a random moment; some races go undisturbed."""
        random, seen = self.random, state(home)
        racing, worker = random.random() < 0.25, random.random() < 0.4
        disturbed = not racing or random.random() < 0.6
        starts = [self._start(name, home, random.randint(1, self.calls[name])) for _ in range(1 + racing)]
        victim = random.choice(starts)
        disturbed = victim.came() and disturbed
        others = below(os.getpid()) - self.already - {one.pid for one in starts}
        hit = random.choice([*others]) if worker and others else victim.pid
        if disturbed:
            time.sleep(random.random() * 1.3 * PAUSE)
            self.kill([hit], random.choice((signal.SIGKILL, signal.SIGTERM)))
        codes = [start.end() for start in starts]
        self.count["races"] += racing
        killed = bool({-signal.SIGKILL, -signal.SIGTERM, 3} & {*codes})
        assert disturbed or not killed, [start.said.read_text() for start in starts]
        for start, code in zip(starts, codes, strict=True):
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 3):
                self._check_code(name, start, code, refused=None if racing else False)
        assert killed or 0 in codes, [start.said.read_text() for start in starts]
        if not killed:
            when = "not killed"
        elif self._committed(name, home):
            when = "after"
        else:
            when = "before" if state(home) == seen else "during"
        self.count["kills"] += killed
        self.count[f"{when}{', a worker' if 3 in codes else ''}"] += 1
        assert contents(self.inputs) == self.before, (name, "inputs")
        wait_for(lambda: not below(os.getpid()) - self.already, HANGS, f"{name}: all processes had ended")

    def _start(self, name, home, at):
        words = [word.replace("{out}", str(home / "out")) for word in WORK[name][0]]
        self.count["starts"] += 1
        return Start(words, self.folder / f"said-{self.count['starts']}", at)

    def _check_code(self, name, start, code, *, refused):
        said = start.said.read_text()
        wanted = {True: {2}, False: {0}, None: {0, 2}}[refused]
        assert code in ({0} if name == "report" else wanted), (name, code, said)
        assert code == 0 or (said.startswith("error: ") and said.count("\n") == 1), (name, said)

    def _committed(self, name, home):
        """Return whether the output exists; if so, check that it equals an undisturbed command's output."""
        if not (home / WORK[name][1]).exists():
            return False
        found = contents(home)
        assert {path: found.get(path) for path in self.whole[name]} == self.whole[name], name
        return True


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "seed"), [(2, 0), *(pytest.param(50, seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_a_killed_command_leaves_its_output_absent_or_whole_and_the_next_start_leaves_nothing_else(
    inputs, tmp_path, kills, seed
):
    campaign, names = Commands(inputs, tmp_path, seed), [*WORK]
    campaign.random.shuffle(names)
    while campaign.count["kills"] < kills:
        campaign.kill_until_through(names[campaign.homes % len(names)])
    print(dict(campaign.count), campaign.calls)
