"""What goes wrong for a user, said in one line, with the exit code of the command that meets it."""


class BadInput(ValueError):
    """Input, configuration or layout that cannot be used.

    The message reads ``<where>: <key>: expected X, found Y. <what to do>``. Commands print it as one line and
    exit with ``exit_code``; nothing has been written by then.
    """

    exit_code = 2

    def __init__(
        self,
        where: object,
        key: object = None,
        *,
        expected: object = None,
        found: object = None,
        todo: str = "",
    ) -> None:
        place = f"{where}" if key is None else f"{where}: {key}"
        facts = [f"expected {expected}"] if expected is not None else []
        facts += [f"found {found}"] if found is not None else []
        self.where, self.key, self.expected, self.found, self.todo = where, key, expected, found, todo
        message = f"{place}: {', '.join(facts)}" if facts else place
        super().__init__(f"{message}. {todo}" if todo else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.where, self.key, self.expected, self.found, self.todo))


class BadCheckpoint(BadInput):
    """A checkpoint directory that is absent, incomplete, altered, or of another model."""

    exit_code = 4


class PeerFailed(RuntimeError):
    """Another rank, or a collective with it, failed."""

    exit_code = 3


def _rebuild(
    kind: type[BadInput], where: object, key: object, expected: object, found: object, todo: str
) -> BadInput:
    return kind(where, key, expected=expected, found=found, todo=todo)
