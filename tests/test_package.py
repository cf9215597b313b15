"""The package as others see it: its layout, what a wheel of it holds, and its public names."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import stretto
from stretto.launch import cli

ROOT = Path(__file__).parents[1]
FOLDERS = ("distributed", "kernels", "layers", "launch", "benchmarks", "configs")
NEEDED = inspect.Parameter.empty


# --- Layout. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "src" / "stretto" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{folder}"
    module = importlib.import_module(f"stretto.{folder}")
    assert Path(str(module.__file__)).resolve() == ROOT / folder / "__init__.py"


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_name_is_not_ours(folder: str, tmp_path: Path) -> None:
    """Dask's `distributed` and Hugging Face's `kernels` may be installed; do not shadow them."""
    code = (
        f"import importlib.util as u; s = u.find_spec({folder!r});"
        " print([] if s is None else [s.origin, *(s.submodule_search_locations or ())])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(ROOT) not in found.stdout


def test_no_file_makes_the_root_or_the_tests_importable() -> None:
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_test_files_have_distinct_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# --- Wheel and source archive. --------------------------------------------------------------------


def _held_by_git() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("needs a git checkout, and this is none")
    return [name for name in listing.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, source archive) of the files that git holds, as they are in the working tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in _held_by_git():
        source, target = ROOT / name, copy / name
        if not (source.is_symlink() or source.exists()):
            continue  # deleted, not yet committed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    code = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    (sdist,) = (copy / "dist").glob("*.tar.gz")
    return wheel, sdist


def _expected_files() -> set[str]:
    """What the package consists of, as paths below `src/`."""
    held = [name for name in _held_by_git() if (ROOT / name).is_file()]
    linked = {f"stretto/{name}" for name in held if name.split("/")[0] in FOLDERS}
    own = {name.removeprefix("src/") for name in held if name.startswith("src/stretto/")}
    return linked | own


def test_wheel_holds_what_git_holds(archives: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(archives[0]).namelist())
    assert {name for name in names if ".dist-info/" not in name} == _expected_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_archive_holds_the_package(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as archive:
        names = {m.name.split("/", 1)[-1].removeprefix("src/") for m in archive if m.isfile()}
    assert _expected_files() <= names


# --- Public names: README and docs promise them. --------------------------------------------------

BACKEND = {"backend": "auto"}
MATMUL = {"out_dtype": None, "config": None, "backend": "auto"}
# Name: (arguments by position, arguments by keyword with their defaults).
OPERATIONS: dict[str, tuple[list[str], dict[str, object]]] = {
    "all_gather": (["x", "axis_name"], {"axis": 0, **BACKEND}),
    "reduce_scatter": (["x", "axis_name"], {"axis": 0, **BACKEND}),
    "all_reduce": (["x", "axis_name"], BACKEND),
    "all_to_all": (
        ["x", "axis_name"],
        {"split_axis": NEEDED, "concat_axis": NEEDED, **BACKEND},
    ),
    "all_gather_matmul": (["lhs", "rhs", "axis_name"], {"epilogue": None, **MATMUL}),
    "matmul_reduce_scatter": (["lhs", "rhs", "axis_name"], {"epilogue": None, **MATMUL}),
    "matmul_all_reduce": (["lhs", "rhs", "axis_name"], {"epilogue": None, **MATMUL}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_has_the_promised_signature(name: str) -> None:
    by_position, by_keyword = OPERATIONS[name]
    parameters = inspect.signature(getattr(stretto, name)).parameters
    kinds = {p.name: p.kind for p in parameters.values()}
    assert [n for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_OR_KEYWORD] == (
        by_position
    )
    keyword = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert {n: keyword.get(n, "is missing") for n in by_keyword} == by_keyword
    added = keyword.keys() - by_keyword.keys()
    assert all(keyword[n] is not NEEDED for n in added), "added arguments need a default"


@pytest.mark.parametrize("name", [*OPERATIONS, "simulate", "explain", "initialize"])
def test_public_name_is_listed_and_documented(name: str) -> None:
    assert name in stretto.__all__
    assert len(inspect.getdoc(getattr(stretto, name)) or "") > 40


@pytest.mark.parametrize("command", ["run", "doctor", "bench", "tune"])
def test_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert not ended.value.code
    assert command in capsys.readouterr().out


def test_version_is_the_wheels(archives: tuple[Path, Path]) -> None:
    assert archives[0].name.startswith(f"stretto-{stretto.__version__}-")


TRACES = """
{imports}

traces = []

@jax.jit
def product(x):
    traces.append(x.shape)
    rows, columns = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(None, "x")
    multiply = lambda x, y: st.all_gather_matmul(x, y, "x")
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    return jax.shard_map(multiply, mesh=mesh, in_specs=(rows, columns), out_specs=columns)(x, x)

for _ in range(2):
    product(jax.numpy.ones((8, 8)))
print(len(traces))
"""


@pytest.mark.parametrize(
    "imports",
    ["import jax\nimport stretto as st", "import stretto as st\nst.initialize()\nimport jax"],
)
def test_function_that_uses_an_operation_first_is_traced_once(imports: str) -> None:
    code = TRACES.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stdout + done.stderr
