"""Training with hvdlite, with torch's DDP over gloo, and without communication: `bench train` on two networks.

    hvdrun -np 2 python benchmarks/train.py [--repetitions 200] [--json results.json]
    python benchmarks/train.py

A convolutional network of 0.6 million parameters, which computes much and sends little, and a perceptron of
10 million, 32 samples per rank. Scaling efficiency is the speed by that of ranks that train apart.
"""

from __future__ import annotations

import sys

from hvdlite.bench.__main__ import main

NETWORKS = ["conv32,64,64", "mlp1024,2048,2048,1792,10"]

if __name__ == "__main__":
    sys.exit(main(["train", "--repetitions", "200", "--network", *NETWORKS, *sys.argv[1:]]))
