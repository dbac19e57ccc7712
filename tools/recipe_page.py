"""Write docs/recipe.md and the tables of docs/training.md from the keys' own help: ``make docs``."""

import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from trilith.recipes import optimizer_sections, sections
from trilith.recipes.recipe import Recipe

#: A table in docs/training.md: the section's class, perhaps some of its keys, the table.
TABLE = re.compile(r"<!-- (\w+)(?:: ([\w ]+))? -->\n(.*?)<!-- end -->", re.DOTALL)


def default_of(field: FieldInfo) -> str:
    """Return a key's default as the tables show it."""
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(default, BaseModel) or default == ():
        return ""
    if isinstance(default, float) and default >= 2**16:
        return f"2^{default.hex().split('p+')[1]}"
    return (
        "none" if default is None else f"`{str(default).replace('True', 'true').replace('False', 'false')}`"
    )


def choices_of(annotation: Any) -> list[str]:
    """Return the words that a key may have, then what else it may have; nothing for a key without words."""
    choices: list[str] = []
    for part in get_args(annotation):
        if isinstance(part, str):
            choices.append(f"`{part}`")
        elif part is bool:
            choices += ["`true`", "`false`"]
        elif part is int or (get_origin(part) is Annotated and get_args(part)[0] is int):
            choices.append("a number")
        elif get_origin(part) is not None:
            choices += choices_of(part)
    words = [choice for choice in choices if choice.startswith("`")]
    return words + [choice for choice in choices if choice not in words] if words else []


def table(model: type[BaseModel], keys: list[str]) -> str:
    """Write the table of a section's keys, or of some of them."""
    lines = ["| key | default | |", "|---|---|---|"]
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        if keys and name not in keys:
            continue
        assert field.description, f"{model.__name__}.{name} has no description"
        words = ", ".join(choices_of(field.annotation))
        several = "some of" if get_origin(field.annotation) is list else "one of"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        words = f"; {several} {words}" if words else ""
        lines.append(f"| `{name}` | {default_of(field)} | {meaning}{words} |")
    return "\n".join(lines) + "\n"


SECTIONS: list[tuple[str, type[BaseModel]]] = [
    ("The top", Recipe),
    ("[model]", sections.ModelSection),
    ("[loss]", sections.LossSection),
    ("[lora]", sections.LoraSection),
    ("[layout]", sections.LayoutSection),
    ("[data]", sections.DataSection),
    ("[optimizer]", optimizer_sections.OptimizerSection),
    ("[[optimizer.groups]]", optimizer_sections.ParameterGroup),
    ("[optimizer.skip_spikes]", optimizer_sections.SpikeSection),
    ("[loss_scale]", optimizer_sections.LossScaleSection),
    ("[experts]", sections.ExpertsSection),
    ("[memory]", sections.MemorySection),
    ("[checkpoint]", sections.CheckpointSection),
    ("[evaluation]", sections.EvaluationSection),
    ("[watch]", sections.WatchSection),
    ("[debug]", sections.DebugSection),
]


#: An example of each section, whose table stands above it.
EXAMPLES = {
    "The top": """\
out = "runs/first"
steps = 1000
compute = "bfloat16"                     # weights and moments stay in float32
model = { init_from = "Llama-3.2-1B" }
data = { tokens = "tokens", sequence_length = 2048, global_batch = 32, micro_batch = 2 }
""",
    "[model]": """\
[model]
size = "llama-3.2-1b"                    # random weights; init_from = "Llama-3.2-1B" starts from a folder's
""",
    "[loss]": """\
[loss]
module = "my_model.py:loss"
""",
    "[lora]": """\
[lora]
r = 16
lora_alpha = 32
target_modules = ["q_proj", "v_proj"]
""",
    "[layout]": """\
[layout]                                 # 16 ranks
tensor = 2
sequence = true
pipeline = 2
schedule = "1f1b"
data = 4
zero = 1
""",
    "[data]": """\
[data]
tokens = ["wiki", "code"]
weights = [3, 1]
sequence_length = 4096
global_batch = 128
micro_batch = 2
""",
    "[optimizer]": """\
[optimizer]
lr = 3e-4
warmup = 2000
schedule = "cosine"
weight_decay = 0.1
clip = 1.0
""",
    "[[optimizer.groups]]": """\
[[optimizer.groups]]
match = "embed_tokens|lm_head"
lr_scale = 0.1
""",
    "[optimizer.skip_spikes]": """\
[optimizer.skip_spikes]
deviations = 8.0
""",
    "[loss_scale]": """\
[loss_scale]                             # with compute = "float16"
growth_interval = 1000
""",
    "[experts]": """\
[experts]
balance = 0.01
z_loss = 0.001
""",
    "[memory]": """\
[memory]
checkpointing = "selective"
loss_chunk = 1024
""",
    "[checkpoint]": """\
[checkpoint]
every = 500
keep = 3
background = true
""",
    "[evaluation]": """\
[evaluation]
tokens = "held-out"
every = 500
samples = 256
""",
    "[watch]": """\
[watch]
trackers = ["tensorboard"]
norms = 100
""",
    "[debug]": """\
[debug]
collectives = true
""",
}


def section(title: str, model: type[BaseModel]) -> str:
    """Write a section: its table and its example."""
    return f"## `{title}`\n\n{table(model, [])}\n```toml\n{EXAMPLES[title]}```\n"


def shipped(recipes: Path = Path(sections.__file__).parent) -> str:
    """Write the table of the recipes that come with trilith, by the first sentence of each."""
    lines = ["| recipe | for |", "|---|---|"]
    for file in sorted(recipes.glob("*.toml")):
        comment = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"| [`{file.stem}`](../recipes/{file.name}) | {re.split(r'[.,:](?: |$)', comment)[0]} |")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Write docs/recipe.md."""
    parts = [
        "# Every key of a recipe\n\nLook here for a key of a recipe. On the command line: "
        "`trilith train recipe.toml section.key=value`.\n"
    ]
    parts += [section(title, model) for title, model in SECTIONS]
    parts += [
        "## Shipped recipes\n\n`trilith train NAME` takes one by its name. Each reads the token file "
        f"`tokens`, and its file says what was predicted.\n\n{shipped()}"
    ]
    return "\n".join(parts).replace("`The top`", "The top")


def with_tables(text: str) -> str:
    """Replace the tables in a page by those that the keys' help gives now."""

    def table_of(match: re.Match[str]) -> str:
        name, keys = match[1], match[2]
        (model,) = (section for _, section in SECTIONS if section.__name__ == name)
        head = f"<!-- {name}: {keys} -->" if keys else f"<!-- {name} -->"
        return f"{head}\n{table(model, (keys or '').split())}<!-- end -->"

    return TABLE.sub(table_of, text)


def write_docs(docs: Path) -> None:
    """Bring docs/recipe.md and the tables of docs/training.md up to date."""
    (docs / "recipe.md").write_text(reference(), encoding="utf-8")
    page = docs / "training.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_docs(Path("docs"))
