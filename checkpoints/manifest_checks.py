"""Check that a manifest's statements are possible: a known model, cut as its layout says, with these
tensors.
"""

from __future__ import annotations

from pydantic import ValidationError

from ..parallel_state import BadCheckpoint, BadInput, from_validation
from ..storage.file_names import MANIFEST
from ..storage.strict_json import shown
from .source import Source
from .stated_progress import check_moments, check_progress


def check_model(source: Source) -> None:
    """Refuse a checkpoint whose stated model does not exist, does not fit its layout, or has other tensors,
    and one whose progress cannot be.
    """
    manifest, where = source.manifest, source.path / MANIFEST
    assert manifest is not None, source.path
    stated_split = manifest.state.get("split")
    split = [n for n in stated_split if isinstance(n, int)] if isinstance(stated_split, list) else None
    try:
        family, config = source.family, source.model_config
        (stated,) = family.declarations(config)
        if manifest.module is None:  # a module states its own layout and no other
            family.declarations(config, manifest.layout, split=split)
    except BadInput as bad:
        raise BadCheckpoint(where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
    except ValidationError as bad:
        raise from_validation(where, bad, spelled="adapter.lora.{}".format, kind=BadCheckpoint) from None
    wanted = {name: declaration.shape for name, declaration in stated.items()}
    found = {n: whole.shape for n, whole in source.catalog.items() if not n.startswith("optimizer.")}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, there = (
                "no such tensor" if one is None else list(one) for one in (wanted.get(name), found.get(name))
            )
            raise BadCheckpoint(where, shown(name), expected=expected, found=there)
    trained = [name for name, one in stated.items() if not one.buffer and name not in manifest.frozen]
    check_progress(manifest, where)
    check_moments(manifest, trained, where)
