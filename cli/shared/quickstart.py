"""Run the main job end to end on real text, from a bare machine; check each step and give a figure."""

import os
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...checkpoints import convert, load
from ...data.text.text_and_jsonl import paragraphs
from ...data.text.tokenizer_loading import load_tokenizer
from ...data.text.tokenizer_training import train_tokenizer
from ...data.token_writer import TokenWriter
from ...generation import generate
from ...layers import gather_logits
from ...parallel_state import PeerFailed, require
from ...runs.metrics import read_metrics
from ...storage.output_places import check_place
from ...system import counted
from .model_card import CARD


def standard_library(limit: int) -> Iterator[str]:
    """Yield the standard library's modules as texts, sorted by name, up to ``limit`` characters in all."""
    root = Path(sysconfig.get_path("stdlib"))
    left = limit
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if left <= 0:
            return
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")[:left]
        except (OSError, UnicodeDecodeError):
            continue
        left -= len(text)
        if text:
            yield text
    require(left != limit, root, None, "the sources of Python's standard library", "no readable .py file")


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


@dataclass(frozen=True, slots=True)
class Check:
    """Hold one row of the table: what was checked, the figure, its goal, whether it was reached."""

    what: str
    figure: str
    goal: str
    passed: bool


class Quickstart:
    """Write everything below ``out``, which must be new or empty; ``say`` gets a line a step."""

    def __init__(self, out: Path, say: Callable[[str], None]) -> None:
        check_place(out)
        fits = not out.exists() or not any(out.iterdir())
        require(fits, out, None, "a new or an empty folder", "files in it", "Give another --out")
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.say = out, say
        self.checks: list[Check] = []
        self.tokenizer, self.tokens, self.recipe = out / "tokenizer", out / "tokens", out / "recipe.toml"
        self.texts = list(standard_library(CHARACTERS))
        self.parts = [part for text in self.texts for part in paragraphs(text)]

    def run(self) -> list[Check]:
        began = time.monotonic()
        self.prepare()
        self.compare_tokenizers()
        self.train_three_times()
        self.export()
        self.compare_with_transformers()
        self.trilith("report", self.out / "run", self.out / "alone", "--out", self.out / "report.html")
        self.say(f"done in {time.monotonic() - began:.0f} s")
        return self.checks

    def check(self, what: str, figure: str, goal: str, passed: bool) -> None:
        self.checks.append(Check(what, figure, goal, passed))

    def prepare(self) -> None:
        self.say("Training a SentencePiece tokenizer on Python's standard library")
        train_tokenizer(self.parts, self.tokenizer, vocab_size=VOCABULARY)
        tokenizer = load_tokenizer(self.tokenizer)
        with TokenWriter(
            self.tokens,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
        ) as writer:
            for text in self.texts:
                writer.add([*tokenizer.encode(text), tokenizer.eos_id or 0])
            file = writer.commit()
        self.recipe.write_text(
            RECIPE.format(out=self.out / "run", tokenizer=self.tokenizer, tokens=self.tokens),
            encoding="utf-8",
        )
        need = 2 * 16 * LENGTH
        self.check("tokens of real text", f"{len(file.tokens):,}", f">= {need:,}", len(file.tokens) >= need)

    def compare_tokenizers(self) -> None:
        """Check that AutoTokenizer and SentencePiece give the same ids."""
        auto = load_tokenizer(self.tokenizer)
        sentencepiece = load_tokenizer(self.tokenizer / "tokenizer.model")
        sample = self.parts[:: max(1, len(self.parts) // 500)][:500]
        differ = sum(auto.encode(part) != sentencepiece.encode(part) for part in sample)
        wrong = sum(auto.decode(auto.encode(part)) != part for part in sample)
        self.check(
            f"AutoTokenizer and SentencePiece on {len(sample)} paragraphs",
            f"{differ} differ, {wrong} do not decode to themselves",
            "0, 0",
            not differ and not wrong and len(sample) == 500,
        )

    def train_three_times(self) -> None:
        half = STEPS // 2
        self.say(f"Pretraining at tensor 2 x pipeline 2 (4 processes), up to step {half}")
        self.trilith("train", self.recipe, "layout.tensor=2", "layout.pipeline=2", f"stop_after={half}")
        self.say("Resuming at tensor 1 x data 2 with ZeRO-1 (2 processes)")
        self.trilith("train", self.recipe, "layout.data=2", "layout.zero=1")
        self.say("The same run in one process, uninterrupted")
        self.trilith("train", self.recipe, f"out={self.out / 'alone'}")
        ours, alone = (read_metrics(self.out / name / "metrics.jsonl") for name in ("run", "alone"))
        worst = max(
            (abs(a["loss"] - b["loss"]) for a, b in zip(ours, alone, strict=False)), default=float("nan")
        )
        complete = len(ours) == len(alone) == STEPS
        self.check(
            "curve: 4 processes, stopped, resumed on 2, against 1 process",
            f"{worst:.1e} apart over {counted(len(ours), 'step')}",
            "<= 1e-8",
            complete and worst <= 1e-8,
        )
        if ours:
            first, last = ours[0]["loss"], ours[-1]["loss"]
            self.check("loss falls", f"{first:.2f} -> {last:.2f}", "by >= 1.5", last < first - 1.5)

    def export(self) -> None:
        self.say("Exporting to Hugging Face")
        self.trilith("convert", self.out / "run", self.out / "hf", "--to", "hf", "--dtype", "float32")
        self.say("The same weights cut for tensor 2 x pipeline 2, and back")
        convert(self.out / "hf", self.out / "sharded", tensor=2, pipeline=2)
        convert(self.out / "sharded", self.out / "hf-again")
        same = all(
            (self.out / "hf-again" / path.name).read_bytes() == path.read_bytes()
            for path in (self.out / "hf").iterdir()
            if path.name != CARD  # which says where the weights are from
        )
        self.check("HF -> sharded -> HF", "same bytes" if same else "other bytes", "same bytes", same)

    def compare_with_transformers(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.say("Loading the export in transformers")
        hf_model: Any = AutoModelForCausalLM.from_pretrained(self.out / "hf", dtype=torch.float32)
        model = load(self.out / "hf").model
        tokenizer = load_tokenizer(self.out / "hf")
        ids = torch.tensor([tokenizer.encode(self.texts[0])[:LENGTH]])
        with torch.no_grad():
            gap = float((hf_model(ids).logits - gather_logits(model(ids), VOCABULARY)).abs().max())
        self.check("logits against transformers", f"{gap:.1e}", "<= 1e-4", gap <= 1e-4)
        prompt = "def main():\n"
        start = tokenizer.encode(prompt)
        tokens = start + generate(model, [start], max_new_tokens=48)[0]
        prompt_ids = torch.tensor([start])
        hf_tokens = hf_model.generate(prompt_ids, max_new_tokens=48, do_sample=False, eos_token_id=None)
        same = tokens == hf_tokens[0].tolist()
        self.check("48 tokens generated by both", "the same" if same else "others", "the same", same)
        self.say(f"A model of 0.6 M parameters after {STEPS} steps writes:\n{tokenizer.decode(tokens)}")

    def trilith(self, *arguments: object) -> None:
        words = [str(argument) for argument in arguments]
        self.say(f"  $ trilith {shlex.join(words)}")
        launched = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
        environment = {name: value for name, value in os.environ.items() if name not in launched}
        environment.setdefault("OMP_NUM_THREADS", "1")  # so small a model is no faster with more
        hidden = ["--no-next"] * (words[0] == "train")  # what is next, the quickstart itself does
        done = subprocess.run(
            [sys.executable, "-m", "trilith.cli", *words, *hidden], env=environment, check=False
        )
        if done.returncode:
            raise PeerFailed(f"`trilith {' '.join(words)}` ended with exit code {done.returncode}")
