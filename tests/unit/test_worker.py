"""A thread beside another one."""

import threading

import pytest

from hvdlite.collectives.worker import Worker


def test_things_are_done_one_after_the_other_on_one_other_thread():
    worker, seen = Worker("beside"), []
    tasks = [worker.submit(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(50)]
    for task in tasks:
        task.wait()
        task.wait()
    assert seen == [(n, "beside") for n in range(50)]
    worker.close()


def test_an_error_is_raised_where_it_is_waited_for_and_the_next_thing_is_done():
    worker = Worker("beside")

    def fail():
        raise ValueError("no")

    failing, seen = worker.submit(fail), []
    following = worker.submit(lambda: seen.append(1))
    with pytest.raises(ValueError, match="no"):
        failing.wait()
    following.wait()
    assert seen == [1]
    worker.close()


def test_closing_ends_the_thread_after_what_it_has_to_do_and_twice_is_harmless():
    worker, seen = Worker("to be closed"), []
    worker.submit(lambda: seen.append(1))
    worker.close()
    worker.close()
    assert seen == [1]
    assert "to be closed" not in [thread.name for thread in threading.enumerate()]


def test_a_worker_that_was_never_used_has_no_thread():
    Worker("never used").close()
    assert "never used" not in [thread.name for thread in threading.enumerate()]
