"""Hostfiles as people write them."""

from __future__ import annotations

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.planning.hosts import parse_hostfile, parse_hosts

UGLY = (
    "# a cluster\r\n"
    "\r\n"
    "a slots=2 max_slots=4   # trailing\r\n"
    "\t b\tslots = 3\r\n"
    "   \r\n"
    "user@c\r\n"
    "fe80::1 slots=2\r\n"
    "[fe80::2]:3\r\n"
    "d:2\r\n"
    "a slots=1\r\n"
    "b slots=5 max-slots=4"
)


def pairs(hosts):
    return [(host.name, host.num_devices) for host in hosts]


def test_everything_at_once():
    assert pairs(parse_hostfile(UGLY, "f", 8)) == [
        ("a", 3),
        ("b", 4),
        ("user@c", 8),
        ("fe80::1", 2),
        ("fe80::2", 3),
        ("d", 2),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots=x", "f, line 2: 'slots=x' needs a number of at least 1"),
        ("a slots=0", "f, line 1: 'slots=0' needs"),
        ("a\n\nb sltos=2", "f, line 3: 'sltos=2' is not slots=N"),
        ("a:b", "f, line 1: 'a:b' needs a number"),
        ("[fe80::1", r"is not \[ADDRESS\]"),
        ("# nothing\n\n", "f names no host"),
        ("a\n:2", "f, line 2: ':2' names no host"),
        ("user@ slots=2", "f, line 1: 'user@' names no host"),
        ("-oProxyCommand=x slots=2", "f, line 1: '-oProxyCommand=x' names no host"),
        ("[]:2", r"f, line 1: '\[\]:2' names no host"),
    ],
)
def test_errors_name_the_line(text, words):
    with pytest.raises(LaunchError, match=words):
        parse_hostfile(text, "f", 1)


def test_list():
    assert pairs(parse_hosts("a:4, b:2,c", 8)) == [("a", 4), ("b", 2), ("c", 8)]


def test_one_host_under_several_names(monkeypatch):
    """mpirun refuses them, in words that do not say so."""
    monkeypatch.setattr(network, "host_name", lambda: "here.org")
    named = "Node1:1,node1.x.org:2,10.0.0.1:1,10.0.0.2:1,me@here:3,localhost:1,127.0.0.1:2,node1:4"
    found = parse_hosts(f"{named},10.0.0.1:5,here.org:1", {"unused": 1})
    assert pairs(found) == [("Node1", 7), ("10.0.0.1", 6), ("10.0.0.2", 1), ("me@here", 7)]
    assert pairs(parse_hosts("a,b.x,a.x,b.x.y", {"a": 2, "b.x": 3, "b.x.y": 1})) == [
        ("a", 4),
        ("b.x", 3),
        ("b.x.y", 1),
    ]
