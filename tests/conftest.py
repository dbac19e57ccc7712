"""For all tests: one thread, as the workers have; hypothesis draws the same examples in each run, untimed."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("trilith", deadline=None, derandomize=True)
settings.load_profile("trilith")
