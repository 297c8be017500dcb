"""Several threads of each rank call hvdlite at once: blocking and asynchronous, in the world and in another set."""

from __future__ import annotations

import threading

import numpy as np

import hvdlite as hvd

N = 150
hvd.init()
rank, size = hvd.rank(), hvd.size()
reversed_set = hvd.add_process_set(range(1, size)) if size > 2 else hvd.global_process_set
failures: list[BaseException] = []


def blocking(who: str, process_set: hvd.ProcessSet) -> None:
    for k in range(N):
        x = np.array([k + process_set.rank(), k])
        n = process_set.size()
        result = hvd.allreduce(x, op=hvd.Sum, name=f"{who}.{k % 3}", process_set=process_set)
        np.testing.assert_array_equal(result, [n * k + n * (n - 1) // 2, n * k])


def in_flight(who: str) -> None:
    pending = []
    for k in range(N):
        pending.append((k, hvd.allgather_async(np.array([rank, k]), name=f"{who}.{k}")))
        if len(pending) == 5:
            for i, handle in pending:
                np.testing.assert_array_equal(handle.wait().reshape(size, 2)[:, 1], [i] * size)
            pending.clear()


def run(body, *arguments) -> None:
    try:
        body(*arguments)
    except BaseException as error:
        failures.append(error)


threads = [
    threading.Thread(target=run, args=(blocking, "a", hvd.global_process_set)),
    threading.Thread(target=run, args=(blocking, "b", hvd.global_process_set)),
    threading.Thread(target=run, args=(in_flight, "c")),
]
if reversed_set.included():
    threads.append(threading.Thread(target=run, args=(blocking, "d", reversed_set)))
for thread in threads:
    thread.start()
blocking("main", hvd.global_process_set)
for thread in threads:
    thread.join()
if failures:
    raise failures[0]
hvd.barrier()
print("done", flush=True)
