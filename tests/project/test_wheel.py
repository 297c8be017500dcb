"""The wheel, installed elsewhere: nothing of the repository may be needed, or hide what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

SOURCES = ("hvdlite", "launch", "adapters", "pyproject.toml", "README.md", "LICENSE")


def run(command: list[str | Path], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> Path:
    """The wheel, built from a copy: an old build/ folder in the repository would put removed files into it."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist]
    run([*pip, copy])
    (found,) = dist.iterdir()
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel, and with the libraries of this one.

    A path in a .pth file is not searched for further .pth files, so that the editable
    install of this environment stays out of sight.
    """
    folder = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel])
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(site) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def elsewhere(tmp_path) -> dict:
    """Options to run from a folder without sources, as a user does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    hidden = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"cwd": tmp_path, "env": {**hidden, "PYTHONSAFEPATH": "1", "PATH": path}}


def test_the_wheel_fits_every_platform(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_exactly_the_sources(wheel, sources):
    expected = {
        source.module.replace(".", "/") + ("/__init__.py" if source.path.name == "__init__.py" else ".py")
        for source in sources
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == expected
    assert "hvdlite/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("module", ["hvdlite", "hvdlite.torch", "hvdlite.launch", "hvdlite.launch.cli"])
def test_an_import_takes_the_installed_file(python, elsewhere, module):
    code = f"import importlib; print(importlib.import_module({module!r}).__file__)"
    file = Path(run([python, "-c", code], **elsewhere).strip())
    assert python.parent.parent in file.parents


def test_hvdrun_is_installed(python, elsewhere):
    assert "usage: hvdrun" in run([python.parent / "hvdrun", "--help"], **elsewhere)
    assert "usage: hvdrun" in run([python, "-m", "hvdlite.launch", "--help"], **elsewhere)


TWO_RANKS = """
import numpy as np, hvdlite as hvd
hvd.init()
total = hvd.allreduce(np.array([1.0, 10.0]) * (hvd.rank() + 1), op=hvd.Sum)
assert (hvd.size(), list(total)) == (2, [3.0, 30.0]), (hvd.size(), total)
"""


@pytest.mark.mpi
def test_two_ranks_run_from_the_wheel(python, elsewhere):
    run([python.parent / "hvdrun", "-np", "2", "python", "-c", TWO_RANKS], **elsewhere)
