"""Scripts that do what nobody expects with descriptors, children, hooks and text."""

from __future__ import annotations

import pytest

from stretto.launch.supervision.records import parse_record

LOCAL = ("--launcher", "local", "-n", "1")


def test_a_forked_child_does_not_end_the_job(run_job):
    """Nor does what a script writes where its process tells the agent of itself."""
    script = """
import os, sys
for end in ("raise ValueError('of a child')", "sys.exit(3)", "sys.exit(0)"):
    if (child := os.fork()) == 0:
        exec(end)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
fd = int(os.environ["STRETTO_RECORD"].partition(",")[0])
for line in (b"3", b"[1]", b"{}", b'{"program": 5}', b'{"status": "x"}'):
    os.write(fd, line + b"\\n")
print("end")
"""
    result = run_job(script, *LOCAL)
    assert (result.status, result.stdout) == (0, "[0] 1\n[0] 3\n[0] 0\n[0] end\n")
    assert "ValueError: of a child" in result.stderr and "failed" not in result.stderr


def test_a_script_may_close_all_descriptors(run_job, tmp_path):
    """As a daemon does; then their numbers are those of files of its own."""
    script = """
import os, sys
import stretto.launch
stretto.launch.progress(1)
os.closerange(3, 100)
files = [open(f"own{i}", "w") for i in range(20)]
stretto.launch.progress(2, "after that")
sys.exit(4)
"""
    result = run_job(script, *LOCAL)
    assert result.status == 4 and "Traceback" not in result.stderr
    assert "exit status 4" in result.last_line()
    assert {(tmp_path / f"own{i}").read_text() for i in range(20)} == {""}


def test_a_failure_with_odd_text_and_a_broken_hook(run_job):
    script = """
import sys
def hook(*_): raise RuntimeError("the hook is broken, too")
sys.excepthook = hook
raise ValueError("\\udcff\\ud800" + 300_000 * "long " + "the end")
"""
    result = run_job(script, *LOCAL)
    assert result.status == 1
    head, report = result.stderr.split("stretto: process 0 of 1", 1)
    assert "ValueError: " in head and "ValueError: " in report
    assert len(report) < 150_000 and " characters, which stderr and the log have" in report
    assert report.rstrip().endswith("long the end")


@pytest.mark.parametrize(
    "line",
    [
        *("", "3", "[1]", "{", "{}", "[" * 9999, '{"program": 5}', '{"status": 1}'),
        '{"program": {"text": "t", "digest": "d", "processes": ["0"]}}',
        '{"status": "1", "traceback": ""}',
    ],
)
def test_what_is_no_record(line):
    assert parse_record(line) is None


@pytest.mark.parametrize(
    "line",
    [
        *('{"alone": true}', '{"finished": true}', '{"joins": true}'),
        '{"status": 1, "traceback": ""}',
        '{"program": {"text": "t", "digest": "d", "processes": [0, 1]}}',
    ],
)
def test_what_is_a_record(line):
    assert parse_record(line) is not None
