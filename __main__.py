"""``python -m trilith``: the command line where no console script is at hand."""

from .cli import main

main()
