"""The cause that a failed job shows: which failure it is, and where processes hang."""

from __future__ import annotations

import signal
from pathlib import Path

from stretto.launch import worker
from stretto.launch.planning.layout import ProcessPlan
from stretto.launch.supervision.causes import killed
from stretto.launch.supervision.report import (
    Whereabouts,
    failure_text,
    place_in_script,
    whereabouts_text,
)


def test_headline_names_process_host_gpu_time_and_log():
    text = failure_text(
        killed(3, signal.SIGSEGV, 0.0),
        ProcessPlan(3, "b", 1, 2, (1,)),
        "node-b",
        platform="gpu",
        num_processes=4,
        elapsed_s=12.34,
        progress="step 7",
        log_note="; log: x.log",
        stderr_tail=["first", "second"],
    )
    headline, *words = text.splitlines()
    assert headline == (
        "stretto: process 3 of 4 on node-b (GPU 1) failed after 12.3 s at step 7: "
        "killed by SIGSEGV; log: x.log"
    )
    assert words == ["Its last lines on stderr:", "  first", "  second"]


STACKS = f"""Thread 0x1 (most recent call first):
  File "/lib/threading.py", line 9 in wait
  File "s.py", line 99 in helper

Current thread 0x2 (most recent call first):
  File "/lib/jax/array.py", line 5 in block
  File "s.py", line 2 in step
  File "s.py", line 7 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "{Path(str(worker.__file__))}", line 40 in main
""".splitlines()


def test_place_is_the_main_threads_innermost_line_in_the_script():
    place = place_in_script(STACKS, "s.py")
    assert place is not None
    assert (place.line, place.function) == (2, "step")
    assert place_in_script(STACKS, "other.py") is None
    assert place_in_script([], "s.py") is None


def test_rarest_place_comes_first(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("a = 1\nb = wait()\n")
    here = place_in_script([s.replace("s.py", str(script)) for s in STACKS], str(script))
    text = whereabouts_text(
        [
            Whereabouts(0, here, "?"),
            Whereabouts(1, None, "stopped by SIGSTOP", "step 5 in gather"),
            Whereabouts(2, here, "?"),
            Whereabouts(3, here, "?"),
        ]
    )
    assert text.splitlines() == [
        "  process 1: at step 5 in gather, stopped by SIGSTOP",
        f"  processes 0, 2, 3: at {script}:2: b = wait()",
    ]


def test_many_processes_at_one_place_are_told_as_ranges():
    everyone = [Whereabouts(i, None, "ended") for i in (*range(500), 501, 503, *range(600, 1000))]
    assert whereabouts_text(everyone) == "  processes 0-499, 501, 503, 600-999: ended"
