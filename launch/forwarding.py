"""Which variables of the environment go to ranks on other hosts.

Not the whole environment: much of it belongs to this machine or this login, and some of
it is secret. What programs of this kind read goes, and what the user names goes always.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PREFIXES = (
    "HVDLITE_", "HOROVOD_", "PYTHON", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NCCL_", "UCX_", "FI_", "CUDA_", "TORCH",
    "PYTORCH_", "TF_", "XLA_", "JAX_", "KERAS_", "HF_", "TRANSFORMERS_", "WANDB_", "MLFLOW_", "VIRTUAL_ENV", "CONDA_",
)  # fmt: skip
_NAMES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TZ", "LANG", "LC_ALL")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY", re.IGNORECASE)
# Numbers of GPUs belong to one machine: those of this one may be wrong, or taken, on another.
_GPUS = re.compile(r"(CUDA|NVIDIA|HIP|ROCR|GPU|ZE)_?(VISIBLE_DEVICES|DEVICE_ORDINAL|AFFINITY_MASK)$")


def stays_here(name: str) -> bool:
    """Return whether a variable goes to other hosts only when the user names it: secrets, and numbers of GPUs."""
    return bool(_SECRET.search(name) or _GPUS.search(name))


def forwarded(environ: Mapping[str, str], exports: Iterable[str] = ()) -> list[str]:
    """Return the names to hand to other hosts besides `exports` (`NAME` or `NAME=value`), sorted."""
    given = named(exports)
    return [
        name
        for name in sorted(environ)
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in given and not stays_here(name)
    ]


def left_out(environ: Mapping[str, str], exports: Iterable[str] = ()) -> list[str]:
    """Return the names that stay on this machine although a launcher might hand them on, sorted."""
    given = named(exports)
    return [name for name in sorted(environ) if stays_here(name) and name not in given]


def named(exports: Iterable[str]) -> set[str]:
    return {export.partition("=")[0] for export in exports}
