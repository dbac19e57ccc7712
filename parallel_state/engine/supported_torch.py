"""Refuse a torch whose private names nobody has looked at, as a test of ``tests/test_house.py`` does."""

import importlib

import torch

#: The first supported version of torch, and the first one after them, as ``pyproject.toml`` states them.
SINCE, BEFORE = (2, 11), (2, 16)


def require_supported(version: str = torch.__version__) -> None:
    """Raise ``ImportError`` for another version of torch than those that the tests have seen."""
    if not SINCE <= tuple(map(int, version.split(".")[:2])) < BEFORE:
        since, last = f"{SINCE[0]}.{SINCE[1]}", f"{BEFORE[0]}.{BEFORE[1] - 1}"
        raise ImportError(f"torch {version}: trilith needs torch {since} to {last}")


require_supported()
importlib.import_module("torch.distributed._functional_collectives")  # what collectives are on other devices
