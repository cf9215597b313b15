"""The error a user can mend: one line, with the way out, and an exit status."""

CANNOT_START = 2
"""The exit status of a command that failed."""


class LaunchError(Exception):
    """A job that cannot start, or input that cannot be used.

    The command line prints its text as one line, without a traceback, and exits with
    ``status``.
    """

    def __init__(self, message: str, status: int = CANNOT_START):
        super().__init__(message)
        self.status = status
