"""Simulate steps in a process of its own, started once and kept: torch cannot unregister its device.

Questions and answers are lines of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO

from ...parallel_state import BadInput
from ...recipes.recipe import Recipe, parse_recipe
from ...simulation.record import StepRecord
from ...storage.strict_json import parse_object

#: What the process runs: all that it imports stays.
_COMMAND = f"""
from trilith.system import search_less_often
search_less_often()
from {__name__} import answer_pipe
answer_pipe()
"""


class Worker:
    """Hold a process that simulates steps; ``close`` ends it. It also ends with the process that made it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _COMMAND]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # In a group of its own: Ctrl-C is for the process that asks, which then ends this one.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )

    def simulate(self, recipe: Recipe, rank: int = 0, *, kernels: str | None = None) -> StepRecord:
        """Return what ``simulate_step`` returns. Raises ``BadInput`` as it does, and ``RuntimeError`` if the
        process ended, for lack of memory, say.
        """
        raw = recipe.model_dump(mode="json", exclude_unset=True, by_alias=True)
        question = {"recipe": raw, "rank": rank, "kernels": kernels}
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):  # it has ended, for which it has said why
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulation of rank {rank} ended with code {self._process.wait()}")
        answer: dict[str, Any] = parse_object(line, "the simulation")
        if "refused" in answer:
            raise BadInput(answer["refused"])
        return StepRecord.of_plain(answer)

    def close(self) -> None:
        """End the process at once, whatever it is doing: nobody waits for its answer."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


def answer_all(questions: Iterable[str], answers: TextIO) -> None:
    """Write, for each question, the record of the simulated step or why it was refused."""
    from ...simulation.backend import register
    from ..dry_run import plan_without_weights
    from .simulated_step import simulate_step

    register()  # before the first backward, in which autograd counts torch's devices: a plan runs one
    for line in questions:
        question = parse_object(line.encode(), "a question")
        recipe: Any = question["recipe"]
        rank: Any = question["rank"]
        kernels: Any = question["kernels"]
        try:
            checked = parse_recipe(recipe)
            planned = plan_without_weights(checked)[0]
            answer = simulate_step(checked, rank, planned=planned, kernels=kernels).plain()
        except BadInput as error:
            answer = {"refused": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_pipe() -> None:
    """Answer on standard output what comes through standard input; end at once where nobody can ask more."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints is no answer
    questions: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            questions.put(line)
        os._exit(0)  # who asked has died, or wants no answer

    Thread(target=listen, daemon=True).start()
    with suppress(BrokenPipeError):
        answer_all(iter(questions.get, None), pipe)
    os._exit(0)  # nobody reads what is left in the pipe
