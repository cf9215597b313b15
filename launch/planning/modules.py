"""The file of a module that ``stretto run -m`` names, found without importing anything."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from stretto.launch.errors import LaunchError


def module_file(name: str, folder: Path) -> Path:
    """The file that ``python -m name`` would run in ``folder``; a package's is its ``__main__``.

    Raises:
      LaunchError: there is no such module, or it is not made of Python source.
    """
    path: list[str] | None = [str(folder), *sys.path]
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            raise LaunchError(f"-m {name}: there is no module {'.'.join(parts[:count])!r} here")
        locations = spec.submodule_search_locations
        path = None if locations is None else list(locations)
        if path is None and count < len(parts):
            raise LaunchError(f"-m {name}: {'.'.join(parts[:count])!r} is not a package")
    if path is not None:
        return module_file(f"{name}.__main__", folder)
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        raise LaunchError(f"-m {name}: it has no Python source; name another module")
    return Path(str(spec.origin))
