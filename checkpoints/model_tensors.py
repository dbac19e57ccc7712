"""Take a model's tensors out of a catalog: each is there, whole, of the config's shape; none is left over.

It is the same for a folder of Hugging Face and for a checkpoint of another project: only the names differ.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from ..parallel_state import BadInput, Box, Piece, require
from ..storage.catalog import Catalog, LazyTensor, check_covered, renamed
from ..storage.dtypes import WEIGHTS, name_of
from .foreign.rules import Table
from .optimizer_state import moment_name
from .user_module_family import Described

Shape = tuple[int, ...]
#: Constants that earlier versions of transformers kept in files, of any model.
_CONSTANTS = re.compile(r".+\.(rotary_emb\.inv_freq|masked_bias)")
#: The stored pieces that make each tensor of Hugging Face.
Names = dict[str, list[Piece[str]]]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Say that a tensor is stored a second time, and must have the same bytes there."""

    first: LazyTensor
    again: LazyTensor
    why: str
    todo: str

    def check(self, where: Path, sha256: Callable[[LazyTensor], str] | None = None) -> None:
        """Refuse two that differ, by the SHA-256 of the bytes of each."""
        digest, other = map(sha256 or sha256_of, (self.first, self.again))
        expected = f"the bytes of {self.first.name} (sha256 {digest[:12]}), {self.why}"
        differing = f"others (sha256 {other[:12]})"
        require(digest == other, where, self.again.name, expected, differing, self.todo)


def sha256_of(tensor: LazyTensor) -> str:
    """Return the SHA-256 of a tensor's bytes, read in blocks."""
    digest = hashlib.sha256()
    for numbers in tensor.in_blocks():
        digest.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hf_shapes(described: Described) -> dict[str, Shape]:
    """Return the shapes of Hugging Face's tensors, with the output layer that a tied model may repeat."""
    (_, shapes), head = described.links(), described.family.tied_head
    if not head or not described.config.tie_word_embeddings:
        return dict(shapes)
    return {**shapes, head: next(iter(shapes.values()))}


def own_names(described: Described) -> Iterator[Collection[str]]:
    """Yield the names of Hugging Face's files, and those of transformers' modules if they are others."""
    yield hf_shapes(described)
    modules = described.family.module_pieces(described.config)
    yield dict.fromkeys(piece.stored for piece in chain(*modules.values()))


def _own_names(stored: Catalog, described: Described, absent: str, prefix: str) -> Names:
    """Return Hugging Face's names, which lack the prefix ``absent`` and have ``prefix``.

    A tensor that is not there may be under the names of transformers' modules.
    """
    names: Names = {
        name: [Piece.plain(Box.whole(shape), prefix + name.removeprefix(absent))]
        for name, shape in hf_shapes(described).items()
    }
    missing = {name for name in described.links()[1] if names[name][0].stored not in stored}
    others = described.family.module_pieces(described.config) if missing else {}
    for name, of_modules in others.items():
        pieces = [replace(piece, stored=prefix + piece.stored) for piece in of_modules]
        taken = any(piece.stored in names for piece in of_modules)
        if name in missing and not taken and all(piece.stored in stored for piece in pieces):
            names[name] = pieces
    names = {name: pieces for name, pieces in names.items() if all(p.stored in stored for p in pieces)}
    shapes: dict[str, Shape] = {}
    for piece in chain(*names.values()):
        stop = piece.hull.stop
        shapes[piece.stored] = tuple(map(max, shapes.get(piece.stored, stop), stop))
    for name, shape in shapes.items():
        if (tensor := stored[name]).shape != shape:
            todo = "The config and the weights are not of one model"
            raise BadInput(_place(tensor), name, expected=[*shape], found=[*tensor.shape], todo=todo)
    return names


def model_tensors(
    where: Path, stored: Catalog, described: Described, table: Table | None = None
) -> tuple[Catalog, list[Repeated], Names]:
    """Return each tensor of Hugging Face, those that are stored twice, and their names in the files; reads
    headers only.

    ``table``: of another project's names; without rules they are Hugging Face's. ``BadInput`` for a tensor
    that is missing, left over, quantised, of another shape than the model's, or stored in part.
    """
    (links, shapes), family = described.links(), described.family
    optional = family.optional_prefix if table is None else ""
    absent = "" if optional and any(name.startswith(optional) for name in stored) else optional
    prefix = "" if table is None else table.prefix
    names: Names = {}
    if table is None or not table.rule:
        names = _own_names(stored, described, absent, prefix)
    else:
        of_files, of_hub = {name: tensor.shape for name, tensor in stored.items()}, hf_shapes(described)
        for link in table.links(described.model_type, of_hub, described.config, of_files, where):
            names.setdefault(link.ours, []).append(link.piece)
    used = {piece.stored: None for pieces in names.values() for piece in pieces}
    templates = (re.escape(template.removeprefix(absent)) for template in family.ignorable)  # of old buffers
    ignored = [_CONSTANTS, *(re.compile(name.replace(re.escape("{i}"), r"\d+")) for name in templates)]
    others = {name: name.removeprefix(prefix) for name in sorted(stored.keys() - used.keys())}
    rests = {rest for rest in others.values() if not any(pattern.fullmatch(rest) for pattern in ignored)}
    if table is not None:
        rests -= {rest for name, rest in others.items() if table.ignores(rest) or table.ignores(name)}
    unknown = rests - family.left_out(described.config, rests)
    extra = [name for name, rest in others.items() if rest in unknown]
    _check_names(where, names, extra, described, can_ignore=table is not None)
    declared = described.declarations()[0] if family.adopted else {}  # the zoo has no integers
    dtypes = {link.hf: declared[link.ours].dtype for link in links if declared}
    for hf, name in ((hf, piece.stored) for hf, pieces in names.items() for piece in pieces):
        integer = dtypes.get(hf) == torch.int64
        types = (name_of(torch.int64),) if integer else WEIGHTS
        if stored[name].dtype not in types:
            expected, todo = f"one of {', '.join(types)}", "Quantised checkpoints are not supported"
            raise BadInput(_place(stored[name]), name, expected=expected, found=stored[name].dtype, todo=todo)
    tensors = renamed(stored, names, where)
    check_covered(where, tensors)
    repeated = []
    if family.tied_head in tensors and family.tied_head not in shapes:
        why = "as tie_word_embeddings says"
        todo = "Set tie_word_embeddings to false in config.json if the output layer is its own"
        repeated.append(Repeated(tensors[next(iter(shapes))], tensors[family.tied_head], why, todo))
    first = {link.ours: link.hf for link in reversed(links) if not link.copy}
    for link in links:
        if link.copy:
            why = "which multi-token prediction shares"
            todo = "Multi-token prediction with an embedding or output layer of its own is not supported"
            repeated.append(Repeated(tensors[first[link.ours]], tensors[link.hf], why, todo))
    return Catalog({name: tensors[name] for name in shapes}), repeated, names


def model_moments(where: Path, moments: Mapping[str, Catalog], names: Names) -> Catalog:
    """Return the moments of Hugging Face's tensors of these names; ``BadInput`` for one stored in part."""
    catalog = Catalog()
    for moment, stored in moments.items():
        tensors = renamed(stored, names, where)
        check_covered(where, tensors)
        catalog |= {moment_name(moment, name): tensor for name, tensor in tensors.items()}
    return catalog


def model_updates(
    where: Path, updates_of: Mapping[str, int], updates: int | None, described: Described, names: Names
) -> dict[str, int]:
    """Return, by our names, the updates of parameters that have fewer than ``updates``, as ``updates_of``
    says of stored weights; ``BadInput`` for a parameter made of weights that differ in them.
    """
    counts: dict[str, set[int | None]] = defaultdict(set)
    for link in described.links()[0] if updates_of else ():
        counts[link.ours] |= {updates_of.get(piece.stored, updates) for piece in names.get(link.hf, ())}
    fewer: dict[str, int] = {}
    for name, of_parts in counts.items():
        numbers, todo = ", ".join(sorted(map(str, of_parts))), "Save the weights without the optimizer"
        expected = "one number of updates of what makes it"
        require(len(of_parts) <= 1, where, name, expected, numbers, todo)
        fewer.update((name, count) for count in of_parts if count is not None and count != updates)
    return fewer


def _place(tensor: LazyTensor) -> Path:
    """Return the file that holds the first part of a tensor."""
    return next(iter(tensor.near(tensor.box))).stored.file.path


def _check_names(
    where: Path, names: Names, extra: Sequence[str], described: Described, *, can_ignore: bool
) -> None:
    """Refuse a model's tensor that has no stored one, and a stored tensor that is of no use."""
    _, shapes = described.links()
    if missing := [name for name in shapes if name not in names]:
        todo = "The config or --names is of another model; is num_hidden_layers right, or a shard left out?"
        if any(name.endswith(other) or other.endswith(name) for name in missing for other in extra):
            todo = f"The names lack or add a prefix: {extra[0]} is there"
        elif described.module is None and all(
            {*name.split(".")} & {*map(str, described.config.mtp_numbers)} for name in missing
        ):
            todo = "They are of multi-token prediction: leave out model.mtp of a recipe, mtp of config.json"
        elif missing[0] == described.family.tied_head and not extra:
            todo = "Set tie_word_embeddings to true in config.json if the output layer is the embedding"
        elif any(name.endswith((".experts.gate_up_proj", "lm_head.weight")) for name in extra):
            todo = "Are the names those of transformers' modules? `trilith convert DIR NEW --to hf "
            todo += "--implementation transformers` reads them"
        unused = f"; not used: {', '.join(extra[:3])}" if extra else ""
        actual = f"{len(missing)} of {len(shapes)} missing{unused}"
        raise BadInput(where, missing[0], expected="a tensor for it", found=actual, todo=todo)
    if extra:
        todo = "The config does not describe it; nothing is ignored silently"
        if can_ignore:
            used = [piece.stored for pieces in names.values() for piece in pieces]
            above, dot, _ = extra[0].partition(".")
            if not dot or any(name.startswith(above + dot) for name in used):
                pattern = re.escape(extra[0])
            else:
                pattern = re.escape(above) + r"\..*"
            pattern = pattern.replace("'", ".")  # which would end TOML's text
            todo += f". To leave it out, --names with a .toml file: ignored = ['{pattern}']"
        raise BadInput(where, extra[0], expected="no such tensor", found="one", todo=todo)
