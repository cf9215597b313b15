"""The command line of `stretto run`: its own options, then the script's."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.launch.planning.options import parse, split_arguments


@pytest.mark.parametrize(
    ("argv", "own", "script_arguments"),
    [
        (["s.py"], ["s.py"], []),
        (["-n", "4", "s.py", "-n", "5"], ["-n", "4", "s.py"], ["-n", "5"]),
        (["-n4", "--dry-run", "s.py", "x"], ["-n4", "--dry-run", "s.py"], ["x"]),
        (["--env=A=b", "s.py"], ["--env=A=b", "s.py"], []),
        (["--env", "A=-x", "s.py", "--", "y"], ["--env", "A=-x", "s.py"], ["--", "y"]),
        (["--timeout", "3", "--", "s.py", "--help"], ["--timeout", "3", "s.py"], ["--help"]),
    ],
)
def test_split(argv, own, script_arguments):
    assert split_arguments(argv) == (own, script_arguments)


def test_parse_all():
    own = "-n4 --processes-per gpu --timeout 2.5 --restarts 2 --log-dir logs"
    hosts = "--env A=1 --env B --hosts a:2,b:2 --dry-run"
    options = parse(f"{own} {hosts} s.py --lr 1".split())
    assert (options.num_devices, options.processes_per, options.timeout) == (4, "gpu", 2.5)
    assert (options.restarts, options.log_dir, options.env) == (2, Path("logs"), ("A=1", "B"))
    assert (options.hosts, options.dry_run) == ("a:2,b:2", True)
    assert (options.script, options.args) == ("s.py", ("--lr", "1"))


def test_parse_defaults():
    options = parse(["s.py"])
    assert (options.num_devices, options.processes_per, options.timeout) == (None, None, None)
    assert (options.env, options.args, options.dry_run) == ((), (), False)
