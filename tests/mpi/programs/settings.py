"""Ranks whose settings differ, by arguments `rank:NAME=value`: init() refuses on all."""

from __future__ import annotations

import os
import sys

from mpi4py import MPI

import hvdlite as hvd

for argument in sys.argv[1:]:
    rank, _, setting = argument.partition(":")
    if int(rank) == MPI.COMM_WORLD.rank:
        name, _, value = setting.partition("=")
        os.environ[name] = value
try:
    hvd.init()
except hvd.ConfigError as error:
    print(f"refused: {error}", flush=True)
else:
    print("ran", flush=True)
