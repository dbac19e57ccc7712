"""Commands that write, killed at random moments; some start twice at once on one output.

SIGKILL or SIGTERM comes at a random moment of the time that an undisturbed start took, or shortly after it.
Each start is a fork of this warm process.
"""

import os
import signal
import sys
import time
from collections import Counter
from multiprocessing import forkserver

import pytest
from support.command_lines import make_inputs
from support.folders import contents
from support.forked_launch import Forked
from support.kills import Campaign, below, wait_for
from support.short_runs import tiny_recipe, train
from support.token_files import write_json_lines
from trilith.cli.app import run
from trilith.data import token_writer
from trilith.data.text.text_and_jsonl import read_blocks

#: Seconds after which a start counts as hanging, on a machine that others use.
HANGS = 300.0
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
TOKENIZE = ["tokenize", "--quiet", "--tokenizer", "templated", "--out", "{out}"]
#: The commands, below the folder of inputs, and the file without which the output counts as absent. Others
#: that write one file do so as ``report`` does.
WORK = {
    "to sharded": (["convert", "hf", "{out}", "--tensor", "2", "--pipeline", "3"], "out"),
    "to hf": (["convert", "sharded", "{out}", "--to", "hf"], "out"),
    "to peft": (["convert", "lora-run", "{out}", "--to", "peft"], "out"),
    "reshard": (["convert", "trained", "{out}", "--to", "sharded", "--tensor", "4"], "out"),
    "merge-lora": (["merge-lora", "hf", "adapter", "{out}"], "out"),
    "tokenize": ([*TOKENIZE, "a.txt", "--split-paragraphs", "--workers", "2"], "out.json"),
    "tokenize chat": ([*TOKENIZE, "chats.jsonl", "--chat", "--workers", "1"], "out.json"),
    "train-tokenizer": (["train-tokenizer", "a.txt", "--vocab-size", "300", "--out", "{out}"], "out"),
    "report": (["report", "run", "--out", "{out}"], "out"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The folder of inputs, which is the working directory; and a mark for each of many blocks of text."""
    root = tmp_path_factory.mktemp("inputs")
    make_inputs(root)
    train(tiny_recipe(root / "trained", root / "tokens", steps=1, layout={"data": 2, "zero": 1}))
    lora = {"model": {"config": None, "init_from": str(root / "hf")}, "lora": LORA, "dtype": "float32"}
    train(tiny_recipe(root / "lora-run", root / "tokens", steps=1, **lora))
    texts = [f"number {i} of many words" for i in range(300)]
    (root / "a.txt").write_text("\n\n".join(texts))
    talks = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in texts]
    write_json_lines(root / "chats.jsonl", [{"messages": talk} for talk in talks])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setattr(token_writer, "MARK_EVERY", 0.0)
        patch.setitem(read_blocks.__kwdefaults__, "size", 1000)
        yield root


def command(words):
    """Run a command line in a fork, whose words go where its standard error goes."""
    sys.stdout = sys.stderr = os.fdopen(2, "w", 1)  # not pytest's
    server = forkserver._forkserver  # a fork starts one of its own
    server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
    code = run(words)
    sys.stderr.flush()
    sys.exit(code)


def state(home):
    return contents(home), sorted(home.rglob("*"))


class Commands(Campaign):
    """Kill one command after another, and check the rules after each kill."""

    def __init__(self, inputs, folder, seed):
        super().__init__(seed)
        self.inputs, self.folder = inputs, folder
        self.before = contents(inputs)
        self.whole = {}
        self.seconds = {}
        self.count = Counter()
        self.homes = 0

    def learn(self, name):
        """Start the command undisturbed; note its output and how long it takes."""
        home, began = self.folder / f"whole {name}", time.monotonic()
        home.mkdir()
        start, said = self._start(name, home)
        assert self._end(start, said) == 0, said.read_text()
        self.whole[name], self.seconds[name] = contents(home), time.monotonic() - began
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
        start, said = self._start(name, home)
        self._check_code(name, said, self._end(start, said), refused=there)
        left = {path for path in contents(home) if path not in self.whole[name]}
        assert not left and contents(home) == self.whole[name], (name, left)
        assert {path.name for path in home.iterdir()} == {path.split("/")[0] for path in self.whole[name]}

    def _kill_one(self, name, home):
        """Start one command, or two that race, and kill at a random moment; some races go undisturbed."""
        random, seen = self.random, state(home)
        racing, worker = random.random() < 0.25, random.random() < 0.4
        disturbed = not racing or random.random() < 0.6
        starts = [self._start(name, home) for _ in range(1 + racing)]
        if disturbed:
            time.sleep(random.random() * 1.1 * self.seconds[name])
            others = below(os.getpid()) - self.already - {start.pid for start, _ in starts}
            hit = random.choice([*others]) if worker and others else random.choice(starts)[0].pid
            self.kill([hit], random.choice((signal.SIGKILL, signal.SIGTERM)))
        ends = [(said, self._end(start, said)) for start, said in starts]
        codes = {code for _, code in ends}
        self.count["races"] += racing
        killed = bool({-signal.SIGKILL, -signal.SIGTERM, 3} & codes)
        for said, code in ends:
            assert disturbed or not killed, said.read_text()
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 3):
                self._check_code(name, said, code, refused=None if racing else False)
        assert killed or 0 in codes, ends
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

    def _start(self, name, home):
        """Start the command; return the process, and the file of what it says."""
        words = [word.replace("{out}", str(home / "out")) for word in WORK[name][0]]
        self.count["starts"] += 1
        said = self.folder / f"said-{self.count['starts']}"
        with said.open("w") as stderr:
            return Forked(command, words, os.environ.copy(), stderr=stderr, keep=range(3, 4096)), said

    def _end(self, start, said):
        """Wait for its end; return the exit code, negative for a signal."""
        wait_for(lambda: start.poll() is not None, HANGS, f"the end of a command: {said.read_text()}")
        return start.returncode

    def _check_code(self, name, said, code, *, refused):
        wanted, told = {True: {2}, False: {0}, None: {0, 2}}[refused], said.read_text()
        assert code in ({0} if name == "report" else wanted), (name, code, told)
        assert code == 0 or (told.startswith("error: ") and told.count("\n") == 1), (name, told)

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
    print(dict(campaign.count), campaign.seconds)
