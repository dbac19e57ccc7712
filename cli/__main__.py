"""Run the command line as ``python -m trilith.cli`` if there is no console script, as in a launched rank."""

from . import main

main()
