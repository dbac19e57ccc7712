"""Simulate steps in a process of its own, started once and kept: torch cannot unregister its device."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from ...parallel_state import BadInput
from ...recipes.recipe import Recipe
from ...simulation.kernels import Kernels
from ...simulation.ledger import StepRecord

Question = tuple[Recipe, int, Kernels | None]

#: What the process runs: all that it imports stays.
_COMMAND = f"""
import sys
from trilith.system import search_less_often
search_less_often()
from {__name__} import answer_pipe
answer_pipe(int(sys.argv[1]))
"""


class Worker:
    """Hold a process that simulates steps; ``close`` ends it. It also ends with the process that made it."""

    def __init__(self) -> None:
        self._pipe, other = Pipe()
        command = [sys.executable, "-c", _COMMAND, str(other.fileno())]
        # In a group of its own: Ctrl-C is for the process that asks, which then ends this one.
        self._process = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=2,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, process_group=0,
        )  # fmt: skip
        other.close()

    def simulate(self, recipe: Recipe, rank: int = 0, *, kernels: Kernels | None = None) -> StepRecord:
        """Return what ``simulate_step`` returns. Raises ``BadInput`` as it does, and ``RuntimeError`` if the
        process ended, for lack of memory, say.
        """
        try:
            self._pipe.send((recipe, rank, kernels))
            answer: StepRecord | BadInput = self._pipe.recv()
        except (EOFError, OSError):  # it has ended, for which it has said why
            code = self._process.wait()
            raise RuntimeError(f"the simulation of rank {rank} ended with code {code}") from None
        if isinstance(answer, BadInput):
            raise answer
        return answer

    def close(self) -> None:
        """End the process at once, whatever it is doing: nobody waits for its answer."""
        self._process.kill()
        self._pipe.close()
        self._process.wait()


def answer_all(questions: Iterable[Question], answer: Callable[[StepRecord | BadInput], object]) -> None:
    """Give, for each question, the record of the simulated step or why it was refused."""
    from ...simulation.backend import register
    from ..dry_run import plan_without_weights
    from .simulated_step import simulate_step

    register()  # before the first backward, in which autograd counts torch's devices: a plan runs one
    for recipe, rank, kernels in questions:
        try:
            planned, _ = plan_without_weights(recipe)
            answer(simulate_step(recipe, rank, planned=planned, kernels=kernels))
        except BadInput as error:
            answer(error)


def answer_pipe(number: int) -> None:
    """Answer what comes through a pipe, a descriptor; end at once where nobody can ask more."""
    pipe, questions = Connection(number), SimpleQueue[Question]()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                questions.put(pipe.recv())
        os._exit(0)  # who asked has died, or wants no answer

    Thread(target=listen, daemon=True).start()
    with suppress(OSError):  # nobody reads the answer
        answer_all(iter(questions.get, None), pipe.send)
    os._exit(0)
