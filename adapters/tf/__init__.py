"""hvdlite for TensorFlow: `import hvdlite.tensorflow as hvd`, and a training script written for Horovod runs.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)        # in a loop of your own
    hvd.broadcast_variables(model.variables, root_rank=0)

For `model.fit` see `hvdlite.tensorflow.keras`, or `hvdlite.keras`. Tensors are reduced in host memory.
"""

from typing import Any

from hvdlite import (
    Adasum,
    Average,
    CommunicationError,
    ConfigError,
    DuplicateNameError,
    HorovodInternalError,
    HvdliteError,
    InvalidRequestError,
    LaunchError,
    Max,
    Min,
    MismatchError,
    NotInitializedError,
    NotMemberError,
    ProcessSet,
    Product,
    RankFailedError,
    RemoteError,
    ShutdownError,
    StallError,
    Sum,
    UnsupportedDtypeError,
    __version__,
    add_process_set,
    backend_reasons,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    metrics,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    run,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from . import elastic as elastic
from . import mpi_ops as mpi_ops
from .collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from .compression import Compression
from .functions import allgather_object, broadcast_, broadcast_object, broadcast_object_fn, broadcast_variables
from .inner_names import (
    _allreduce as _allreduce,
)
from .inner_names import (
    _executing_eagerly as _executing_eagerly,
)
from .inner_names import (
    _grouped_allreduce as _grouped_allreduce,
)
from .inner_names import (
    _grouped_reducescatter as _grouped_reducescatter,
)
from .inner_names import (
    _make_allreduce_grads_fn as _make_allreduce_grads_fn,
)
from .inner_names import (
    _reducescatter as _reducescatter,
)
from .inner_names import (
    check_num_rank_power_of_2,
    refs_to_vars,
    vars_to_refs,
)
from .joining import join
from .mpi_ops import handle_average_backwards_compatibility
from .optimizer import DistributedOptimizer
from .queries import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from .session_only import BroadcastGlobalVariablesHook, LocalGradientAggregationHelper, broadcast_global_variables
from .tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "Average",
    "backend_reasons",
    "barrier",
    "broadcast_",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "BroadcastGlobalVariablesHook",
    "ccl_built",
    "check_num_rank_power_of_2",
    "CommunicationError",
    "Compression",
    "ConfigError",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DuplicateNameError",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "HorovodInternalError",
    "HvdliteError",
    "init",
    "InvalidRequestError",
    "is_homogeneous",
    "is_initialized",
    "join",
    "LaunchError",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "LocalGradientAggregationHelper",
    "Max",
    "metrics",
    "Min",
    "MismatchError",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "NotInitializedError",
    "NotMemberError",
    "PartialDistributedGradientTape",
    "process_set_included_op",
    "ProcessSet",
    "Product",
    "rank",
    "rank_op",
    "RankFailedError",
    "reducescatter",
    "refs_to_vars",
    "RemoteError",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "ShutdownError",
    "size",
    "size_op",
    "StallError",
    "start_timeline",
    "stop_timeline",
    "Sum",
    "SyncBatchNormalization",
    "UnsupportedDtypeError",
    "vars_to_refs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # whose module imports Keras, which takes its time
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
