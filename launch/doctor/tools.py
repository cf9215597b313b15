"""Running other programs for the doctor: bounded in time, and never raising."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.launch import environment


@dataclass(frozen=True)
class Output:
    """What a program wrote and how it ended; ``status`` is None if it did not run to an end."""

    status: int | None
    stdout: str
    stderr: str

    def as_json(self) -> dict[str, Any]:
        """The JSON that it printed; without any, its last words as an ``error``."""
        try:
            return json.loads(self.stdout)
        except ValueError:
            return {"error": self.last_words()}

    def last_words(self) -> str:
        """Its last line on stderr, for a finding."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else f"exit status {self.status}"


def ask(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Output:
    """Run a program to its end, with additions to the environment.

    A program that is missing or too slow gives a status of None and a reason in ``stderr``.
    """
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=None if env is None else {**environment.current(), **env},
        )
    except subprocess.TimeoutExpired:
        return Output(None, "", f"{argv[0]} gave no answer within {timeout_s:g} s")
    except OSError as error:
        return Output(None, "", f"{argv[0]}: {error.strerror}")
    return Output(done.returncode, done.stdout, done.stderr)
