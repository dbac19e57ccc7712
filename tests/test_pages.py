"""The pages of the documentation: what they name exists, and what they show runs.

README.md, docs/fine_tuning.md, docs/your_model.md and the tutorials promise runs and numbers, and have files
of their own; test_site.py is about the site.
"""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import trilith
from commands_page import reference as reference_of_commands
from recipe_page import SECTIONS, with_tables
from support.configs import TINY_LLAMA, TINY_MIXTRAL
from support.families import transformers_model
from support.models_page import COLUMNS, NOT_MEASURED, cells_of, page
from support.pages import (
    ROOT,
    Page,
    broken_links,
    inner_imports,
    missing_files,
    pages,
    refused_commands,
    unknown_keys,
    wrong_programs,
)
from support.short_runs import run_recipe, tiny_recipe, write_recipe
from trilith.checkpoints import Manifest, convert
from trilith.cli.app import COMMANDS, run
from trilith.cli.shared.options import FORMER_COMMANDS
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.layers import routers
from trilith.machine.random_files import write_tokens
from trilith.models import FAMILIES, LoraConfig, adapted
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.training.run_plan import plan

PAGES = pages()
RECIPE = Page.read("docs/recipe.md").text
#: Pages whose Python is no program by itself, and what says that it is right.
OTHER_PYTHON = {
    "docs/clusters.md": "needs a cluster, or Ray",
    "docs/chat_model.md": "test_tutorials.py",
    "docs/fine_tuning.md": "test_fine_tuning_doc.py",
    "docs/nanogpt.md": "test_tutorials.py",
    "docs/new_family.md": "a piece of models/stablelm.py",
    "docs/training.md": "test_training_from_python_works_as_shown",
    "docs/watching.md": "needs an account with a tracker",
    "docs/your_model.md": "test_own_models.py",
}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_names_nothing_that_does_not_exist(page):
    checks = [broken_links, refused_commands, unknown_keys, missing_files, inner_imports, wrong_programs]
    assert [found for check in checks for found in check(page)] == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (broken_links, "see [this](no_such_page.md)"),
        (broken_links, "see [this](training.md#no-such-heading)"),
        (refused_commands, "`trilith convert --no-such`"),
        (refused_commands, "`reshard` cuts it"),
        (unknown_keys, "```toml\n[layout]\ntensors = 2\n```"),
        (unknown_keys, "say `layout.tensors`"),
        (unknown_keys, "`trilith train recipe.toml debug.collective=true`"),
        (unknown_keys, "say `computed = float8`"),
        (missing_files, "see `models/no_such.py`"),
        (missing_files, "see `tests/test_pages.py::test_no_such`"),
        (inner_imports, "```python\nfrom trilith.layers.linear import Linear\n```"),
        (refused_commands, "```bash\npip install -e . && trilith quikstart\n```"),
        (wrong_programs, "```bash\npip install -e '.[dta]'\n```"),
        (wrong_programs, "```bash\npip install trilith\n```"),
        (wrong_programs, "```bash\nmake no-such\n```"),
        (wrong_programs, "```bash\npip install -e . && pytest tests/no_such.py\n```"),
        (wrong_programs, "```bash\npython examples/no_such.py prove\n```"),
        (wrong_programs, "```bash\ntorchrun --nproc-per-node 2 no_such.py\n```"),
        (wrong_programs, "```bash\ntrillith train recipe.toml\n```"),
    ],
)
def test_a_mistake_on_a_page_is_found(check, text):
    assert len(check(Page("docs/page.md", text))) == 1


def test_examples_import_from_doors():
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    assert texts and not [
        inner for text in texts for inner in inner_imports(Page("", f"```python\n{text}\n```"))
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.has("python") and page.path not in OTHER_PYTHON], ids=str
)
def test_python_on_a_page_runs(page):
    page.run_python()


def test_the_class_on_the_page_of_new_families_is_the_family_s():
    page, file = Page.read("docs/new_family.md"), ROOT / "models" / "stablelm.py"
    assert all(code in file.read_text() for code in page.blocks("python"))
    assert len(file.read_text().splitlines()) <= 90
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "models").glob("test_*.py"))
    named = re.findall(r"^\| `([a-z_0-9]+)[.`]", page.text, re.MULTILINE)
    assert named and not [name for name in named if f"def test_{name.rstrip('_')}" not in tests]


def test_the_changelog_has_the_version_in_at_most_120_lines_below_what_comes_next():
    headings = [*re.finditer(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert headings[0][1] == "Unreleased" and headings[1][1].startswith(f"{version} - ")
    text = (ROOT / "CHANGELOG.md").read_text()
    ends = [heading.start() for heading in headings[2:]] + [len(text)]
    assert text[headings[1].start() : ends[0]].count("\n") <= 120


def test_the_version_is_written_in_one_place():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pages = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/install.md")
    for name in ("CITATION.cff", "__init__.py", *pages):
        written = rf"version: {version}|trilith[ =]+{re.escape(version)}"
        assert not re.search(written, (ROOT / name).read_text()), name


def test_every_key_of_a_manifest_is_in_the_table():
    rows = Page.read("docs/checkpoints.md").rows("`manifest.json`")
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row[0])}
    stated = {field.alias or name for name, field in Manifest.model_fields.items()}
    assert keys == stated | {"seal"}


def test_the_changelog_names_every_command():
    """Those of the first release in one line, later ones under what came after it."""
    later, _, first = (ROOT / "CHANGELOG.md").read_text().partition("\n## 0.2.0 ")
    (line,) = re.findall(r"- Commands: (.*?)\.\n", first, re.DOTALL)
    commands = {command.__name__.replace("_", "-") for command in COMMANDS}
    released = set(re.findall(r"`([\w-]+)`", line))
    assert released - commands == FORMER_COMMANDS.keys()
    assert commands - released <= set(re.findall(r"`trilith ([\w-]+)", later))
    assert commands <= set(re.findall(r"^## `trilith ([\w-]+)`", reference_of_commands(), re.MULTILINE))


def test_a_key_that_takes_more_than_words_says_so():
    page = with_tables(RECIPE)
    assert "; one of `true`, `false`, `auto` |" in page  # compile
    assert "; one of `auto`, a number |" in page  # memory.loss_chunk
    assert "; some of `tensorboard`, `wandb`, `mlflow`, `trackio` |" in page  # watch.trackers, a list


SECTION = re.compile(r"^## `?([^`\n]+)`?\n\n<!-- (\w+) -->.*?```toml\n(.*?)```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("title", "model", "example"), SECTION.findall(RECIPE))
def test_a_section_of_the_reference_has_an_example_that_a_recipe_takes(title, model, example):
    raw = tomllib.loads(example)
    for name in [] if title == "The top" else title.strip("[]").split("."):
        raw = raw[name]
    for table in raw if isinstance(raw, list) else [raw]:
        assert table and SECTIONS[model].model_validate(table)


def test_the_reference_lists_the_shipped_recipes():
    rows = Page.read("docs/recipe.md").rows("Shipped recipes")
    names = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert {row[0] for row in rows} == {f"[`{name}`](../recipes/{name}.toml)" for name in names}
    for path in (ROOT / "recipes").glob("*.toml"):
        assert tomllib.loads(path.read_text())["data"]["tokens"] == "tokens"


def test_the_reference_has_every_section():
    """``make check`` compares the page with it, and those tables of docs/training.md that it writes."""
    assert {model for _, model, _ in SECTION.findall(RECIPE)} == SECTIONS.keys()
    assert "| `betas` |" in with_tables("<!-- OptimizerSection: betas -->\nold\n<!-- end -->")


# docs/checkpoints.md: a reader without this library


@pytest.fixture(scope="module")
def shown():
    """Return the functions that docs/checkpoints.md shows; none needs this library."""
    page = Page.read("docs/checkpoints.md")
    assert not any("trilith" in code for code in page.blocks("python"))
    return page.run_python()


def test_the_reader_reads_what_convert_writes_and_checks_its_seal(tmp_path, shown):
    model = transformers_model(TINY_LLAMA)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", tensor=4, pipeline=3)
    theirs = model.state_dict()
    for ours, name in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
        ("layers.1.attention.qkv.k.weight", "model.layers.1.self_attn.k_proj.weight"),
    ):
        assert torch.equal(shown["read"](str(tmp_path / "out"), ours), theirs[name])
    assert shown["sealed"](str(tmp_path / "out"))
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tensor": 4', '"tensor": 2'))
    assert not shown["sealed"](str(tmp_path / "out"))


def test_the_reader_reads_what_a_run_writes(tmp_path, shown):
    tokens = write_tokens(tmp_path / "tokens")
    raw = tiny_recipe(tmp_path / "run", tokens, steps=1, layout={"tensor": 2, "data": 2, "zero": 1})
    run_parallel(run_recipe, 4, raw)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    moment = shown["read"](str(folder), "optimizer.exp_avg_sq.layers.0.mlp.gate_up.up.weight")
    assert moment.shape == shown["read"](str(folder), "layers.0.mlp.gate_up.up.weight").shape == (48, 32)
    assert 0 <= float(moment.min()) < float(moment.max())


# Pages with a recipe or with commands


def test_a_run_is_watched_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Page.read("docs/watching.md")
    held_out = write_tokens(tmp_path / "held-out", seed=1)
    for name in ("run", "other-run"):
        raw = tiny_recipe(tmp_path / name, held_out, steps=2) | tomllib.loads("".join(page.blocks("toml")))
        raw["evaluation"]["tokens"] = str(held_out)  # the ranks are in another folder
        raw["watch"] |= {"trace_steps": [2], "norms": 2}  # sooner
        run_parallel(run_recipe, 1, raw)
    for name in ("metrics.jsonl", "events.jsonl", "norms.jsonl", "tensorboard", "traces"):
        assert (tmp_path / "run" / name).exists(), name
    for words in page.commands():
        assert run(words) == 0
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "compared.html").exists()


def test_files_are_tokenized_packed_and_trained_on_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Page.read("docs/data.md")
    Path("corpus.txt").write_text(Page.read("README.md").text + page.text, encoding="utf-8")
    for name, language in (("chat.jsonl", "jsonl"), ("chat.jinja", "jinja"), ("recipe.toml", "toml")):
        Path(name).write_text("".join(page.blocks(language)), encoding="utf-8")
    for words in page.commands():
        assert run(words) == 0, words
    out = capsys.readouterr().out
    assert "[[ColumnParallelLinear.</s>]]" in out and "1 sample left out" in out
    assert len(read_metrics(Path("run") / "metrics.jsonl")) == 4


def test_a_run_and_a_folder_are_evaluated_as_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    page, data = Page.read("docs/evaluation.md"), Page.read("docs/data.md")
    train_tokenizer([data.text], Path("Llama-3.2-1B"), vocab_size=400)
    for name, text in (
        ("held-out.txt", data.text),
        ("chats.jsonl", "".join(data.blocks("jsonl"))),
        ("Llama-3.2-1B/chat_template.jinja", "".join(data.blocks("jinja"))),
    ):
        Path(name).write_text(text, encoding="utf-8")
    transformers_model(TINY_LLAMA | {"vocab_size": 400}).save_pretrained("Llama-3.2-1B")
    tokenized, evaluated = page.commands()[:2], page.commands()[2:]
    assert [run(words) for words in tokenized] == [0, 0]
    raw = tiny_recipe("run", "held-out", steps=1, data={"sequence_length": 64})
    for changes in ({}, {"out": "lora-run", "dtype": "float32", "lora": {"r": 2}}):
        write_recipe(Path("recipe.toml"), raw | {"model": {"init_from": "Llama-3.2-1B"}} | changes)
        assert run(["train", "recipe.toml", "--quiet"]) == 0
    capfd.readouterr()
    assert [run([*words, "--device", "cpu"]) for words in evaluated] == [0] * len(evaluated)
    *lines, json_line = capfd.readouterr().out.splitlines()
    *_, line, shown = page.blocks("text")[0].splitlines()
    assert re.sub(r"[\d.,]+", "", lines[0]) == re.sub(r"[\d.,]+", "", line)
    assert json.loads(json_line).keys() == json.loads(shown).keys()


def test_the_recipe_of_context_parallelism_is_one(tmp_path):
    (toml,) = Page.read("docs/context.md").blocks("toml")
    layout = parse_recipe(tiny_recipe(tmp_path, tmp_path / "tokens", **tomllib.loads(toml))).layout
    assert (layout.context, layout.ring) == (4, True)


def test_the_recipe_of_experts_is_one_and_its_adapters_fit_experts(tmp_path):
    toml, _, lora = Page.read("docs/experts.md").blocks("toml")
    changes = {"model": {"config": TINY_MIXTRAL}, "data": {"global_batch": 16}} | tomllib.loads(toml)
    recipe = parse_recipe(tiny_recipe(tmp_path, tmp_path / "tokens", **changes))
    planned = plan(recipe)
    for _, router in routers(planned.family.on_meta(planned.config)):
        assert router.num_experts % recipe.layout.expert == 0
    assert recipe.experts is not None and recipe.experts.balance == 0.01
    family = adapted(planned.family, LoraConfig.model_validate(tomllib.loads(lora)["lora"]))
    family.check(planned.config, "lora")
    assert len(family.stacks(planned.config)) == 2 * planned.config.num_hidden_layers


def test_the_groups_of_parameters_of_the_page_on_training_load(tmp_path):
    (toml,) = Page.read("docs/training.md").blocks("toml")
    raw = tiny_recipe(tmp_path, tmp_path / "tokens", **tomllib.loads(toml))
    groups = [(each.lr_scale, each.weight_decay, each.freeze) for each in parse_recipe(raw).optimizer.groups]
    assert groups == [(0.1, 0.0, False), (1, None, True)]


def test_training_from_python_works_as_shown(tmp_path, monkeypatch):
    page = Page.read("docs/training.md")
    small = page.text.replace("steps=1000", "steps=1").replace("layout.tensor=2", "layout.tensor=1")
    monkeypatch.chdir(tmp_path)
    raw = tiny_recipe("run", write_tokens(tmp_path / "tokens"), steps=9)
    write_recipe(Path("recipe.toml"), raw)
    Page(page.path, small).run_python()
    assert len(read_metrics(Path("run") / "metrics.jsonl")) == 1


# docs/techniques.md: figures

TECHNIQUES = Page.read("docs/techniques.md")

#: Beginnings of rows of the textbook's figures, and which of their numbers the command beside them prints.
FIGURES = {
    "memory of 7B": ["14 GB", "84 GB"],
    "7B on 4 GPUs": ["49 GB", "38.5 GB", "28 GB"],
    "70B on 8": ["840 GB", "105 GB"],
    "bubble of 4": ["8.57 %"],
    "efficiency of 32": ["67.4 %", "279"],
    "all-reduce": ["279.7 GB", "5.595 s"],
    "the same": ["22.31 s"],
    "column shard": ["1,024 outputs"],
    "bytes that 8 tensor ranks": ["1.879 GB"],
    "training FLOPs": ["6.3e+24"],
}


@pytest.mark.parametrize("beginning", FIGURES)
def test_a_textbook_s_figure_comes_out_of_the_command_beside_it(beginning, capsys):
    (row,) = (row for row in TECHNIQUES.rows("Figures") if row[0].startswith(beginning))
    assert run(shlex.split(row[2].strip("`"))[1:]) == 0
    out = capsys.readouterr().out
    assert not [number for number in FIGURES[beginning] if f" {number}" not in out]


# docs/install.md and the Containerfile


def test_the_page_and_the_container_name_the_same_versions_of_all_packages():
    page, container = Page.read("docs/install.md").text, (ROOT / "Containerfile").read_text()
    rows = dict(re.findall(r"^\| ([\w]+)[^|]*\| ([\d.]+) \|", page, re.MULTILINE))
    assert rows == dict(re.findall(r"^ {4}([\w]+)==([\d.]+)", container, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["trackers"], *extras["tensorboard"]]
    assert {re.split(r"[<>=;\[ ]", package)[0] for package in wanted} - {"trilith"} == rows.keys()


def test_the_page_of_the_environment_names_every_variable_that_is_read():
    rooms = [file.parent for file in ROOT.glob("*/__init__.py") if file.parent.name != "tests"]
    code = "".join(file.read_text(encoding="utf-8") for room in rooms for file in room.rglob("*.py"))
    asked = r'environ(?:\.get|\.setdefault)?[(\[]\s*"([A-Z_]+)"|"([A-Z_]+)" (?:not )?in os\.environ'
    read = {name or other for name, other in re.findall(asked, code)}
    page = Page.read("docs/environment.md")
    named = {
        name for row in page.rows("Variables that trilith reads") for name in re.findall(r"[A-Z_]+", row[0])
    }
    ours = {"TRILITH_FAULT", "_TRILITH_COMPLETE"}  # of tests, of the shell
    assert len(read) > 10 and not [
        name for name in read - named - ours if not name.startswith(("SLURM", "TORCHELASTIC_"))
    ]


def in_words(wanted):
    """Return a range of versions as the pages have it: "2.11 to 2.13", "5.17 to 5.x", "2 or later", "any"."""
    match = re.search(r">=([\d.]+)(?:,<(\d+)(?:\.(\d+))?)?", wanted)
    if match is None:
        return "any"
    least, major, minor = match.groups()
    if major is None:
        return f"{least} or later"
    return f"{least} to {int(major) - 1}.x" if minor is None else f"{least} to {major}.{int(minor) - 1}"


def test_the_versions_that_pages_allow_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["trackers"], *extras["tensorboard"]]
    allowed = {re.split(r"[<>=;\[ ]", package)[0]: in_words(package) for package in wanted}
    rows = Page.read("docs/install.md").rows("Versions that go together")
    assert {name.split(",")[0]: range_ for name, _, range_ in rows} == {
        name: words for name, words in allowed.items() if name != "trilith"
    }
    readme = Page.read("README.md").text
    assert f"torch {allowed['torch']} · transformers {allowed['transformers']} · " in readme
    python = in_words(project["requires-python"]).replace("later", "newer")
    assert f"\nPython {python} · " in readme


#: The name stands in no registry: whoever takes it there would run code wherever it is installed by name.
BY_NAME = re.compile(r"pip3? install(?: (?![&|;#])[^\s`]+){0,6} ['\"]*trilith\b")


def test_nothing_installs_the_package_by_its_name():
    assert BY_NAME.search("pip install 'trilith[data]'") and BY_NAME.search("pip install -q pyarrow trilith")
    kinds = {".py", ".md", ".toml", ".yaml", ".sbatch", ".json", ""}
    folders = [ROOT / "docs", ROOT / "examples", *(file.parent for file in ROOT.glob("*/__init__.py"))]
    files = [*ROOT.glob("*"), *(file for folder in folders for file in folder.rglob("*"))]
    for file in files:
        if file.is_file() and file.suffix in kinds and not file.name.startswith("."):
            text = re.sub(r"install\s+", "install ", file.read_text(encoding="utf-8"))
            assert not BY_NAME.search(text), file


def test_the_container_runs_as_a_user_of_its_own():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    user = lines.index("USER trainer")
    assert not any(line.startswith("USER") for line in lines[user + 1 :])
    assert any(line.startswith("RUN pip install") for line in lines[user:])


PAGE = Path(trilith.__path__[0]) / "docs" / "models.md"
NUMBER = re.compile(r"0|\d{1,3}|\de-\d\d")


def test_the_page_has_a_row_for_every_family_and_a_cell_for_every_axis():
    cells = cells_of(PAGE.read_text())
    assert PAGE.read_text() == page(cells), (
        "run `make models FAMILY=...` of a new family, or `python -m support.models_page`"
    )
    assert [*cells] == [*FAMILIES]
    for family, row in cells.items():
        assert [*row] == [*COLUMNS]
        assert [
            one for one in row.values() if one not in ("-", NOT_MEASURED) and not NUMBER.fullmatch(one)
        ] == []
        assert row["compile"] != "-", family
