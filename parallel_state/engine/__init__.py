"""Use torch's private names, in this room only, of versions of torch that are known to have them.

Offers what many rooms use: collectives that ``torch.compile`` can trace, and what this rank has of a tensor.
Kernels, access to FSDP's internals, to autograd and to the compiler are imported from their files.
"""
# mypy: implicit-reexport

from . import accelerator, supported_torch
from .collectives import all_gather, all_reduce, reduce_scatter
from .fully_sharded import fsdp_modules, is_sharded, watched
from .local_tensors import is_dtensor, local_data, map_tensors, tensors_in, to_empty
