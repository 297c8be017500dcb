"""docs/migrating.md: its programs end with the same weights, and the tests that it names exist."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PAGE = (ROOT / "docs/migrating.md").read_text()


def programs() -> list[str]:
    """With DDP, with hvdlite, and the loading of an old checkpoint."""
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 3
    return found


def run_ddp(text: str, size: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(size),
        "PATH": "/usr/bin:/bin",
        **ONE_THREAD,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text], cwd=folder, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=90)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)


@pytest.mark.mpi
def test_both_programs_end_with_the_same_weights(openmpi, tmp_path, monkeypatch):
    with_ddp, with_hvdlite, load = programs()
    run_ddp(with_ddp, 2, tmp_path)
    monkeypatch.chdir(tmp_path)
    openmpi.run(2, "-c", with_hvdlite, env=ONE_THREAD).check()
    model = torch.nn.Linear(8, 1)
    exec(load, {"torch": torch, "model": model})
    ours = torch.load("hvdlite.pt")
    assert ours.keys() == model.state_dict().keys()
    for name, theirs in model.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6)


def test_the_tests_that_the_page_names_exist():
    named = set(re.findall(r"`((?:adapters|launch|mpi|ranks|unit)/\w+\.py)`", PAGE))
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


def test_every_row_of_the_differences_names_its_test():
    section = PAGE.split("### What is different")[1].split("### From horovodrun")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) > 40
    assert not [row for row in rows if not re.search(r"/test_\w+\.py` \|$", row)]


def test_the_settings_that_the_page_names_exist():
    known = (ROOT / "docs/reference/settings.md").read_text()
    assert not [name for name in re.findall(r"HVDLITE_[A-Z_]+", PAGE) if f"`{name}`" not in known]
