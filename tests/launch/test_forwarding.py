"""What goes to other hosts, and what stays."""

from __future__ import annotations

import pytest

from hvdlite.launch import cli
from hvdlite.launch.forwarding import forwarded, left_out, stays_here


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MYSQL_PASSWORD", "gh_token",
     "GOOGLE_APPLICATION_CREDENTIALS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
     "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "NVIDIA_VISIBLE_DEVICES"],
)  # fmt: skip
def test_secrets_and_numbers_of_gpus_stay(name):
    environ = {name: "x", "OMP_NUM_THREADS": "1"}
    assert stays_here(name)
    assert (forwarded(environ), left_out(environ)) == (["OMP_NUM_THREADS"], [name])
    assert left_out(environ, [f"{name}=y"]) == left_out(environ, [name]) == []


@pytest.mark.parametrize("name", ["SSH_AUTH_SOCK", "CUDA_HOME", "HF_HOME", "PYTHONPATH", "NCCL_DEBUG", "XAUTHORITY"])
def test_others_are_no_secret(name):
    # ssh itself needs SSH_AUTH_SOCK to reach the hosts.
    assert not stays_here(name)


def test_what_belongs_to_this_machine_is_not_forwarded():
    environ = {
        "HOME": "/h",
        "DISPLAY": ":0",
        "TMPDIR": "/t",
        "SSH_AUTH_SOCK": "/s",
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "TF_X": "1",
    }
    assert forwarded(environ, ["NCCL_DEBUG=WARN"]) == ["PATH", "TF_X"]


@pytest.mark.parametrize("version", ["HYDRA build details:", "mpirun (Open MPI) 5.0.11"])
@pytest.mark.parametrize("given", [[], ["-x", "HF_TOKEN"]])
def test_hvdrun_says_what_stays_and_hands_on_what_is_named(monkeypatch, capsys, version, given):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setattr(cli.process, "ask", lambda argv: version)
    seen = {}
    monkeypatch.setattr(cli.process, "run", lambda command, environ, **more: seen.update(environ, argv=command) or 0)
    assert cli.main(["--raw", "--verbose", "--no-host-check", "-H", "a:1,b:1", *given, "python", "a.py"]) == 0
    said = capsys.readouterr().err
    assert "hidden" not in said
    line = next((line for line in said.splitlines() if "not handed to other hosts" in line), "")
    assert ("HF_TOKEN" in line) is not bool(given)
    if "HYDRA" in version:  # hands on all that it has itself
        assert ("HF_TOKEN" in seen) is bool(given)
    else:
        assert ("HF_TOKEN" in seen["argv"]) is bool(given)


def test_on_this_machine_nothing_is_held_back(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(cli.process, "ask", lambda argv: "HYDRA build details:")
    seen = {}
    monkeypatch.setattr(cli.process, "run", lambda command, environ, **more: seen.update(environ) or 0)
    for where in (["-np", "1"], ["-H", "localhost:1"]):
        seen.clear()
        assert cli.main([*where, "--raw", "python", "a.py"]) == 0
        assert seen["CUDA_VISIBLE_DEVICES"] == "1"
