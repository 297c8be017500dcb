"""Programs that import Horovod, without one: python -m hvdlite.as_horovod, and hvdrun --as-horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import as_horovod
from hvdlite.as_horovod.__main__ import command_without
from hvdlite.launch import cli

MODULE = "hvdlite.as_horovod"
SHOW = """
import pickle, sys

class Mine: pass

assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
spec = None if __spec__ is None else __spec__.name
print(__name__, globals().get("__file__"), spec, sys.argv, sys.path[0], sys.flags.utf8_mode)
print(sorted(name for name in globals() if not name.startswith("__")))
if "fail" in sys.argv:
    raise ValueError("of the program")
if "leave" in sys.argv:
    sys.exit(7)
"""


def python(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**clean, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("last", ["-x y", "fail", "leave"])
@pytest.mark.parametrize("how", [["show.py"], ["-m", "show"], ["-c", SHOW]], ids=["file", "module", "text"])
def test_a_program_sees_what_it_sees_under_python(tmp_path, how, last):
    (tmp_path / "show.py").write_text(SHOW)
    alone = python("-X", "utf8", *how, "--lr", "1", last, cwd=tmp_path)
    ended = python("-X", "utf8", "-m", MODULE, *how, "--lr", "1", last, cwd=tmp_path)
    assert "__main__" in alone.stdout
    assert (ended.returncode, ended.stdout, ended.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert alone.returncode == {"-x y": 0, "fail": 1, "leave": 7}[last]


def test_other_programs_that_it_starts_find_horovod_too(tmp_path):
    code = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import horovod.common']).returncode)"
    )
    ended = python("-m", MODULE, "-c", code, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_horovod_and_what_frameworks_have_in_common_need_no_framework(tmp_path):
    code = (
        "import sys\nfrom horovod.common import basics, elastic, exceptions, process_sets, util\nimport horovod\n"
        "print(horovod.__version__, basics.HorovodBasics().is_initialized())\n"
        "print([name for name in ('torch', 'mpi4py') if name in sys.modules])"
    )
    assert python("-m", MODULE, "-c", code, cwd=tmp_path).stdout == "0.28.1 False\n[]\n"


@pytest.mark.parametrize(
    "statement",
    [
        "import horovod.mxnet as hvd",
        "import horovod.data",
        "from horovod import spark",
        "from horovod import run",
        "import horovod.common.mpi_lib",
        "from horovod.common import mpi_lib",
    ],
)
def test_what_is_not_there_is_an_import_error_that_says_so(tmp_path, statement):
    ended = python("-m", MODULE, "-c", statement, cwd=tmp_path)
    assert ended.returncode == 1
    assert "is not in this version of hvdlite, which stands in for Horovod" in ended.stderr
    assert "ModuleNotFoundError: horovod." in ended.stderr


def test_who_only_looks_for_a_module_gets_none(tmp_path):
    code = (
        "from importlib.util import find_spec\n"
        "print([find_spec(f'horovod.{name}') is None for name in ('mxnet', 'common.mpi_lib', 'common.util')])"
    )
    assert python("-m", MODULE, "-c", code, cwd=tmp_path).stdout == "[True, True, False]\n"


def test_horovods_run_names_hvdrun(tmp_path):
    ended = python("-m", MODULE, "-c", "import horovod; horovod.run(print, np=2)", cwd=tmp_path)
    assert "horovod.run() is not here; use hvdlite.run(), or start programs with hvdrun" in ended.stderr


def test_beside_horovod_itself_it_refuses(tmp_path):
    other = tmp_path / "site" / "horovod"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    ended = python("-m", MODULE, "-c", "import horovod", cwd=tmp_path, PYTHONPATH=str(other.parent))
    assert ended.returncode == 1
    assert f"ImportError: Horovod itself is installed, in {other}/__init__.py" in ended.stderr
    assert "pip uninstall horovod" in ended.stderr


def test_a_folder_of_that_name_is_not_horovod(tmp_path):
    (tmp_path / "horovod" / "examples").mkdir(parents=True)
    assert python("-m", MODULE, "-c", "import horovod.common", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-m", MODULE], 2, "usage: python -m hvdlite.as_horovod program.py"),
        (["-I", "-m", MODULE, "train.py"], 1, "-E and -I ignore PYTHONPATH"),
        (["-m", MODULE, "no_such_file.py"], 2, "can't open file"),
        (
            ["-c", f"import sys, runpy; sys.argv += ['x']; runpy.run_module('{MODULE}', None, '__main__')"],
            1,
            "cannot find",
        ),
    ],
)
def test_what_cannot_start_is_told(tmp_path, arguments, code, message):
    ended = python(*arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_is_no_error(tmp_path):
    ended = python("-m", MODULE, "--help", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: python -m hvdlite.as_horovod program.py")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"-m {MODULE} a.py -m {MODULE}", f"a.py -m {MODULE}"),
        (f"-u -X dev -m {MODULE} -m b", "-u -X dev -m b"),
        (f"-um {MODULE} a.py", "-u a.py"),
        (f"-m{MODULE} a.py", "a.py"),
        (f"-Bum{MODULE} a.py", "-Bu a.py"),
        (f"-m pdb -m {MODULE} a.py x", "-m pdb a.py x"),
    ],
)
def test_the_rest_of_the_command_line_is_kept(before, after):
    assert command_without(["python", *before.split()]) == ["python", *after.split()]


def test_a_command_line_without_it_is_not_guessed_at():
    assert command_without(["python", "-m", "a", MODULE]) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "HERE"), ("/a:/b", "HERE:/a:/b"), (":/a", "HERE::/a"), ("/a:HERE", "/a:HERE")],
)
def test_the_stand_in_is_put_in_front_once(before, after):
    here = as_horovod.FOLDER
    assert as_horovod.search_path(before.replace("HERE", here)) == after.replace("HERE", here)


def test_the_folder_offers_nothing_but_horovod():
    # Every module there could hide one of the program's.
    found = {path.stem for path in Path(as_horovod.FOLDER).iterdir()}
    assert found - {"__pycache__"} == {"__init__", "__main__", "horovod"}


@pytest.mark.parametrize("where", [["-np", "2"], ["-H", "a:1,b:1"]])
def test_hvdrun_shows_the_path_that_it_sets(monkeypatch, capsys, where):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert cli.main([*where, "--as-horovod", "--print-command", "python", "train.py"]) == 0
    command = capsys.readouterr().out
    assert f"PYTHONPATH={as_horovod.FOLDER}:/mine " in command
    assert command.endswith("python train.py\n")
    assert ("-x PYTHONPATH " in command) == ("-H" in where)


def test_hvdrun_sets_no_path_otherwise(monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert cli.main(["-np", "2", "--print-command", "python", "train.py"]) == 0
    assert "PYTHONPATH" not in capsys.readouterr().out


def test_hvdrun_puts_the_stand_in_before_an_exported_path(capsys):
    args = ["-np", "2", "-x", "PYTHONPATH=/mine", "-x", "A=b", "--as-horovod", "--print-command", "python", "train.py"]
    assert cli.main(args) == 0
    assert f"-x PYTHONPATH={as_horovod.FOLDER}:/mine -x A=b " in capsys.readouterr().out


@pytest.mark.mpi
def test_every_rank_of_hvdrun_finds_horovod(mpi, tmp_path):
    code = (
        "import sys\nfrom horovod.common.basics import HorovodBasics\nbasics = HorovodBasics()\nbasics.init()\n"
        "found = f'{basics.size()} {basics._get_process_set_ids_and_ranks()}'\n"
        "open(f'{sys.argv[1]}/{basics.rank()}', 'w').write(found)"
    )
    command = [mpi.python, "-m", "hvdlite.launch", "-np", "2", "--as-horovod", "python", "-c", code, tmp_path]
    environ = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("01", "2 {0: [0, 1]}")
