"""``trilith quickstart``."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ..system import counted, require
from ..system.errors import PeerFailed
from .shared.say import say_next, table


def quickstart(
    *,
    out: Annotated[Path, "new or empty folder for all files that the quickstart makes"] = Path("quickstart"),
) -> None:
    """Show in two minutes that a small model trains the same in two layouts.

    The quickstart works offline on a laptop CPU. Its text is the source code of Python's standard library. It
    trains a tokenizer and pretrains a small Llama on 4 processes, stops, resumes on 2 processes, compares the
    curve with a run on one process, exports to Hugging Face, and compares the export with transformers. It
    prints a table of checks and exits with code 1 if a check fails. OUT/report.html shows the curves.

    Examples:

        trilith quickstart
        trilith quickstart --out first-try
    """
    from rich.text import Text

    from ..runs.terminal import plain_console

    console = plain_console()
    checks = Quickstart(out, lambda text: console.print(text, soft_wrap=True)).run()
    failed = Text("FAILED", "red")
    rows = [(check.what, check.figure, check.goal, "ok" if check.passed else failed) for check in checks]
    console.print(table("What was checked", ("check", "figure", "goal", ""), rows))
    console.print(f"curves: {out / 'report.html'}   model: {out / 'hf'}   run: {out / 'run'}")
    say_next(
        ["report", out / "run"],
        ["generate", out / "hf", "--prompt", "def main():"],
        ["train", out / "recipe.toml", f"out={out / 'longer'}", "steps=1000"],
    )
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def standard_library(limit: int) -> Iterator[str]:
    """Yield the standard library's modules as texts, sorted by name, up to ``limit`` characters in all."""
    root = Path(sysconfig.get_path("stdlib"))
    room = limit
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if room <= 0:
            return
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")[:room]
        except (OSError, UnicodeDecodeError):
            continue
        room -= len(text)
        if text:
            yield text
    require(room != limit, root, None, "the sources of Python's standard library", "no readable .py file")


VOCABULARY, LENGTH, STEPS = 2000, 96, 100
CHARACTERS = 1_500_000

RECIPE = f"""\
# A small Llama on Python's standard library. Every number can be changed on the command line:
#     trilith train recipe.toml layout.tensor=2 layout.pipeline=2
out = "{{out}}"
steps = {STEPS}
seed = 1
device = "cpu"       # leave it out to use GPUs where there are any
dtype = "float64"    # so that layouts can be compared to the last digits; leave it out for float32

[model]
tokenizer = "{{tokenizer}}"
config = {{{{ model_type = "llama", vocab_size = {VOCABULARY}, hidden_size = 96, intermediate_size = 256, \
num_hidden_layers = 4, num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 512, \
tie_word_embeddings = true, bos_token_id = 1, eos_token_id = 2 }}}}

[data]
tokens = "{{tokens}}"
sequence_length = {LENGTH}
global_batch = 16
micro_batch = 4

[optimizer]
lr = 3e-3
warmup = 10
"""


class Check(NamedTuple):
    """Hold one row of the table: what was checked, the figure, its goal, whether it was reached."""

    what: str
    figure: str
    goal: str
    passed: bool


class Quickstart:
    """Write everything below ``out``, which must be new or empty; ``say`` gets a line a step."""

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        from ..storage.output_places import check_place

        check_place(out)
        fits = not out.exists() or not any(out.iterdir())
        require(fits, out, None, "a new or an empty folder", "files in it", "Give another --out")
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.say = out, say
        self.checks: list[Check] = []

    def run(self) -> list[Check]:
        began = time.monotonic()
        self.prepare()
        self.train_three_times()
        self.export()
        self.trilith("report", self.out / "run", self.out / "alone", "--out", self.out / "report.html")
        self.say(f"done in {time.monotonic() - began:.0f} s")
        return self.checks

    def check(self, what: str, figure: str, goal: str, passed: bool) -> None:
        self.checks.append(Check(what, figure, goal, passed))

    def prepare(self) -> None:
        from ..storage.disk import Disk

        self.say("Training a SentencePiece tokenizer on Python's standard library")
        corpus, tokenizer, tokens = (self.out / name for name in ("corpus.jsonl", "tokenizer", "tokens"))
        lines = (f"{json.dumps({'text': text})}\n" for text in standard_library(CHARACTERS))
        Disk().write_file(corpus, "".join(lines).encode())  # which is named where the disk is full
        self.trilith("train-tokenizer", corpus, "--vocab-size", VOCABULARY, "--out", tokenizer)
        self.trilith("tokenize", corpus, "--tokenizer", tokenizer, "--out", tokens)
        recipe = RECIPE.format(out=self.out / "run", tokenizer=tokenizer, tokens=tokens)
        (self.out / "recipe.toml").write_text(recipe, encoding="utf-8")

    def train_three_times(self) -> None:
        from ..runs.metrics import read_metrics

        half, recipe = STEPS // 2, self.out / "recipe.toml"
        self.say(f"Pretraining at tensor 2 x pipeline 2 (4 processes), up to step {half}")
        self.trilith("train", recipe, "layout.tensor=2", "layout.pipeline=2", f"stop_after={half}")
        self.say("Resuming at tensor 1 x data 2 with ZeRO-1 (2 processes)")
        self.trilith("train", recipe, "layout.data=2", "layout.zero=1")
        self.say("The same run in one process, uninterrupted")
        self.trilith("train", recipe, f"out={self.out / 'alone'}")
        in_layout, alone = (read_metrics(self.out / name / "metrics.jsonl") for name in ("run", "alone"))
        worst = max(
            (abs(a["loss"] - b["loss"]) for a, b in zip(in_layout, alone, strict=False)), default=float("nan")
        )
        complete = len(in_layout) == len(alone) == STEPS
        self.check(
            "curve: 4 processes, stopped, resumed on 2, against 1 process",
            f"{worst:.1e} apart over {counted(len(in_layout), 'step')}",
            "<= 1e-8",
            complete and worst <= 1e-8,
        )
        if in_layout:
            first, last = in_layout[0]["loss"], in_layout[-1]["loss"]
            self.check("loss falls", f"{first:.2f} -> {last:.2f}", "by >= 1.5", last < first - 1.5)

    def export(self) -> None:
        hf, sharded, again = (self.out / name for name in ("hf", "sharded", "hf-again"))
        self.say("Exporting to Hugging Face")
        self.trilith("convert", self.out / "run", hf, "--to", "hf", "--dtype", "float32")
        self.say("The same weights cut for tensor 2 x pipeline 2, and back")
        self.trilith("convert", hf, sharded, "--tensor", 2, "--pipeline", 2)
        self.trilith("convert", sharded, again)
        same = self.trilith("diff", hf, again)
        self.check("HF -> sharded -> HF", "equal" if same else "differs", "equal, bit for bit", same)
        self.say("Comparing the export with transformers, module by module")
        same = self.trilith("parity", hf)
        self.check("export against transformers", "the same" if same else "differs", "the same", same)
        self.say(f"A model of 0.6 M parameters after {STEPS} steps writes:")
        self.trilith("generate", hf, "--prompt", "def main():")

    def trilith(self, *arguments: object) -> bool:
        """Run a command; tell whether a comparison found no difference. ``PeerFailed`` where it fails."""
        words = [str(argument) for argument in arguments]
        self.say(f"  $ trilith {shlex.join(words)}")
        launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        environment = {name: value for name, value in os.environ.items() if name not in launched}
        environment.setdefault("OMP_NUM_THREADS", "1")  # so small a model is no faster with more
        hidden = ["--no-next"] * (words[0] == "train")  # what is next, the quickstart itself does
        process = subprocess.run(
            [sys.executable, "-m", "trilith.cli", *words, *hidden], env=environment, check=False
        )
        if process.returncode and (process.returncode, words[0]) not in ((1, "diff"), (1, "parity")):
            raise PeerFailed(f"`trilith {' '.join(words)}` ended with exit code {process.returncode}")
        return process.returncode == 0
