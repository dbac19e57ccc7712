"""Offer torch's tensors without numbers; apart, because importing them takes time."""

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
