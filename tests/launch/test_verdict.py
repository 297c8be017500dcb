"""How a job ended: which rank failed first, what is said, and with which exit code."""

from __future__ import annotations

import signal

import pytest

from hvdlite.launch.verdict import Record, judge, last_words

TERM, KILL = -int(signal.SIGTERM), -int(signal.SIGKILL)


def record(*ends: tuple[int, float] | None) -> Record:
    """Return a job whose ranks ended with (code, time), or did not say it."""
    job = Record(len(ends))
    for rank, end in enumerate(ends):
        job.note(rank, "s", b"7 host%d" % rank)
        if end:
            job.note(rank, "x", b"%d %f host%d" % (*end, rank))
    return job


@pytest.mark.parametrize(
    ("ends", "launchers", "code", "words"),
    [
        ([(0, 1), (0, 2)], 0, 0, ""),
        ([(0, 1), (3, 2)], 3, 3, "rank 1 of 2 on host1 ended with exit code 3"),
        ([(1, 5), (3, 2), (1, 4)], 1, 3, "rank 1 of 3 on host1 ended with exit code 3"),
        ([(TERM, 1), (3, 2), (TERM, 0)], 1, 3, "rank 1 of 3 on host1 ended with exit code 3"),
        ([(1, 2), (KILL, 1)], 1, 137, "rank 1 of 2 on host1 was killed by signal 9 (SIGKILL), by hand or because"),
        ([(-200, 2)], 1, 328, "rank 0 of 1 on host0 was killed by signal 200"),
        ([(3, 1), (0, 2)], 0, 3, "rank 0 of 2 on host0 ended with exit code 3"),  # a launcher that does not mind
        ([(0, 1), None], 0, 1, "rank 1 of 2 on host1 never reported an end after rank 0 had ended with exit code 0"),
        (
            [None, None],
            9,
            9,
            "ranks 0, 1 of 2 on host0, host1 never reported an end: killed, or out of reach, or a rank",
        ),
        ([(TERM, 2), (0, 1)], 1, 1, "mpirun ended rank 0 of 2 after rank 1 had ended with exit code 0"),
        # Told to end by somebody else: mpirun ends the others then, or kills them.
        ([(TERM, 2), (TERM, 1)], 143, 143, "rank 1 of 2 on host1 was ended by signal 15 (SIGTERM), before all others"),
        (
            [None, (TERM, 1)],
            15,
            15,
            "rank 0 of 2 on host0 never reported an end: killed, or out of reach, and rank 1 got",
        ),
        ([(0, 1)], 5, 5, "every rank ended with exit code 0, but mpirun with 5"),
    ],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(ends, launchers, code, words):
    verdict = judge(record(*ends), "mpirun", launchers)
    assert verdict.code == code or code == 328
    assert verdict.words.startswith(words)
    assert bool(verdict.words) is bool(code)


def test_without_ranks_the_launcher_is_heard():
    verdict = judge(Record(2), "mpirun", 0)
    assert (verdict.code, verdict.launcher_knows) == (1, True)
    assert verdict.words == "no rank was started; mpirun ended with exit code 0"


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (1, b"hvdlite: rank 1 of 3 failed, so all ranks end now. Cause: ValueError: no"),
        (1, b"Abort(9) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 9) - process 1"),
        (None, b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[1,1],1]\n  Errorcode: 9"),
    ],
)
@pytest.mark.parametrize("ends", [[(TERM, 1), (TERM, 2), (TERM, 3)], [None, None, None], [(9, 1), (9, 2), (9, 3)]])
def test_the_rank_that_ended_the_job_counts(rank, line, ends):
    job = record(*ends)
    if rank is None:
        job.overhear(line)
    else:
        job.listen(2, line)  # quoted by another rank
        job.listen(rank, line)
    verdict = judge(job, "mpirun", 9)
    assert (verdict.code, verdict.tail_of) == (9, 1)
    assert verdict.words.startswith("rank 1 of 3 on host1 ended ")
    assert "exit code 9" in verdict.words


def test_a_rank_that_failed_because_of_another_comes_after_it():
    job = record((1, 1), (1, 2))
    job.listen(0, b"hvdlite: rank 0 of 2 failed, so all ranks end now. Cause: RemoteError: rank 1: no")
    job.listen(1, b"hvdlite: rank 1 of 2 failed, so all ranks end now. Cause: MemoryError")
    assert job.first == 1


@pytest.mark.parametrize("survivors_end", [(1, 6), (TERM, 6), (137, 4), None])
def test_a_killed_rank_comes_before_one_that_noticed_it(survivors_end):
    job = record(survivors_end, (KILL, 5))
    job.listen(0, b"hvdlite: rank 0 of 2 failed, so all ranks end now. Cause: CommunicationError: allreduce of tensor")
    verdict = judge(job, "mpirun", 1)
    assert (verdict.code, verdict.tail_of) == (137, 1)
    assert verdict.words.startswith("rank 1 of 2 on host1 was killed by signal 9 (SIGKILL)")


def test_a_rank_that_noticed_what_nobody_reported_is_better_than_nothing():
    job = record((TERM, 1), None)
    job.listen(0, b"hvdlite: rank 0 of 2 failed, so all ranks end now. Cause: CommunicationError: rank 1 is gone")
    assert judge(job, "mpirun", 1).tail_of == 0


LOST_DAEMON = b"""PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-host0-5695@0,0] on node host0
  Remote daemon: [prterun-host0-5695@0,1] on node host1
"""


@pytest.mark.parametrize("said", [LOST_DAEMON, b"Connection to host1 closed by remote host.\r\n"])
def test_the_host_that_the_launcher_has_lost_is_named(said):
    job = record(None, None)
    job.overhear(b"Connection to nobody closed by remote host.")  # by another ssh
    assert judge(job, "mpirun", 0).words.startswith("ranks 0, 1 of 2 on host0, host1 never reported an end")
    job.overhear(said)
    verdict = judge(job, "mpirun", 0)
    assert verdict.words.startswith("mpirun lost its connection to host1, with rank 1 of 2")
    assert (verdict.code, verdict.launcher_knows) == (1, False)
    job.note(0, "x", b"3 1 host0")
    assert judge(job, "mpirun", 1).code == 3  # a rank that tells what it failed of is better


@pytest.mark.parametrize("ends", [[(TERM, 1), None], [(1, 1), (TERM, 2)]])
def test_a_job_that_was_ended_by_hand_blames_no_rank(ends):
    verdict = judge(record(*ends), "mpirun", 1, signal.SIGINT)
    assert (verdict.code, verdict.words, verdict.tail_of) == (130, "ended by SIGINT", None)


def test_a_job_that_finished_in_spite_of_a_signal_has_succeeded():
    assert judge(record((0, 1), (0, 1)), "mpirun", 0, signal.SIGTERM).code == 0


def test_the_last_words_repeat_lines():
    assert last_words("rank 3 failed", [b"a", b" ", b"\xff" + b"b" * 1000], 3) == (
        "hvdrun: rank 3 failed; its last lines:\n[3] a\n[3] \ufffd" + "b" * 499 + "\n"
    )
    assert last_words("rank 3 failed", [], 3) == "hvdrun: rank 3 failed\n"
