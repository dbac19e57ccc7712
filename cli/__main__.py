"""``python -m trilith.cli``: the command line where no console script is at hand, as in a launched rank."""

from . import main

main()
