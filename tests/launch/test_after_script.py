"""Options after the script that are spelt as the command's own: a hint says whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch import cli
from stretto.launch.commands.after_script import hint


@pytest.mark.parametrize(
    ("argv", "count", "said"),
    [
        (["s.py", "--n", "4"], 2, "--n"),
        (["s.py", "-n", "4"], 2, "-n"),
        (["s.py", "-n4"], 1, "-n4"),
        (["s.py", "--num-devices=4", "x"], 2, "--num-devices=4"),
        (["s.py", "--dry-run", "-n", "2", "-n", "3"], 5, "--dry-run, -n"),
        (["-n", "2", "s.py", "--dry-run", "-n", "2"], 3, "--dry-run"),
        (["-n4", "s.py", "--num-devices", "4"], 2, None),
        (["s.py"], 0, None),
        (["s.py", "n", "--never", "-nx", "--lr=0.1"], 4, None),
    ],
)
def test_options_that_the_script_alone_has(capsys, argv, count, said):
    hint("stretto run", argv, argv[len(argv) - count :], ("-n", "--dry-run"))
    line = (
        f"stretto run: {said} is the script's, since it follows it; options of stretto run go"
        " before the script\n"
    )
    assert capsys.readouterr().err == (line if said else "")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("")
    return "script.py"


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_says_it_of_other_options_where_it_fails(run_job, fails):
    args = ("--grace", "3", *["--lr"] * fails)
    done = run_job(
        "import sys\nsys.exit(len(sys.argv) > 3)", "-n", "1", "--platform", "cpu", args=args
    )
    assert done.status == fails
    assert ("stretto run: --grace is the script's, since it" in done.stderr) == fails


def test_a_job_of_one_device_says_why(capfd, script):
    assert cli.main(["run", "--platform", "cpu", "--dry-run", script, "--n", "4"]) == 0
    assert "stretto run: --n is the script's, since it" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "compile"])
def test_other_commands_with_a_script(capfd, script, command):
    cli.main([command, script, "-n", "2"])
    assert f"stretto {command}: -n is the script's, since it" in capfd.readouterr().err
