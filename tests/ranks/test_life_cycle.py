"""init, shutdown, and what happens to operations when a rank leaves."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.config import Config
from hvdlite.testing.ranks import run_ranks

# Exceptions, constants and values have nothing to wait for; the functions may be asked before init().
NEEDS_NOTHING = {
    "init", "shutdown", "run", "is_initialized", "poll", "synchronize", "ProcessSet", "global_process_set",
    "__version__", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built", "ccl_built",
    "cuda_built", "rocm_built", "Average", "Sum", "Adasum", "Min", "Max", "Product",
}  # fmt: skip
FROM_ROOT = (np.ones(1), 0)
ARGUMENTS = {
    "add_process_set": ([0],), "remove_process_set": (hvd.ProcessSet([0]),), "start_timeline": ("unused.json",),
    "allgather_object": (1,), "broadcast_object": (1, 0), "shared_zeros": (1,),
    "broadcast": FROM_ROOT, "broadcast_": FROM_ROOT, "broadcast_async": FROM_ROOT, "broadcast_async_": FROM_ROOT,
}  # fmt: skip


def calls_that_need_init():
    for name in hvd.__all__:
        value = getattr(hvd, name)
        if name in NEEDS_NOTHING or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        if name in ARGUMENTS:
            arguments = ARGUMENTS[name]
        elif name.startswith("grouped"):
            arguments = ([np.ones(1)],)
        elif name.startswith(("all", "reduce")):
            arguments = (np.ones(1),)
        else:
            arguments = ()
        yield name, value, arguments


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    list(calls_that_need_init()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_raises_before_init_and_after_shutdown(name, function, arguments):
    def check():
        with pytest.raises(hvd.NotInitializedError, match=r"has not been initialized; use hvd.init\(\)") as caught:
            function(*arguments)
        assert isinstance(caught.value, ValueError)  # Horovod's queries
        assert isinstance(caught.value, RuntimeError)  # Horovod's operations
        assert name.removesuffix("_").removesuffix("_async") in str(caught.value) or name in str(caught.value)

    def body(comm):
        check()
        hvd.init()
        hvd.shutdown()
        check()

    run_ranks(1, body, setup=runtime.as_rank)


def test_what_needs_no_init_answers_at_any_time():
    assert hvd.is_initialized() is False
    assert hvd.mpi_enabled() is False
    assert hvd.mpi_built() is True
    for name in ("gloo_enabled", "gloo_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"):
        assert getattr(hvd, name)() is False
    assert hvd.nccl_built() == 0
    hvd.shutdown()


def test_init_is_idempotent():
    def body(comm):
        hvd.init()
        first = runtime.current()
        hvd.init()
        hvd.init(process_sets=[])
        assert runtime.current() is first
        assert hvd.is_initialized()
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(2, body, setup=runtime.as_rank) == [2.0, 2.0]


def test_hvdlite_starts_again_after_shutdown():
    def body(comm):
        sums = []
        for k in range(4):
            hvd.init()
            pair = hvd.add_process_set([0, 1])
            assert pair.process_set_id == 1
            sums.append(float(hvd.allreduce(float(k), op=hvd.Sum, name="w")))
            if pair.included():
                hvd.barrier(process_set=pair)
            hvd.shutdown()
            assert not hvd.is_initialized()
            hvd.shutdown()
        return sums

    assert run_ranks(3, body, setup=runtime.as_rank) == [[0.0, 3.0, 6.0, 9.0]] * 3


def test_the_threads_of_a_stopped_runtime_end():
    before = threading.active_count()

    def body(comm):
        hvd.init()
        hvd.add_process_set([0])
        hvd.shutdown()

    run_ranks(2, body, setup=runtime.as_rank)
    assert threading.active_count() <= before  # a timer that another test has left may end meanwhile


@pytest.mark.parametrize("size", [1, 2, 3])
def test_queries_tell_who_and_where(size):
    hosts = ["a", "b", "a"][:size]

    def body(comm):
        hvd.init()
        return (
            hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
            hvd.is_homogeneous(), hvd.mpi_threads_supported(), hvd.mpi_enabled(),
        )  # fmt: skip

    expected = {
        1: [(0, 1, 0, 1, 0, 1, True, True, False)],
        2: [(0, 2, 0, 1, 0, 2, True, True, False), (1, 2, 0, 1, 1, 2, True, True, False)],
        3: [
            (0, 3, 0, 2, 0, 2, False, True, False),
            (1, 3, 0, 1, 1, 2, False, True, False),
            (2, 3, 1, 2, 0, 1, False, True, False),
        ],
    }
    assert run_ranks(size, body, hosts=hosts, setup=runtime.as_rank) == expected[size]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_when_a_rank_leaves_pending_and_later_operations_of_others_say_who(leaver):
    reached = threading.Barrier(3)

    def body(comm):
        hvd.init()
        if comm.rank == leaver:
            reached.wait(10)
            hvd.shutdown()
            return
        handle = hvd.allreduce_async(np.ones(1), name="pending")
        reached.wait(10)
        for call in (handle.wait, lambda: hvd.allreduce(np.ones(1), name="later"), lambda: hvd.add_process_set([0])):
            with pytest.raises(
                hvd.ShutdownError, match=rf"has been shut down: rank {leaver} called hvd.shutdown\(\)"
            ) as caught:
                call()
            assert isinstance(caught.value, hvd.HorovodInternalError)
        assert hvd.is_initialized()  # as in Horovod: until this rank calls shutdown() itself
        assert hvd.rank() == comm.rank
        hvd.shutdown()
        assert not hvd.is_initialized()

    run_ranks(3, body, setup=runtime.as_rank)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_when_a_rank_leaves_after_a_wrong_call_ranks_that_come_later_hear_what_was_wrong(leaver):
    gone = threading.Barrier(3)

    def body(comm):
        hvd.init()
        if comm.rank == leaver:
            with pytest.raises(hvd.InvalidRequestError, match="dtype"):
                hvd.allreduce(np.array(["text"]), name="w")
            hvd.shutdown()
        gone.wait(20)
        if comm.rank == leaver:
            return
        with pytest.raises(hvd.RemoteError, match="dtype") as caught:
            hvd.allreduce(np.ones(1), name="w")
        assert list(caught.value.problems) == [leaver]
        with pytest.raises(hvd.ShutdownError, match=rf"rank {leaver} called hvd.shutdown\(\)"):
            hvd.allreduce(np.ones(1), name="w")
        hvd.shutdown()

    run_ranks(3, body, setup=runtime.as_rank)


def test_all_can_start_again_after_one_left_while_others_waited():
    def body(comm):
        for k in range(3):
            hvd.init()
            if comm.rank != k:
                with pytest.raises(hvd.ShutdownError):
                    hvd.allreduce(np.ones(1), name="w")
            hvd.shutdown()
        hvd.init()
        return float(hvd.allreduce(1.0, op=hvd.Sum, name="w"))

    assert run_ranks(3, body, setup=runtime.as_rank) == [3.0] * 3


def test_pending_operations_of_process_sets_fail_too():
    reached = threading.Barrier(3)

    def body(comm):
        hvd.init()
        pair = hvd.add_process_set([0, 1])
        handle = hvd.allreduce_async(np.ones(1), process_set=pair) if comm.rank == 0 else None
        reached.wait(10)
        if comm.rank == 1:
            hvd.shutdown()
        elif handle is not None:
            with pytest.raises(hvd.ShutdownError, match="rank 1"):
                handle.wait()

    run_ranks(3, body, setup=runtime.as_rank)


def test_a_rank_that_ends_its_program_is_named():
    def body(comm):
        hvd.init()
        if comm.rank == 1:
            return
        with pytest.raises(hvd.ShutdownError, match="rank 1"):
            hvd.allreduce(np.ones(1), name="w")

    run_ranks(3, body, setup=runtime.as_rank)


def test_an_operation_that_all_have_submitted_is_done_before_a_shutdown():
    def body(comm):
        hvd.init()
        handle = hvd.allreduce_async(np.full(3, comm.rank), op=hvd.Sum, name="w")
        hvd.barrier()
        hvd.shutdown()
        return handle.wait().tolist()

    for _ in range(20):
        assert run_ranks(3, body, setup=runtime.as_rank) == [[3, 3, 3]] * 3


# Handles


def test_poll_tells_whether_waiting_would_block(on_ranks):
    go_on = threading.Event()

    def body(rank):
        if rank == 1:
            assert go_on.wait(10)
        handle = hvd.allreduce_async(np.array([rank]), op=hvd.Sum, name="w")
        if rank == 0:
            assert not hvd.poll(handle)
            with pytest.raises(TimeoutError, match="'w'"):
                handle.wait(timeout=0.01)
            assert not hvd.poll(handle)
            go_on.set()
        first = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is first
        return first.tolist()

    assert on_ranks(2, body) == [[1], [1]]


def test_settings_that_are_wrong_refuse_init(monkeypatch):
    monkeypatch.setenv("HVDLITE_FUSION_TRESHOLD", "1")

    def body(comm):
        with pytest.raises(hvd.ConfigError, match="HVDLITE_FUSION_THRESHOLD"):
            hvd.init()
        assert not hvd.is_initialized()

    run_ranks(2, body, setup=runtime.as_rank)


def test_settings_that_differ_between_ranks_refuse_init_on_all():
    def body(comm):
        config = Config(cache_capacity=10 + (comm.rank == 1), fusion_threshold=5 + comm.rank, log_level="error")
        with pytest.raises(hvd.ConfigError) as caught:
            runtime.Runtime(comm, config)
        return str(caught.value)

    for text in run_ranks(3, body):
        for words in (
            "HVDLITE_CACHE_CAPACITY",
            "10 on ranks 0, 2",
            "11 on rank 1",
            "HVDLITE_FUSION_THRESHOLD",
            "7 on rank 2",
        ):
            assert words in text


def test_versions_that_differ_refuse_init_on_all():
    class OtherVersionOnRankOne:
        rank, size, topology = 0, 2, None

        def allgather_bytes(self, mine):
            return [mine, json.dumps({**json.loads(mine), "version": "9.9"}).encode()]

    with pytest.raises(hvd.MismatchError, match=r"hvdlite version.* on rank 0; 9.9 on rank 1"):
        runtime.Runtime(OtherVersionOnRankOne(), Config())
