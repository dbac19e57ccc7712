"""Floor 6: text from a model, on one rank or many.

Offers ``generate``, which continues lists of token ids in any layout, and ``Sampling``, how tokens are
chosen.
"""

from .generate import Sampling as Sampling
from .generate import generate as generate
