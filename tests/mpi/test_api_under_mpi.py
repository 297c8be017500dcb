"""The public API over real MPI processes: results, ends of programs, failures, costs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_gives_numpys_results(mpi, size):
    ended = mpi.run(size, PROGRAMS / "all_operations.py", "auto").check()
    assert ended.out.count("done") == size


@pytest.mark.parametrize("backend", ["ring", "tree", "mpi_native", "reference"])
def test_every_backend_gives_numpys_results(mpi, backend):
    ended = mpi.run(3, PROGRAMS / "all_operations.py", backend).check()
    assert ended.out.count("done") == 3
    assert f"{backend} was asked for" in ended.out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_threads_of_a_rank_may_call(mpi, size):
    assert mpi.run(size, PROGRAMS / "threads.py").check().out.count("done") == size


def test_hvdlite_runs_alone_without_mpirun(mpi):
    ended = mpi.run_alone(PROGRAMS / "all_operations.py", "auto").check()
    assert "done" in ended.out


# Ends


WAYS = [
    "falling off",
    "exit(0)",
    "exit(None)",
    "caught exit",
    "caught error",
    "shutdown",
    "late ranks",
    "one shuts down",
    "pending",
]


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_ends_well_ends_with_zero_and_in_silence(mpi, way):
    ended = mpi.run(3, PROGRAMS / "ending.py", way, timeout=30).check()
    assert ended.err == ""
    assert ended.out == ""


def test_a_rank_that_ends_early_is_named_by_those_that_need_it(mpi):
    ended = mpi.run(3, PROGRAMS / "leaving_early.py", timeout=30).check()
    for rank in (0, 2):
        text = "allreduce of tensor 'w': hvdlite has been shut down: rank 1 has ended its program"
        assert f"rank {rank} heard: {text}" in ended.out
    assert ended.err == ""


# Failures


CAUSES = {
    "raise": "RuntimeError: out of luck",
    "exit": "its program called sys.exit(5)",
    "exit with text": "its program called sys.exit(1)",
    "exit, with a thread waiting": "its program called sys.exit(5)",
    "argparse": "its program called sys.exit(2)",
    "interrupt": "KeyboardInterrupt",
    "interrupt while waiting": "KeyboardInterrupt",
}
CODES = {"exit": 5, "exit, with a thread waiting": 5, "argparse": 2, "interrupt": 130, "interrupt while waiting": 130}
ENDED_BY_MPI = ["os._exit", "kill"]


@pytest.mark.parametrize("others", ["collective", "sleeping", "computing"])
@pytest.mark.parametrize("way", CAUSES)
def test_a_rank_that_fails_ends_the_job_with_one_message(mpi, way, others):
    ended = mpi.run(3, PROGRAMS / "failing.py", way, others, timeout=30)
    assert ended.seconds < 10
    said = [line for line in ended.err.splitlines() if line.startswith("hvdlite: ")]
    assert said == [f"hvdlite: rank 1 of 3 failed, so all ranks end now. Cause: {CAUSES[way]}"], ended.err
    assert "was not ended" not in ended.err
    assert ended.code == CODES.get(way, 1)
    if way == "raise":
        assert "Traceback" in ended.err
    if way == "exit with text":
        assert "no data found" in ended.err


@pytest.mark.parametrize("others", ["collective", "sleeping", "computing"])
@pytest.mark.parametrize("way", ENDED_BY_MPI)
def test_a_rank_that_vanishes_ends_the_job(mpi, way, others):
    ended = mpi.run(3, PROGRAMS / "failing.py", way, others, timeout=30)
    assert ended.seconds < 10
    assert ended.code != 0
    assert "was not ended" not in ended.err


def test_a_rank_whose_engine_breaks_ends_the_job_even_if_its_program_goes_on(mpi):
    ended = mpi.run(3, PROGRAMS / "failing.py", "engine", "half", timeout=30)
    assert ended.seconds < 10
    assert ended.code != 0
    assert "the engine of rank 1 stopped: MemoryError: no room" in ended.err
    assert "was not ended" not in ended.err


def test_an_error_that_all_ranks_get_ends_the_job_too(mpi):
    ended = mpi.run(3, PROGRAMS / "failing.py", "mismatch", "collective", timeout=30)
    assert ended.code == 1
    assert ended.seconds < 10
    assert "Mismatched shape for tensor 'w' between ranks: [3] on ranks 0, 2; [2] on rank 1" in ended.err


# Which ranks


@pytest.mark.parametrize("size", [2, 3])
def test_init_takes_ranks_in_any_order(mpi, size):
    assert mpi.run(size, PROGRAMS / "chosen_ranks.py", "reversed").check().out.count("done") == size


def test_init_takes_some_ranks_and_refuses_the_others(mpi):
    assert mpi.run(3, PROGRAMS / "chosen_ranks.py", "some").check().out.count("done") == 3


@pytest.mark.parametrize("what", ["communicator", "set of a communicator", "mine", "wrong"])
def test_mpi4py_and_hvdlite_live_together(mpi, what):
    assert mpi.run(4, PROGRAMS / "chosen_ranks.py", what).check().out.count("done") == 4


SINGLETONS = {
    "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
    "PMI_SIZE": {"PMI_SIZE": "4", "PMI_RANK": "0"},
    "SLURM_NTASKS": {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "7"},
}
INIT = "import hvdlite as hvd; hvd.init(); print('ran', hvd.size())"


@pytest.mark.parametrize("variable", SINGLETONS)
def test_a_singleton_by_accident_is_refused_with_what_to_do(openmpi, variable):
    ended = openmpi.run_alone("-c", INIT, env=SINGLETONS[variable], timeout=30)
    assert ended.code == 1
    assert "ran" not in ended.out
    for words in (f"LaunchError: {variable}=4", "Open MPI", "--mpi=pmix", "hvdrun", "HVDLITE_ALLOW_SIZE_MISMATCH=1"):
        assert words in ended.err
    allowed = {**SINGLETONS[variable], "HVDLITE_ALLOW_SIZE_MISMATCH": "1"}
    assert "ran 1" in openmpi.run_alone("-c", INIT, env=allowed, timeout=30).check().out


def test_an_allocation_of_slurm_without_srun_is_no_reason_to_refuse(openmpi):
    assert "ran 1" in openmpi.run_alone("-c", INIT, env={"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).check().out


# Settings


def test_settings_that_differ_refuse_init_on_all_ranks(mpi):
    ended = mpi.run(3, PROGRAMS / "settings.py", "1:HVDLITE_CACHE_CAPACITY=5", "2:HOROVOD_FUSION_THRESHOLD=77").check()
    assert ended.out.count("refused:") == 3
    assert ended.out.count("HVDLITE_CACHE_CAPACITY differs between ranks: 1024 on ranks 0, 2; 5 on rank 1") == 3
    assert ended.out.count("77 on rank 2") == 3


def test_settings_that_may_differ_may_differ(mpi):
    assert (
        mpi.run(2, PROGRAMS / "settings.py", "1:HVDLITE_LOG_LEVEL=error", "0:HVDLITE_SPIN=0").check().out.count("ran")
        == 2
    )


def test_a_setting_that_is_wrong_on_one_rank_refuses_init_on_all(mpi):
    ended = mpi.run(3, PROGRAMS / "settings.py", "1:HVDLITE_CASHE_CAPACITY=5", "2:HVDLITE_SPIN=soon").check()
    assert (
        ended.out.count("rank 1: unknown setting HVDLITE_CASHE_CAPACITY='5'. Did you mean HVDLITE_CACHE_CAPACITY?") == 3
    )
    assert ended.out.count("rank 2: HVDLITE_SPIN='soon': expected number of seconds") == 3


# Costs


def test_idle_and_waiting_ranks_use_no_core(mpi):
    ended = mpi.run(2, PROGRAMS / "idle.py", "3").check()
    shares = [
        (float(idle), float(blocked)) for idle, blocked in re.findall(r"idle ([\d.]+) blocked ([\d.]+)", ended.out)
    ]
    assert len(shares) == 2
    for idle, blocked in shares:
        assert idle < 0.03
        assert blocked < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_fresh_names_do_not_make_memory_grow(mpi, size):
    ended = mpi.run(size, PROGRAMS / "growing.py", "10000", timeout=100).check()
    grown = [float(text) for text in re.findall(r"grew (-?[\d.]+)", ended.out)]
    assert len(grown) == size
    assert max(grown) < 20


@pytest.mark.parametrize("way", ["falling off", "shutdown"])
def test_nothing_is_left_after_a_job(mpi, short_tmpdir, way):
    before = set(os.listdir("/dev/shm"))
    mpi.run(3, PROGRAMS / "ending.py", way, tmpdir=short_tmpdir).check()
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("hvdlite")} == set()
    assert [name for name in os.listdir(short_tmpdir) if "hvdlite" in name] == []


@pytest.mark.parametrize("way", ["raise", "kill"])
def test_nothing_of_ours_is_left_after_a_failure(mpi, short_tmpdir, way):
    before = set(os.listdir("/dev/shm"))
    mpi.run(3, PROGRAMS / "failing.py", way, "collective", tmpdir=short_tmpdir, timeout=30)
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("hvdlite")} == set()
    assert [name for name in os.listdir(short_tmpdir) if "hvdlite" in name] == []


def test_without_shared_memory_it_says_so_and_goes_on(mpi):
    program = (
        "import hvdlite as hvd, numpy as np; hvd.init(); "
        "print(hvd.allreduce(np.arange(5.0) + hvd.rank(), op=hvd.Sum).tolist())"
    )
    ended = mpi.run(2, "-c", program, env={"HVDLITE_SHARED_MEMORY_DIR": "/nowhere"}).check()
    assert ended.out.count("[1.0, 3.0, 5.0, 7.0, 9.0]") == 2
    assert ended.err.count("no shared memory: '/nowhere' is missing") == 1


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(3)", "raise RuntimeError", "pass"])
def test_a_forked_child_that_ends_does_not_disturb_the_job(mpi, end):
    program = (
        "import os, sys, numpy as np, hvdlite as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(np.ones(2), name='before')\n"
        f"child = os.fork() if hvd.rank() == 1 else None\n"
        "if child == 0:\n"
        f"    {end}\n"
        "else:\n"
        "    if child: os.waitpid(child, 0)\n"
        "    print('sum %s' % hvd.allreduce(np.ones(2), op=hvd.Sum, name='after').tolist())\n"
    )
    ended = mpi.run(2, "-W", "ignore", "-c", program, timeout=20).check()
    assert ended.out.count("sum [2.0, 2.0]") == 2
    assert "hvdlite:" not in ended.err


def test_a_forked_child_is_no_rank(mpi):
    program = (
        "import os, numpy as np, hvdlite as hvd\n"
        "hvd.init()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: hvd.allreduce(np.ones(2))\n"
        "    except hvd.NotInitializedError as error: print(f'heard: {error}', flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "hvd.barrier()\n"
    )
    ended = mpi.run(2, "-W", "ignore", "-c", program, timeout=20).check()
    assert ended.out.count("heard: allreduce: hvdlite has not been initialized") == 2


def test_a_tiny_piece_of_shared_memory_is_enough(mpi):
    program = "import numpy as np, hvdlite as hvd; hvd.init(); print(hvd.allreduce(np.arange(99.0), op=hvd.Sum).sum())"
    ended = mpi.run(3, "-c", program, env={"HVDLITE_SHARED_MEMORY_PIECE": "1"}).check()
    assert ended.out.count(str(3 * 99 * 98 / 2)) == 3
