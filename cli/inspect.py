"""``trilith inspect DIR``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ..system import BadInput, counted, nearest_names
from .shared.options import CONFIG, IMPLEMENTATION, NAMES
from .shared.parameters import As, Place
from .shared.say import print_table, say, table

if TYPE_CHECKING:
    from ..storage.catalog import LazyTensor


def inspect(
    source: Annotated[Place, As("DIR"), "Hugging Face folder, checkpoint, or a run's folder"],
    *,
    tensor: Annotated[str | None, "tensor to print minimum, maximum, mean and standard deviation of"] = None,
    config: Annotated[Place | None, CONFIG] = None,
    names: Annotated[str | None, NAMES] = None,
    implementation: Annotated[Literal["auto", "transformers"], IMPLEMENTATION] = "auto",
) -> None:
    """List what a folder of weights holds: model, layout, step, files, tensors.

    Without --config the tensors of another project's checkpoint are listed under that project's own names.

    The command reads headers only. With --tensor it also reads that tensor.

    Examples:

        trilith inspect run
        trilith inspect Llama-3.2-1B --tensor model.norm.weight
    """
    from math import prod

    from ..checkpoints import foreign_format, read_source, verify_files

    if config is None and (form := foreign_format(source)) is not None:
        foreign = form.read(Path(source))
        say(f"{source}: {foreign.summary()}; with --config its tensors have Hugging Face's names")
        for name, fact in foreign.stated.items():
            say(f"{name} = {fact.text} ({fact.where})")
        for line in foreign.skipped:
            say(line)
        for name, stored in foreign.tensors.items():
            say(f"{name}  {stored.dtype} {[*stored.shape]}  {counted(_parts(stored), 'part')}")
        return
    folder = read_source(source, config=config, names=names, implementation=implementation)
    manifest = folder.manifest
    fixed = folder.described.buffers(of_hf=manifest is None)  # a router's bias is no parameter
    parameters = sum(
        prod(whole.shape)
        for name, whole in folder.catalog.items()
        if not name.startswith("optimizer.") and name not in fixed
    )
    say(f"{folder.path}: {folder.form} of {folder.described.model_type}, {parameters:,} parameters")
    if manifest is not None:
        say(f"layout: {manifest.layout}" + (f"; step {manifest.step}" if manifest.step is not None else ""))
    for warning in folder.warnings:
        say(f"warning: {warning}")
    if tensor is not None:
        if tensor not in folder.catalog:
            todo = nearest_names(tensor, folder.catalog) or "Without --tensor all names are listed"
            raise BadInput(folder.path, tensor, expected="a tensor of this name", found="none", todo=todo)
        whole = folder.catalog[tensor]
        if manifest is not None:
            holding = {piece.stored.file for piece in whole.near(whole.box)}
            numbers = [number for number, file in enumerate(folder.files) if file in holding]
            verify_files(manifest, folder.files, numbers)
        values = whole.read(finite=False).double()
        say(
            f"{tensor}  {whole.dtype} {list(whole.shape)}  min {values.min():.6g}  max {values.max():.6g}  "
            f"mean {values.mean():.6g}  std {values.std():.6g}"
        )
        return
    on_disk = {file.path: file for of_folder in folder.files for file in of_folder.stored_in}
    files = [(path.name, f"{len(file.tensors):,}", f"{file.size:,}") for path, file in on_disk.items()]
    print_table(table("files", ("file", "tensors", "bytes"), files, right=("tensors", "bytes")))
    tensors = (
        (name, whole.dtype, str(list(whole.shape)), str(_parts(whole)))
        for name, whole in folder.catalog.items()
    )
    print_table(table("tensors", ("name", "dtype", "shape", "parts"), tensors))


def _parts(tensor: "LazyTensor") -> int:
    """Return in how many pieces of files a tensor lies."""
    return sum(1 for _ in tensor.near(tensor.box))
