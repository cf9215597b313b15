"""Jobs that GPU tests start with `stretto run`: the first process says in JSON what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from folders import HELPERS, PYTHONPATH
from patience import shared


def run(
    script: str, *arguments: str, options: tuple[str, ...], limit_s: float, nccl: str | None = None
) -> dict[str, Any]:
    """Runs `script`, a file of this folder, in a job that may take `limit_s` seconds.

    Args:
      script: its name.
      *arguments: the script's.
      options: of `stretto run`.
      limit_s: seconds after which the job is ended.
      nccl: an NCCL library to use in place of the environment's.

    Returns:
      The last line of JSON that a process wrote.
    """
    preload = ["--env", f"LD_PRELOAD={nccl}"] if nccl else []
    command = [
        *(sys.executable, "-m", "stretto.launch", "run", "--timeout", str(limit_s)),
        *("--start-timeout", str(shared(60))),
        *(*options, *preload, str(HELPERS / script), *arguments),
    ]
    done = subprocess.run(
        command,
        env=os.environ | PYTHONPATH,
        capture_output=True,
        text=True,
        timeout=limit_s + 60,
        check=False,
    )
    said = [text for line in done.stdout.splitlines() if (text := line.partition("] ")[2])]
    found = [text for text in said if text.startswith("{")]
    assert found, f"status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return json.loads(found[-1])
