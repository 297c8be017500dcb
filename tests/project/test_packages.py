"""pyproject.toml against the folders, and what an import costs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there


@pytest.fixture(scope="module")
def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


def test_the_package_list_matches_the_folders(root, folders, pyproject):
    found = set()
    for folder, name in folders.items():
        for init in (root / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(root / folder).parts]))
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(found)


def test_the_folder_mapping_matches(folders, pyproject):
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapping == {name: folder for folder, name in folders.items()}


def test_no_folder_or_module_is_named_like_a_library_that_we_import(root):
    libraries = {"torch", "tensorflow", "keras", "jax", "numpy", "mpi4py", "horovod"}
    tops = [root, root / "adapters", *(path for path in (root / "adapters").iterdir() if path.is_dir())]
    names = {path.stem for top in tops for path in top.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not names & libraries


def test_every_package_folder_is_a_package(root, folders):
    lost = [
        str(path.parent.relative_to(root))
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert not lost


@pytest.mark.parametrize("module", ["hvdlite", "hvdlite.launch.cli", "hvdlite.testing"])
def test_an_import_brings_neither_mpi_nor_a_framework(module):
    heavy = {"mpi4py", "torch", "tensorflow", "keras", "jax"}
    code = f"import sys, {module}; print(sorted({{name.split('.')[0] for name in sys.modules}} & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_tools_are_pinned_exactly_and_only_in_requirements(root, pyproject):
    for path in sorted((root / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            assert "==" in line or line.startswith(("-r ", "#")) or not line, f"{path.name}: {line}"
    extras = pyproject["project"]["optional-dependencies"].values()
    loose = [*pyproject["project"]["dependencies"], *(one for extra in extras for one in extra)]
    assert not [one for one in loose if "==" in one]


def test_the_pages_name_only_commands_that_exist(root):
    targets = {line.split(":")[0] for line in (root / "Makefile").read_text().splitlines() if "##" in line}
    for page in [root / "README.md", root / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:`|\$ )make ([a-z]+)", page.read_text()))
        assert named, page.name
        assert named <= targets, page.name
