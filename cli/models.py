"""``trilith models [NAME]``."""

from typing import TYPE_CHECKING, Annotated

from ..system import BadInput
from .shared.options import size_names
from .shared.say import say, say_json

if TYPE_CHECKING:
    from ..models import Family

#: Tokens of the sequence whose FLOPs are told, unless the model takes fewer.
_LONGEST = 8192


def models(
    name: Annotated[
        str | None, "published size, such as llama-3.1-8b, or family; default: all families", size_names
    ] = None,
    *,
    json: Annotated[bool, "print one JSON object, for programs"] = False,
    show: Annotated[bool, "show the model: its blocks, parameters, cuts and names in files"] = False,
) -> None:
    """List the families of models and their published sizes.

    A family reads the config.json of its model_type in Hugging Face's folders. Without NAME the command
    tells what each family can do: the axes of a layout, LoRA, text generation. Each ability is tested on
    a tiny model, which takes about ten seconds. With the name of a family it lists the family's published
    sizes. With the name of a size it prints the fields of the config, the number of parameters (and, if
    there are experts, how many of them compute one token), the memory of the weights and the FLOPs of a
    token; `trilith plan` finds its layouts. A recipe trains a size from scratch with `model.size = "NAME"`.

    Types that transformers computes (docs/any_model.md of the repository) are listed by the axes that tests
    have proved; with the name of one the command tells why others are refused.

    With --show it draws the size, or the first published size of the family, or its tiny test model: what
    each kind of block computes, and what it sends under tensor and sequence parallelism; of each parameter
    the shape, how the axes of a layout cut it, and its name in Hugging Face's files. A type that
    transformers computes is drawn at its default sizes, without what it sends.

    Examples:

        trilith models
        trilith models qwen3
        trilith models llama-3.1-405b
        trilith models mixtral-8x7b --json
        trilith models gemma2 --show
        trilith models arcee --show
    """
    from ..models import FAMILIES, published_size, published_sizes
    from ..models.from_transformers.config import offered, proved

    adopted = proved()["types"].keys() - FAMILIES.keys()
    if show:
        _print_shown(name, json)
    elif name is None:
        _print_families(list(FAMILIES.values()), json)
    elif name in FAMILIES and name not in published_sizes():
        _print_sizes(FAMILIES[name], json)
    elif name in adopted:
        _print_adopted(name, json)
    else:
        published_size(name, "models", also=(*FAMILIES, *offered()))
        _print_size(name, json)


def _print_shown(name: str | None, as_json: bool) -> None:
    from ..models import FAMILIES, family_of, published_size, published_sizes, tiny_config
    from ..models.from_transformers.config import proved
    from .shared.shown_model import shown_model

    if name is None or as_json:
        expected = "the name of a family or size, and no --json"
        raise BadInput("models", "--show", expected=expected, found="--json" if as_json else "no name")
    sizes = published_sizes()
    title, fields = name, tiny_config(name) if name in FAMILIES else None
    if name in FAMILIES and name not in sizes:
        title = next((size.name for size in sizes.values() if size.family.model_type == name), "")
    if name not in FAMILIES and name in proved()["types"]:
        title = "default sizes"  # of encoders and of pairs of both the decoder, as it can train
        fields = {"model_type": name, "is_decoder": True, "is_encoder_decoder": False}
    elif fields is None or title:
        fields = {**published_size(title, "models", also=FAMILIES).fields}
    family = family_of(fields, name)
    say(f"{title or 'tiny model'}: {family.model_type} ({family.architecture})\n")
    for line in shown_model(family, family.from_hf(fields, name)):
        say(line)


def _print_families(families: "list[Family]", as_json: bool) -> None:
    from dataclasses import asdict

    from ..models import published_sizes
    from ..models.from_transformers.config import offered, proved
    from .shared.shown_model import AXES, aligned, features_of

    sizes: dict[str, list[str]] = {family.model_type: [] for family in families}
    for name, size in published_sizes().items():
        sizes[size.family.model_type].append(name)
    by_family = {family.model_type: features_of(family) for family in families}
    if as_json:
        say_json({key: asdict(features) | {"sizes": sizes[key]} for key, features in by_family.items()})
        return
    rows, can = [("family", *AXES, "LoRA on", "generation")], {True: "yes", False: "-"}
    for key, features in by_family.items():
        abilities = (can[axis in features.axes] for axis in AXES)
        rows.append((key, *abilities, ", ".join(features.lora) or "-", can[features.generation]))
    for line in aligned(rows):
        say(line)
    say(f"\ntypes that transformers {proved()['transformers']} or later computes, by proved axes")
    kinds_by_axes: dict[tuple[str, ...], list[str]] = {}
    for kind, axes in offered().items():
        if kind not in sizes:
            kinds_by_axes.setdefault(axes, []).append(kind)
    for axes, kinds in sorted(kinds_by_axes.items(), key=lambda row: -len(row[1])):
        say(f"  {', '.join(axes) or 'data alone'}: {', '.join(kinds)}")
    say("\npublished sizes")
    for key, names in sizes.items():
        if names:
            say(f"  {key}: {', '.join(names)}")


def _print_adopted(kind: str, as_json: bool) -> None:
    from ..models.from_transformers.config import AXES, proved, refusals

    reasons = refusals(kind)
    refused = reasons.pop("", "")
    axes = [] if refused else [axis for axis in AXES if axis not in reasons]
    if as_json:
        say_json({"axes": axes, "refused": refused or reasons})
        return
    say(f"{kind}: computed by transformers {proved()['transformers']} or later")
    say(f"refused        {refused}" if refused else f"proved axes    {', '.join(axes) or 'data'}")
    for axis, why in reasons.items():
        say(f"{axis:<14} refused: {why}")


def _print_sizes(family: "Family", as_json: bool) -> None:
    from ..models import published_sizes

    sizes = [size for size in published_sizes().values() if size.family is family]
    if as_json:
        say_json({size.name: {"parameters": size.parameters} for size in sizes})
        return
    say(f"published sizes of {family.model_type} ({family.architecture})")
    width = max((len(size.name) for size in sizes), default=0)
    for size in sizes:
        say(f"  {size.name:<{width}}  {size.parameters:>15,} parameters")


def _print_size(name: str, as_json: bool) -> None:
    from ..models import published_size
    from ..simulation.model_flops import flops_per_token, parameters_of

    size = published_size(name)
    model, length = size.family.on_meta(size.config), min(_LONGEST, size.config.max_position_embeddings)
    active, flops, weights = parameters_of(model).active, flops_per_token(model, length), 2 * size.parameters
    if as_json:
        say_json(
            {
                "name": size.name,
                "family": size.family.model_type,
                "config": dict(size.fields),
                "parameters": size.parameters,
                "active_parameters": active,
                "weights_bytes": weights,
                "sequence_length": length,
                "flops_per_token": {"causal": flops.causal, "full": flops.full},
            }
        )
        return
    met = f", of which a token meets {active:,}" if active < size.parameters else ""
    say(f"{size.name}: {size.family.model_type} ({size.family.architecture})")
    for key, value in size.fields.items():
        say(f"  {key} = {value}")
    say(f"parameters     {size.parameters:,}{met}")
    say(f"weights        {weights / 1e9:,.2f} GB in bfloat16")
    say(
        f"model FLOPs    {flops.full / 1e9:,.2f} G a token in a sequence of {length:,}, "
        f"forward and backward, {flops.causal / 1e9:,.2f} G counting the causal half of attention"
    )
    say(f"layouts        trilith plan {size.name} --gpus 8")
