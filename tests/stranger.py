"""Do what a stranger does, who has the wheel and has never seen the tree (`make stranger`, which builds it).

In an empty environment and a folder outside the checkout: install, quickstart, a text of one's own, training,
a report, a chat as JSONL, LoRA, generation, export, and transformers on what was exported. Every command is
typed as the pages type it; the first that fails ends the script, and a table says how long each took.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

#: Minutes that all of it may take on two cores.
LIMIT = 15
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A: {% generation %}"
    "{{ message['content'] }}\n{% endgeneration %}{% else %}Q: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
TEXT = "from pydoc_data.topics import topics; print(*topics.values(), sep='\\n\\n')"
RECIPE = """\
out = "own-run"
steps = 30
model = { init_from = "quickstart/hf" }
data = { tokens = "own", sequence_length = 96, global_batch = 16, micro_batch = 4 }
"""
LORA = """\
out = "chat-run"
steps = 20
model = { init_from = "own-hf" }
lora = { r = 4, lora_alpha = 8, target_modules = "all-linear" }
data = { tokens = "chat", sequence_length = 96, global_batch = 8, samples = "packed" }
optimizer = { lr = 1e-2 }
"""
IN_TRANSFORMERS = """\
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The value of", return_tensors="pt")["input_ids"]
    print(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0]))
"""


class Stranger:
    """Type commands in one folder with one environment, and note what each took."""

    def __init__(self, folder):
        self.folder, self.rows = folder, []
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

    def type(self, *words, into=None, says=""):
        """Run a command; ``into``: the file that gets its output; ``says``: what the output must hold."""
        began, computed = time.monotonic(), _computed()
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        line = " ".join(str(word).partition("\n")[0] for word in words)
        self.rows.append((time.monotonic() - began, _computed() - computed, line))
        if into is not None:
            (self.folder / into).write_text(done.stdout, encoding="utf-8")
        if done.returncode or says not in done.stdout:
            self.table()
            sys.exit(f"{done.stdout[-3000:]}\nexit code {done.returncode} of {line}")
        return done.stdout

    @property
    def seconds(self):
        """Return the seconds of all commands so far."""
        return sum(seconds for seconds, *_ in self.rows)

    def table(self):
        """Print what each command took, and how much of it a processor."""
        for seconds, computed, words in self.rows:
            print(f"{seconds:7.1f} s  {computed:6.1f} s of processor  {words[:100]}")
        computed = sum(computed for _, computed, _ in self.rows)
        print(f"{self.seconds:7.1f} s  {computed:6.1f} s of processor  in all", flush=True)


def _computed():
    """Return the seconds of processor time of all commands that have ended."""
    return sum(os.times()[2:4])


def walk(stranger, wheel):
    """Type everything."""
    folder, python = stranger.folder, stranger.bin / "python"
    stranger.type(python, "-m", "pip", "install", "-q", "torch==2.13.0")
    stranger.type(python, "-m", "pip", "install", "-q", wheel)
    stranger.type("trilith", "--version", says=wheel.name.split("-")[1])
    where = stranger.type(python, "-c", "import trilith; print(trilith.__file__)")
    assert where.startswith(str(folder)), f"the checkout was imported: {where}"
    stranger.type("trilith", "quickstart", says="equal, bit for bit")

    stranger.type(python, "-c", TEXT, into="own.txt")
    stranger.type(
        "trilith", "tokenize", "own.txt", "--tokenizer", "quickstart/hf", "--out", "own", "--split-paragraphs"
    )
    (folder / "own.toml").write_text(RECIPE)
    stranger.type("trilith", "train", "own.toml", "--dry-run")
    stranger.type("trilith", "train", "own.toml", says="next: trilith report own-run")
    stranger.type("trilith", "report", "own-run")
    assert (folder / "own-run" / "report.html").stat().st_size > 10_000
    stranger.type("trilith", "generate", "own-run", "--prompt", "The value of", "--max-new-tokens", "8")
    stranger.type("trilith", "convert", "own-run", "own-hf", "--to", "hf")

    names = ("list", "dict", "tuple", "set", "string", "number", "module", "class")
    chats = [
        {"messages": [{"role": "user", "content": f"What is a {name}?"},
                      {"role": "assistant", "content": f"A {name} is a type of Python."}]}
        for name in names * 12
    ]  # fmt: skip
    (folder / "chat.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    (folder / "chat.jinja").write_text(TEMPLATE)
    chat = ("--chat", "--chat-template", "chat.jinja", "--show", "1")
    shown = stranger.type(
        "trilith", "tokenize", "chat.jsonl", "--tokenizer", "own-hf", "--out", "chat", *chat
    )
    assert "[[" in shown, shown
    (folder / "lora.toml").write_text(LORA)
    stranger.type("trilith", "train", "lora.toml", says="merge-lora")
    stranger.type(
        "trilith", "generate", "own-hf", "--adapter", "chat-run", "--prompt", "Q: What is a list?\nA:"
    )
    stranger.type("trilith", "merge-lora", "own-hf", "chat-run", "merged")
    stranger.type("trilith", "verify", "merged")
    stranger.type("trilith", "parity", "merged", "--tensor", "2", says="the same")
    print(stranger.type(python, "-c", IN_TRANSFORMERS, "own-hf", "merged"))


def main():
    """Walk the whole way with a wheel; keep the folder if it fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=lambda text: Path(text).resolve(strict=True))
    wheel = parser.parse_args().wheel
    folder = Path(tempfile.mkdtemp(prefix="trilith-stranger-"))
    print(f"in {folder}", flush=True)
    stranger = Stranger(folder)
    walk(stranger, wheel)
    stranger.table()
    if (minutes := stranger.seconds / 60) > LIMIT:
        sys.exit(f"{minutes:.1f} minutes, more than {LIMIT}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
