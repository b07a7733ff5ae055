"""The errors that a person can cause, and the exit codes that they end with."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_STALLED = 4
EXIT_DISK = 5
EXIT_NOT_FINITE = 6
EXIT_SIGNAL = 128
"""Plus the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for a closed terminal."""
EXIT_INTERRUPTED = EXIT_SIGNAL + 2


class UserError(ValueError):
    """Something in the recipe, the data, the checkpoint or the machine that the user can change.

    The message says what happened, where (file:line, key, row), and what to do about it. The command
    line prints it without a traceback and exits with ``EXIT_BAD_INPUT``.
    """


class RunFault(RuntimeError):
    """A run ended before its time. The cause is chained; the message says where it stands and how to go on."""

    def __init__(self, message: str, exit_code: int, resumable: bool = False) -> None:
        """``resumable``: whether there is a checkpoint: then the run is refused without --resume."""
        super().__init__(message)
        self.exit_code, self.resumable = exit_code, resumable
