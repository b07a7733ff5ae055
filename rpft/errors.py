"""The errors that a person can cause, and the exit codes that they end with."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something in the recipe, the data, the checkpoint or the machine that the user can change.

    The message says what happened, where (file:line, key, row), and what to do about it. The command
    line prints it without a traceback and exits with ``EXIT_BAD_INPUT``.
    """
