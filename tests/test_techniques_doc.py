"""docs/techniques.md: commands, keys, files, tests and links exist; the corrected figures are right."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from trilith.cli.app import make_app
from trilith.cli.reference import every_command
from trilith.pipeline import bubble_share
from trilith.planner.explanations.explanation import readable
from trilith.planner.formulas.bytes_per_parameter import state_bytes
from trilith.planner.formulas.training_time import DAY, device_hours, training_flops

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "techniques.md").read_text()
COMMANDS = dict(every_command(typer.main.get_command(make_app())))
#: What the tutorials teach: each must stand in the first cell of a row.
TAUGHT = """
    nn.DataParallel; DDP; DistributedSampler; FSDP; ZeRO-1; ZeRO-2; ZeRO-3; ZeRO-Offload; tensor parallelism;
    pipeline parallelism; bubble; micro-batches; 1F1B; 3D; Megatron-LM; DeepSpeed; TrainingArguments;
    ring all-reduce; NCCL; gradient accumulation; bf16; fp16; fp32 masters; loss scaling; INT8;
    activation checkpointing; partitioned; on the CPU; bucketing; overlap; flash attention; LoRA; Unsloth;
    cosine; warm-up; linear scaling rule; clipping; torchrun over nodes; NVLink; InfiniBand; scaling laws;
    distillation; data curation
"""


def rows(heading):
    """Return the cells of the rows below a heading, without the table's head."""
    part = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    assert len(lines) > 1, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


TECHNIQUES = [
    row
    for heading in (
        "Data parallelism",
        "Model parallelism",
        "Memory and precision",
        "Optimization",
        "Systems",
    )
    for row in rows(heading)
]
QUOTED = re.findall(r"`([^`]+)`", TEXT)


def test_everything_that_is_taught_has_a_row_that_says_where_it_is():
    names = " | ".join(row[0] for row in TECHNIQUES)
    assert [word for word in TAUGHT.split(";") if " ".join(word.split()) not in names] == []
    for name, what, where in TECHNIQUES:
        assert len(what) > 20 and ("`" in where or "](" in where or "not built, because" in where), name
        assert where.startswith("not built, because") or not where.startswith("not built"), name


def test_files_and_tests_exist():
    named = [one for one in QUOTED if re.fullmatch(r"[\w/]+\.(py|md)(::\w+)?", one)]
    assert len(named) > 50
    for one in named:
        file, _, test = one.partition("::")
        assert (ROOT / file).is_file(), one
        text = (ROOT / file).read_text()
        assert not test or f"def {test}(" in text or f"\n{test} = " in text, one


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 5 and [one for one in links if not (ROOT / "docs" / one).is_file()] == []


def test_commands_are_accepted():
    shown = [shlex.split(one)[1:] for one in QUOTED if one.startswith("trilith ") and "TOPIC" not in one]
    assert len(shown) > 15
    for words in shown:
        said = max(n for n in range(1, len(words) + 1) if " ".join(words[:n]) in COMMANDS)
        COMMANDS[" ".join(words[:said])].make_context(words[0], words[said:])


def test_recipe_keys_exist():
    keys = [one.split(" = ")[0] for one in QUOTED if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)?( = .+)?", one)]
    assert len(keys) > 20
    page = (ROOT / "docs" / "recipe.md").read_text()  # which a test compares with the schema
    for key in keys:
        section, _, name = key.rpartition(".")
        heading = f"## `[{section}]`" if section else "## The top"
        assert f"| `{name}` |" in page.partition(heading)[2].partition("\n## ")[0], key


WRONG = rows("Figures in circulation that are wrong")
#: The same figures by the functions of a plan, in the order of the rows.
BY_FORMULA = [
    readable(bubble_share(4, 16), "share"),
    readable(1 - bubble_share(4, 16), "share"),
    readable(training_flops(70e9, 15e12), "FLOPs").removesuffix(" FLOPs"),
    f"{device_hours(54 * DAY, 16384):,.0f}",
    f"{state_bytes(175e9 / 1024).weights / 1e9:.3g} GB",
    f"{16384 // (8 * 16)}",
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_corrected_figure_is_what_its_arithmetic_and_the_formulas_give(number):
    claim, right, why, arithmetic = WRONG[number]
    value = eval(arithmetic.strip("`"), {})
    written = [f"{100 * value:.3g} %", f"{value:.3g} GB", f"{value:,.0f}", f"{value:.4g}"]
    assert right in written and right not in claim and len(why) > 20
    assert right == BY_FORMULA[number]


def test_the_textbook_s_figures_come_out_of_the_commands_beside_them(capsys):
    """Every number in the second column stands in what the command prints, or in the test that is named."""
    from trilith.cli.app import run

    figures = rows("Figures")
    assert len(figures) == 12 and len(WRONG) == len(BY_FORMULA) == 6
    sizes = {"memory of 7B": ("14 GB", "84 GB"), "7B on 4 GPUs": ("49 GB", "38.5 GB", "28 GB")}
    sizes |= {
        "70B on 8": ("840 GB", "105 GB"),
        "bubble of 4": ("8.57 %",),
        "efficiency of 32": ("67.4 %", "279"),
    }
    sizes |= {
        "all-reduce": ("279.7 GB", "5.595 s"),
        "the same": ("22.31 s",),
        "column shard": ("1,024 outputs",),
        "bytes that 8 tensor ranks": ("1.879 GB",),
    }
    sizes |= {"training FLOPs": ("6.3e+24",)}
    for name, expected in sizes.items():
        (row,) = (row for row in figures if row[0].startswith(name))
        assert run(shlex.split(row[2].strip("`"))[1:]) == 0
        shown = capsys.readouterr().out
        assert [one for one in expected if f" {one}" not in shown] == [], row
