"""Imports point one way: distributed <- kernels <- benchmarks and layers, and launch beside them.

Each check takes the source as text, so that the tests at the end can show that it catches a breach.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("distributed", "kernels", "layers", "launch", "benchmarks", "configs")

# For each folder: which of the others it may import, and which packages but the standard library.
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "distributed": (set(), {"jax", "numpy", "ml_dtypes"}),
    "kernels": ({"distributed"}, {"jax", "numpy", "msgspec"}),
    "layers": ({"distributed", "kernels"}, {"jax", "flax"}),
    "launch": ({"distributed"}, {"jax", "mpi4py", "tyro", "msgspec", "rich"}),
    "benchmarks": (
        {"distributed", "kernels", "launch", "configs"},
        {
            "jax",
            "numpy",
            "scipy",
            "tyro",
            "msgspec",
            "rich",
            "matplotlib",
            "pynvml",
            "torch",
            "ml_dtypes",
        },
    ),
    "configs": (set(), set()),
}
# The command line hands `stretto bench` and `stretto tune` over inside functions, when asked for.
LAZY = {"launch": {"benchmarks"}}
USES_PUBLIC_NAMES = {"benchmarks"}  # `import stretto as st`, as a model author would
PRIVATE_JAX = "distributed/private_jax/"
STANDARD_LIBRARY_ONLY = (
    "launch/worker.py"  # runs the user's script, which pays for no import of ours
)
OF_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
READS_ENVIRONMENT = {
    "launch/environment.py",
    "distributed/settings.py",
    STANDARD_LIBRARY_ONLY,
}


def imports(source: str, path: str) -> Iterator[tuple[str, bool]]:
    """Every module that `source` (a file at `path`) imports, and whether a function does so."""
    package = ["stretto", *Path(path).parts[:-1]]

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{module}.{alias.name}", lazy) for alias in node.names)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    return walk(ast.parse(source), False)


def breaches(source: str, path: str) -> list[str]:
    """What the file at `path` (from the root) does that the arrows forbid."""
    folder = path.split("/")[0]
    ours, packages = MAY_IMPORT[folder]
    found = []
    for module, lazy in imports(source, path):
        top, *rest = module.split(".")
        if top == "stretto":
            target = rest[0] if rest else ""
            allowed = {folder, "__version__"} | ours | (LAZY.get(folder, set()) if lazy else set())
            public = target not in FOLDERS and folder in USES_PUBLIC_NAMES
            if target not in allowed and not public:
                found.append(f"{path} imports {module}")
        elif top in FOLDERS:
            found.append(f"{path} imports {module} under its bare name")
        elif top not in packages | set(sys.stdlib_module_names) and not path.startswith(
            PRIVATE_JAX
        ):
            found.append(f"{path} imports {module}")
    return found


def private_jax(source: str, path: str) -> list[str]:
    """Where the file at `path` touches private JAX, by an import or by an attribute."""
    found = [
        f"{path} imports {module}"
        for module, _ in imports(source, path)
        if module.startswith(("jax._src", "jaxlib"))
    ]
    tree = ast.parse(source)
    of_jax = set(_names_of_jax(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_of_jax = isinstance(node.value, ast.Name) and node.value.id in of_jax
        if node.attr == "_src" or (is_of_jax and not node.attr.startswith("__")):
            found.append(f"{path}:{node.lineno} reaches into {node.attr}")
    return found


def _names_of_jax(tree: ast.AST) -> Iterator[str]:
    """The names under which a file has modules and functions of JAX."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jax":
                    yield alias.asname or "jax"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            yield from (alias.asname or alias.name for alias in node.names)


def environment_reads(source: str, path: str) -> list[str]:
    """Where the file at `path` reads or changes the environment by name."""
    tree = ast.parse(source)
    found = [
        f"{path} imports {module}"
        for module, _ in imports(source, path)
        if module in {f"os.{name}" for name in OF_ENVIRONMENT}
    ]
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    return found + [
        f"{path}:{node.lineno} uses os.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in OF_ENVIRONMENT
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]


def names_no_version(source: str) -> bool:
    """Whether a file's docstring leaves out the versions of JAX that it was checked with."""
    said = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return not re.search(r"[Cc]hecked on (JAX )?\d+\.\d+\.\d+", said)


# For each room of a folder, and each file beside the rooms: which of the others it may import.
ROOMS: dict[str, dict[str, set[str]]] = {
    "distributed": {
        "by_name": set(),
        "errors": set(),
        "settings": set(),
        "compiling": set(),
        "simulating": {"targets"},
        "sites": set(),
        "targets": set(),
        "xla_flags": set(),
        "private_jax": {"settings", "xla_flags"},
        "devices": {"private_jax", "settings"},
        "memory": {"devices", "errors", "private_jax", "settings", "sites"},
        "recording": set(),
        "primitives": {"devices", "memory", "private_jax", "recording", "sites", "xla_flags"},
        "tools": {
            *("compiling", "primitives", "private_jax", "settings", "simulating", "simulator"),
            *("by_name", "sites"),
        },
        "team": {"devices", "primitives", "private_jax"},
        "schedule": set(),
        "copies": {"by_name", "schedule", "team"},
        "semaphores": {"by_name", "memory", "primitives", "private_jax", "settings", "team"},
        "handshake": {"memory", "semaphores", "team"},
        "kernel": {  # not the simulator: a program that does not simulate does not import it
            *("arguments", "devices", "handshake", "memory", "primitives", "residency"),
            *("semaphores", "simulating", "team", "tools"),
        },
        "arguments": {"residency", "semaphores", "team"},
        "residency": {"by_name", "compiling", "settings", "simulating"},
        "posting": {
            *("arguments", "by_name", "devices", "kernel", "memory", "primitives", "residency"),
            *("settings", "team"),
        },
        "simulator": {
            *("by_name", "errors", "memory", "primitives", "private_jax", "simulating", "sites"),
            *("targets",),
        },
    },
    "distributed/simulator": {
        "reports": set(),
        "state": {"reports"},
        "refusals": {"reports", "state"},
        "program": {"reports"},
        "rules": {"program", "refusals", "reports", "state"},
        "scheduler": {"reports", "state"},
        "semaphore_checks": {"reports", "state"},
        "checks": {"refusals", "reports", "semaphore_checks", "state"},
        "machine": {"checks", "program", "reports", "scheduler", "state"},
        "rendezvous": {"reports"},
        "settings": {"machine", "reports", "scheduler", "state"},
        "launch": {
            *("machine", "program", "refusals", "reports", "rules", "scheduler", "settings"),
            *("state",),
        },
        "context": {"launch", "machine", "refusals", "rendezvous", "reports", "settings", "state"},
    },
    "kernels": {
        "problem": set(),
        "xla": {"problem"},
        "attention": {"problem", "xla"},
        "operation": {"problem"},
        "engine": {"problem"},
        "collectives": {"operation", "problem"},
        "fused": {"engine", "collectives", "operation", "problem", "xla"},
        "nodes": {"fused", "collectives", "operation", "problem", "xla"},
        "choice": {"operation", "problem"},
        "operations": {
            *("choice", "nodes", "fused", "collectives", "operation", "problem", "xla"),
            *("attention",),
        },
    },
    "layers": {
        "parallel": set(),
        "placement": {"parallel"},
        "products": {"parallel"},
        "experts": {"linear", "parallel", "placement", "products"},
        "linear": {"parallel", "placement", "products"},
        "feed_forward": {"linear", "parallel", "placement", "products"},
        "attention": {"linear", "parallel", "placement", "products"},
    },
    "launch": {
        "errors": set(),
        "environment": {"errors"},
        "worker": set(),
        "planning": {"environment", "errors"},
        "process": {"environment", "errors", "planning"},
        "supervision": {"environment", "errors", "planning", "process"},
        "doctor": {"environment", "errors", "planning"},
        "commands": {
            *("environment", "errors", "worker", "planning", "process", "supervision", "doctor"),
        },
        "cli": {"errors"},  # finds the commands when asked for
        "__main__": {"cli"},
    },
    "benchmarks": {
        "errors": set(),
        "files": {"errors"},
        "cases": {"errors"},
        "peers": {"errors", "cases"},
        "measurements": {"errors", "files", "cases", "peers"},
        "timing": {"errors", "files", "cases", "peers", "measurements"},
        "targets": {"errors", "files", "cases"},
        "predict": {"errors", "files", "cases", "measurements", "timing", "targets"},
        "scaling": {"errors", "cases", "measurements", "predict", "targets"},
        "pages": {
            "errors",
            "files",
            "cases",
            "peers",
            "measurements",
            "predict",
            "targets",
            "scaling",
        },
        "sweeps": {"errors", "cases", "peers", "measurements", "timing", "pages"},
        "never_slower": {"errors", "cases", "peers", "measurements", "timing", "pages"},
        "commands": {
            *("errors", "cases", "peers", "measurements", "timing", "predict", "pages", "sweeps"),
            *("files", "targets", "links", "scaling", "never_slower"),
        },
        "links": {"errors", "cases", "measurements", "timing", "targets"},
        "across_nodes": {  # a program, as the commands are
            *("errors", "cases", "peers", "measurements", "timing", "sweeps", "commands"),
            "files",
        },
        "__main__": {"commands"},
    },
}


def rooms_entered(source: str, path: str) -> list[str]:
    """Where the file at `path` imports from a room of a folder that its own room may not."""
    found = []
    for folder, rooms in ROOMS.items():
        if not path.startswith(f"{folder}/"):
            continue
        room = path.removeprefix(f"{folder}/").split("/")[0].removesuffix(".py")
        package = f"stretto.{folder.replace('/', '.')}."
        for module, _ in imports(source, path):
            entered = module.removeprefix(package).split(".")[0]
            may_enter = {room} | rooms.get(room, set(rooms) if room == "__init__" else set())
            if module.startswith(package) and entered not in may_enter:
                found.append(f"{path} imports {module}")
    return found


def files(folder: str) -> Iterator[tuple[str, str]]:
    """(path from the root, source) of the files of a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_keep_the_arrows(folder: str) -> None:
    found = []
    for path, source in files(folder):
        found += breaches(source, path)
        private = private_jax(source, path)
        if not path.startswith(PRIVATE_JAX):
            found += private
        elif private and names_no_version(source):
            found.append(f"{path} uses private JAX: it must say which versions it was checked on")
        if path not in READS_ENVIRONMENT:
            found += environment_reads(source, path)
    assert not found, "\n".join(found)


def test_worker_needs_only_the_standard_library() -> None:
    source = (ROOT / STANDARD_LIBRARY_ONLY).read_text()
    modules = {module.split(".")[0] for module, _ in imports(source, STANDARD_LIBRARY_ONLY)}
    assert modules <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", ["tests", "examples"])
def test_nothing_is_imported_under_a_bare_name(folder: str) -> None:
    bare = [
        f"{path}: {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module, _ in imports(path.read_text(), "tests/x.py")
        if module.split(".")[0] in FOLDERS
    ]
    assert not bare


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("distributed/x.py", "from stretto.kernels import matmul"),
        ("distributed/x.py", "import scipy"),
        ("distributed/simulator/x.py", "def f():\n    from stretto.launch import environment"),
        ("distributed/x.py", "from ..kernels import matmul"),
        ("kernels/x.py", "import stretto.launch.run"),
        ("kernels/x.py", "from stretto import benchmarks"),
        ("kernels/x.py", "from stretto.layers import linear"),
        ("layers/x.py", "from stretto.benchmarks import command"),
        ("launch/x.py", "from stretto.kernels import matmul"),
        ("launch/x.py", "from stretto.benchmarks import command"),
        ("benchmarks/x.py", "from kernels import matmul"),
        ("configs/__init__.py", "import jax"),
    ],
)
def test_breach_is_caught(path: str, source: str) -> None:
    assert breaches(source, path)


def test_lazy_hand_over_is_allowed() -> None:
    assert not breaches("def f():\n    from stretto.benchmarks import command", "launch/x.py")


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import core",
        "import jaxlib",
        "def f():\n    from jaxlib.mlir import ir",
        "import jax\njax._src.core",
        "from jax.experimental.pallas import mosaic_gpu as plgpu\nplgpu._inner()",
        "import jax.numpy as jnp\njnp._convert",
    ],
)
@pytest.mark.parametrize("path", ["kernels/x.py", "distributed/primitives/x.py"])
def test_private_jax_is_caught(source: str, path: str) -> None:
    assert private_jax(source, path) and not path.startswith(PRIVATE_JAX)


def test_public_jax_is_none() -> None:
    assert not private_jax("import jax\njax.__version__\nself._x = jax.numpy", "kernels/x.py")


def test_private_jax_without_a_version_is_caught() -> None:
    assert names_no_version('"""Private JAX."""')
    assert not names_no_version('"""Private JAX, checked\non 0.11.2."""')


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "import os as system\nsystem.environ",
        "from os import environ",
        "import os\nos.putenv('A', '1')",
    ],
)
def test_environment_read_is_caught(source: str) -> None:
    assert environment_reads(source, "kernels/x.py")


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name in ROOMS])
def test_files_keep_to_their_rooms(folder: str) -> None:
    found = [entered for path, source in files(folder) for entered in rooms_entered(source, path)]
    assert not found, "\n".join(found)


def test_a_way_back_up_is_found() -> None:
    source = "from stretto.kernels.operations import matmuls"
    assert rooms_entered(source, "kernels/engine/fuse.py")
    assert not rooms_entered(source, "kernels/operations/collectives.py")
    source = "from stretto.distributed.simulator.rules import copy"
    assert rooms_entered(source, "distributed/kernel.py")
    assert rooms_entered(source, "distributed/simulator/state/copies.py")


def test_a_program_that_does_not_simulate_does_not_import_the_simulator() -> None:
    program = "import jax, stretto, sys; stretto.all_reduce, stretto.explain"
    program += "; assert not any('simulator' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
