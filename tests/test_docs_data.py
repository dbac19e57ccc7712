"""Check that docs/data.md works: run its commands, in its order, with the files that it shows."""

import re
import shlex
from pathlib import Path

from trilith.cli.app import run
from trilith.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def block(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return str(found)


def test_the_commands_of_the_page_on_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8") + TEXT, encoding="utf-8")
    for name, language in (("chat.jsonl", "jsonl"), ("chat.jinja", "jinja"), ("recipe.toml", "toml")):
        Path(name).write_text(block(language), encoding="utf-8")
    shown = re.findall(r"^trilith (.*)$", "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)), re.M)
    assert len(shown) == 6
    for words in shown:
        assert run(shlex.split(words)) == 0, words
    said = capsys.readouterr().out
    assert "[[ColumnParallelLinear.</s>]]" in said and "1 samples left out" in said
    assert len(read_metrics(Path("run") / "metrics.jsonl")) == 4
