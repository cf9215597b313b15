"""A hint on options after a script that are spelt as the command's own: there they are the script's.

A script may have an option of that name, so it is no error. Commands give the hint at the start for
options without which they do another thing, and for all others where they fail.
"""  # noqa: E501

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence

_ALIASES = {"--n": "-n", "--num-devices": "-n", "--devices": "-n"}


def hint(
    command: str, argv: Sequence[str], script_arguments: Sequence[str], names: Collection[str]
) -> None:
    """Says on stderr which options of these names are in the script's arguments alone.

    Args:
      command: "stretto run" and such.
      argv: its command line, of which `script_arguments` are the last words.
      script_arguments: what follows the script.
      names: of options of the command.
    """
    before = {_name(word) for word in argv[: len(argv) - len(script_arguments)]}
    wanted = {_name(name) for name in names} - before
    found = [word for word in script_arguments if _name(word) in wanted]
    if found:
        listed = ", ".join(dict.fromkeys(found))
        print(
            f"{command}: {listed} is the script's, since it follows it; options of {command} go"
            " before the script",
            file=sys.stderr,
            flush=True,
        )


def _name(word: str) -> str:
    """The option that a word of a command line is, without a value: "-n" of "-n4"."""
    name = re.sub(r"^-n\d+$", "-n", word.partition("=")[0])
    return _ALIASES.get(name, name)
