"""A machine with several MPIs: Debian's Open MPI 4.1 beside those of the environments. Each job has to get its own."""

from __future__ import annotations

import glob
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "tests" / "slurm" / "programs" / "report.py"
DIGITS = ROOT / "examples" / "pytorch_digits.py"
DEBIAN_MPIRUN = "/usr/bin/mpirun.openmpi"

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def libmpi() -> str:
    """The library of Debian's Open MPI. Its number, 40, is also that of Open MPI 5."""
    found = glob.glob("/usr/lib/*/libmpi.so.40")
    if not (found and os.path.exists(DEBIAN_MPIRUN)):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Open MPI of Debian here: apt install openmpi-bin")
    return found[0]


def run(*command, **environ) -> subprocess.CompletedProcess[str]:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        list(map(str, command)), env={**os.environ, **as_root, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_the_digits_train_under_debians_mpirun(libmpi):
    options = ["-np", "2", "--bind-to", "none", "--oversubscribe", "-x", "MPI4PY_LIBMPI"]
    done = run(
        DEBIAN_MPIRUN, *options, sys.executable, DIGITS, "--epochs", "1", "--batch-size", "64", MPI4PY_LIBMPI=libmpi
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"accuracy (\d+\.\d) %, \d+ samples/s over 2 ranks", done.stdout)
    assert float(accuracy) > 30  # of ten digits, after eleven steps


def test_an_environment_without_an_mpi_takes_debians(libmpi, tmp_path):
    venv.create(tmp_path, symlinks=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    python = tmp_path / "bin" / "python"
    code = "from mpi4py import MPI; import hvdlite as hvd; hvd.init(); print(MPI.Get_library_version(), hvd.size())"
    done = run(
        python,
        "-m",
        "hvdlite.launch",
        "-np",
        "2",
        "--verbose",
        "--no-label",
        "python",
        "-c",
        code,
        PATH="/usr/bin:/bin",
    )
    assert done.returncode == 0, done.stderr
    assert "hvdrun: Open MPI 4: /usr/bin/mpirun " in done.stderr
    assert len(re.findall(r"^Open MPI v4\.1\..* 2$", done.stdout, re.MULTILINE)) == 2, done.stdout


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_hvdrun_takes_the_mpirun_of_its_environment(libmpi, flavour, request):
    mpi = request.getfixturevalue(flavour)
    done = run(mpi.python, "-m", "hvdlite.launch", "-np", "1", "--print-command", "true", PATH="/usr/bin:/bin")
    assert f"{mpi.mpirun} " in done.stdout, done.stderr


def test_ranks_of_open_mpi_under_the_mpirun_of_mpich_say_what_is_wrong(openmpi, mpich):
    done = run(mpich.mpirun, "-n", "2", openmpi.python, REPORT)
    assert done.returncode == 1, done.stderr
    assert "rank " not in done.stdout
    assert "PMI_SIZE=2 says that MPICH's launcher started 2 ranks, but mpi4py loads Open MPI here" in done.stderr
    assert "Use the mpirun of the same installation, which 'hvdrun' finds by itself" in done.stderr
    assert "Sorry!" not in done.stderr and "RuntimeWarning" not in done.stderr  # MPI has not started


def test_ranks_of_mpich_under_the_mpirun_of_open_mpi_say_what_is_wrong(openmpi, mpich):
    done = run(openmpi.mpirun, "-n", "2", "--oversubscribe", mpich.python, REPORT)
    assert done.returncode != 0
    assert "rank " not in done.stdout
    words = "OMPI_COMM_WORLD_SIZE=2 says that Open MPI's launcher started 2 ranks, but mpi4py loads MPICH here"
    assert words in done.stderr
    assert "Use the mpirun of the same installation, which 'hvdrun' finds by itself" in done.stderr
    assert "Fatal error in" not in done.stderr  # of MPICH, which has not started


def test_who_imports_mpi4py_first_hears_it_from_mpich(openmpi, mpich):
    # MPI starts with that import, and MPICH ends the process before init() could say anything.
    code = "from mpi4py import MPI; import hvdlite; hvdlite.init(); print('rank ')"
    done = run(openmpi.mpirun, "-n", "2", "--oversubscribe", mpich.python, "-c", code)
    assert done.returncode != 0 and "rank " not in done.stdout
    assert "Runtime environment uses unsupported PMI version PMIx" in done.stderr


def test_who_knows_better_may_start_all_the_same(openmpi, mpich):
    code = "import hvdlite; hvdlite.init(); print('size', hvdlite.size())"
    done = run(mpich.mpirun, "-n", "2", openmpi.python, "-c", code, HVDLITE_ALLOW_SIZE_MISMATCH="1")
    assert (done.returncode, done.stdout.split()) == (0, ["size", "1", "size", "1"]), done.stderr
