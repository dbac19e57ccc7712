"""Read weights of any form, from a Hugging Face folder or a checkpoint, through one catalog."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ..models import Family, Implementation, LoraConfig, ModelConfig, adapted, implemented_by
from ..models.zoo import predicting
from ..parallel_state import BadInput, Piece, require
from ..storage.catalog import Catalog, renamed
from ..storage.disk import Hold
from ..storage.file_names import (
    CHECKPOINTS,
    CONFIG,
    MANIFEST,
    SOURCES,
    WEIGHTS_OF_A_MODEL,
    FolderKind,
    kind_of_folder,
)
from ..storage.files_beside_weights import COMPANIONS, companions_in
from ..storage.safetensors_reader import TensorFile
from ..storage.small_files import read_json
from ..storage.torch_archive import ViewFile
from ..system import counted, no_garbage_search
from .find import Found, local_folder, newest_checkpoint, open_checkpoint, warn_of
from .foreign.checkpoint import ForeignCheckpoint, check_stated
from .foreign.formats import EXPECTED, Format, format_of, refuse_absent, refuse_unknown
from .foreign.rules import choose_table
from .hugging_face.folder import HFFolder
from .manifest import Manifest, StoredAdapter
from .model_tensors import Repeated, model_moments, model_tensors, model_updates, own_names
from .optimizer_state import MOMENTS, moment_name
from .rank_files import checkpoint_catalog, checkpoint_files
from .user_module_family import Described, described_module


@dataclass
class Source:
    """Give access to the tensors of a Hugging Face folder or a checkpoint. Files open when needed.

    ``config``: Hugging Face's dict. ``companions``: the files that are copied along (tokenizer and the like).
    ``manifest``: ``None`` for a Hugging Face folder. ``catalog``: the tensors under the names of the source.
    ``adapter``: set if the tensors are LoRA adapters, and names their base; the names are then PEFT's.
    """

    path: Path
    config: dict[str, Any]
    companions: list[Path]
    files: Sequence[TensorFile]
    catalog: Catalog
    manifest: Manifest | None = None
    warnings: list[str] = field(default_factory=list)
    adapter: StoredAdapter | None = None
    #: While this lives, a run that writes checkpoints does not delete this one.
    hold: Hold | None = None
    #: What another project wrote, if it is neither ours nor a folder of Hugging Face's; the catalog has its
    #: tensors under Hugging Face's names, and its moments as ``moment_name`` of these.
    foreign: ForeignCheckpoint | None = None
    #: Declarations and names of a user's own module (from a checkpoint, or given by the caller); ``None`` for
    #: a model of the zoo.
    module: Described | None = None
    #: Updates of the parameters, by our names, that another project's optimizer has updated less often.
    updates_of: dict[str, int] = field(default_factory=dict)
    #: Tensors that a Hugging Face folder holds twice.
    repeated: Sequence[Repeated] = ()

    @cached_property
    def described(self) -> Described:
        """Return what the model is; for LoRA adapters, a family whose tensors are the adapters only."""
        if self.module is not None:
            return self.module
        where = self.path / (CONFIG if self.manifest is None else MANIFEST)
        described = Described.of(self.config, where)
        if self.adapter is not None:
            lora = LoraConfig.model_validate(self.adapter.lora)
            return Described(adapted(cast(Family, described.family), lora), described.config)
        return described

    @property
    def family(self) -> Family:
        """Return the family of a model of the zoo; ``BadInput`` for the checkpoint of a user's module."""
        if not isinstance(self.described.family, Family):
            todo = "Build the module yourself, and fill it with load(path, module)"
            raise BadInput(self.path, expected="a model of the zoo", found="a module's checkpoint", todo=todo)
        return self.described.family

    @property
    def model_config(self) -> ModelConfig:
        """Return the config of a model of the zoo; ``BadInput`` as ``family``."""
        _ = self.family
        return cast(ModelConfig, self.described.config)

    @property
    def form(self) -> str:
        """Return the form of the source, for the user."""
        if self.manifest is not None:
            return f"checkpoint ({self.manifest.kind})"
        return "Hugging Face folder" if self.foreign is None else self.foreign.form

    @property
    def moments(self) -> dict[str, frozenset[str]]:
        """Return the optimizer's moments that the source has, each with the parameters that have none."""
        if self.manifest is not None:
            return self.manifest.moments
        if self.foreign is None or not self.foreign.moments:
            return {}
        return dict.fromkeys(MOMENTS, self.described.buffers())

    @property
    def updates(self) -> int:
        """Return how many updates the optimizer of the source has made."""
        counted = self.manifest or self.foreign
        return 0 if counted is None else counted.updates or 0

    @property
    def memory(self) -> dict[str, Any]:
        """Return what the optimizer of the source has counted, as ``adamw`` takes it."""
        stored = None if self.manifest is None else self.manifest.state.get("memory")
        further = stored if isinstance(stored, dict) else {"updates_of": self.updates_of}
        return {"updates": self.updates, **further}

    @cached_property
    def ours(self) -> Catalog:
        """Return the tensors under trilith's names."""
        return self._under_names(of_hf=False)

    @cached_property
    def hf(self) -> Catalog:
        """Return the tensors under Hugging Face's names."""
        return self._under_names(of_hf=True)

    def _under_names(self, *, of_hf: bool) -> Catalog:
        if of_hf == (self.manifest is None):
            return self.catalog
        names: dict[str, list[Piece[str]]] = defaultdict(list)
        for link in self.described.links()[0]:
            if of_hf:
                names[link.hf].append(link.piece.reversed(link.ours))
            elif not link.copy:  # read once, where it is not a copy
                names[link.ours].append(link.piece)
        tables = {name: [*pieces] for name, pieces in names.items()}
        for moment in self.moments:
            for name, pieces in names.items():
                of_moment = [replace(piece, stored=moment_name(moment, piece.stored)) for piece in pieces]
                tables[moment_name(moment, name)] = of_moment
        return renamed(self.catalog, tables, self.path)


@no_garbage_search()
def read_source(
    path: str | Path,
    *,
    allow_symlinks: bool = False,
    module: Described | None = None,
    config: str | Path | None = None,
    names: str | None = None,
    mtp: bool = False,
    implementation: Implementation = "auto",
    whole: bool = True,
    compare: bool = True,
) -> Source:
    """Open a Hugging Face folder, a checkpoint, or a run's newest checkpoint; reads headers alone, except for
    ``whole``.

    While the source is in use, the run does not delete that checkpoint. An id such as ``org/model`` is looked
    up in the Hugging Face cache, or downloaded (see ``from_hub``). A folder of two kinds is refused;
    ``kind_of_folder`` says how to name one of them. ``module`` reads a Hugging Face folder of a model that is
    not in the zoo. ``mtp``: a Hugging Face folder's blocks of multi-token prediction are part of the model,
    whatever its config says. ``implementation``: whose code is to compute the model; a checkpoint of ours
    says so itself. One of another project needs ``config``, a Hugging Face folder of the same model (its
    weights are not read), and may need ``names``, a table (see ``foreign/rules.py``). ``whole``: look
    whether each file of a checkpoint is there, and read both of two tensors of a Hugging Face
    folder that must be one; where many ranks open a source, one of them does it. Without ``compare`` these
    two are left to the caller, who reads them anyway (``Source.repeated``). Raises ``BadInput`` or
    ``BadCheckpoint`` for a source that is none of these, lacks something, or is not what its config says.
    """
    path = local_folder(path)
    if not path.exists():
        refuse_absent(path)
    path, kind = kind_of_folder(path, SOURCES)
    if kind is FolderKind.MODEL and not any((path / name).exists() for name in WEIGHTS_OF_A_MODEL):
        kind = FolderKind.OTHER  # a config beside what a trainer or another project saved
    if kind is FolderKind.OTHER and (form := format_of(path)) is not None:
        return _foreign(path, form, config, names, implementation)
    if kind in (FolderKind.OTHER, FolderKind.TOKENS):
        refuse_unknown(path, of_others=config is not None)
    actual, todo = kind.value, "Leave out --config and --names: it has a config and names of its own"
    require(config is None and names is None, path, None, "a checkpoint of another project", actual, todo)
    match kind:
        case FolderKind.CHECKPOINT:
            return _sharded(open_checkpoint(path, whole=whole), implementation)
        case FolderKind.CHECKPOINTS | FolderKind.RUN:
            newest = newest_checkpoint(path / CHECKPOINTS if kind is FolderKind.RUN else path, whole=whole)
            warn_of(newest.passed_over)
            return _sharded(newest, implementation)
        case FolderKind.ADAPTER:
            todo = f"`trilith merge-lora BASE {path} OUT` makes a whole model of them and their base"
        case FolderKind.UNFINISHED:
            todo = "Run the command that makes it again"
        case _:
            return _hugging_face(path, allow_symlinks, module, mtp, whole and compare, implementation)
    raise BadInput(path, expected=EXPECTED, found=kind.value, todo=todo)


def foreign_format(path: str | Path) -> Format | None:
    """Return another project's format (see ``Format.read``), if ``path`` is a checkpoint of a known one."""
    is_foreign = Path(path).exists() and kind_of_folder(Path(path), SOURCES)[1] is FolderKind.OTHER
    return format_of(Path(path)) if is_foreign else None


def _sharded(checkpoint: Found, implementation: Implementation) -> Source:
    path, manifest = checkpoint.directory, checkpoint.manifest
    # Earlier releases took along whatever a tokenizer's folder held.
    companions = [path / companion.name for companion in manifest.companions if companion.name in COMPANIONS]
    config, files = dict(manifest.config), checkpoint_files(path, manifest)
    if implemented_by(config, implementation) != config:
        actual, todo = "the zoo's names", f"Convert it back first: trilith convert {path} OUT --to hf"
        raise BadInput(path, "implementation", expected="transformers' names", found=actual, todo=todo)
    module = None if manifest.module is None else described_module(manifest.module, config)
    return Source(
        path, config, companions, files, checkpoint_catalog(manifest, files), manifest,
        adapter=manifest.adapter, module=module, hold=checkpoint.hold,
    )  # fmt: skip


def _hugging_face(
    path: Path, links: bool, module: Described | None, mtp: bool, compare: bool, by: Implementation
) -> Source:
    folder = HFFolder(path, allow_symlinks=links)
    folder.config = implemented_by(folder.config, by)
    if mtp:
        folder.config = predicting(folder.config, str(path / CONFIG))
    described, stored = module or Described.of(folder.config, path / CONFIG), folder.catalog
    catalog, repeated, names = model_tensors(path, stored, described)
    for pair in repeated if compare else ():
        pair.check(path)
    again = Catalog({pair.again.name: pair.again for pair in repeated})
    files = [*Catalog(catalog | again).stored_keys]
    used = {piece.stored for pieces in names.values() for piece in pieces}
    unread = sorted(described.family.left_out(described.config, stored.keys() - used))
    of_blocks, page = " of blocks that predict further tokens", " (docs/experts.md: multi-token prediction)"
    if described.family.adopted:
        of_blocks = page = ""
    warnings = [
        f"{path}: not read, as by transformers: {counted(len(unread), 'tensor')}{of_blocks}, "
        f"such as {unread[0]}{page}"
    ] if unread else []  # fmt: skip
    return Source(
        path, folder.config, folder.companions, files, catalog, None, warnings,
        module=module, repeated=repeated,
    )  # fmt: skip


def _foreign(
    path: Path, form: Format, config_folder: str | Path | None, names: str | None, by: Implementation
) -> Source:
    checkpoint = form.read(path)  # first: what cannot be read needs no config
    if config_folder is None:
        todo = "Say --config with a Hugging Face folder (config.json, tokenizer) of the same model"
        raise BadInput(path, expected="the model's config", found=f"{form.name}, which has none", todo=todo)
    where = local_folder(config_folder)
    raw = implemented_by(read_json(where / CONFIG if where.is_dir() else where), by)
    described = Described.of(raw, where)
    check_stated(checkpoint, described.config, where)
    table = choose_table(checkpoint, names, own_names(described))
    catalog, repeated, pieces = model_tensors(path, checkpoint.tensors, described, table)
    for pair in repeated:
        pair.check(path)
    buffers = described.buffers(of_hf=True)
    trained = {name: pieces[name] for name in catalog if name not in buffers}
    used = {piece.stored for name in trained for piece in trained[name]}
    if without := sorted({name for kind in checkpoint.moments.values() for name in used - kind.keys()}):
        others = f" and {counted(len(without) - 1, 'other weight')}" if without[1:] else ""
        checkpoint.skipped.append(f"the moments are left out: there are none of {without[0]}{others}")
        checkpoint.moments, checkpoint.updates_of = {}, {}
    catalog |= model_moments(path, checkpoint.moments, trained)
    for file, keys in (files := catalog.stored_keys).items():
        if isinstance(file, ViewFile):
            file.keep(keys)
    companions = companions_in(where) if where.is_dir() else []
    skipped = [f"{path}: {line}" for line in checkpoint.skipped]
    return Source(
        path, raw, companions, [*files], catalog, None, skipped, foreign=checkpoint,
        updates_of=model_updates(path, checkpoint.updates_of, checkpoint.updates, described, trained),
    )  # fmt: skip
