"""The Dockerfile, as far as it can be judged without building it: structure, copied files, and the manifest's needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from hvdlite.launch import cli
from hvdlite.launch.kubernetes import SSH_PORT, KubernetesJob

ROOT = Path(__file__).parents[2]


@pytest.fixture
def steps() -> list[tuple[str, str]]:
    with (ROOT / "docker/Dockerfile").open("rb") as file:
        parsed = DockerfileParser(fileobj=file).structure
    return [(step["instruction"], step["value"]) for step in parsed if step["instruction"] != "COMMENT"]


def test_every_step_is_an_instruction_of_docker(steps):
    assert {name for name, _ in steps} <= {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "EXPOSE", "CMD"}
    assert steps[0][0] == "FROM"
    assert ":" in steps[0][1]  # a version is named


def test_what_is_copied_is_there_and_not_ignored(steps):
    sources = [word for name, value in steps if name == "COPY" for word in value.split()[:-1] if word[:2] != "--"]
    seen = [line[1:] for line in (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert [source for source in sources if not source.startswith("dist/") and not list(ROOT.glob(source))] == []
    assert {source.split("/")[0] for source in sources} == {line.split("/")[0] for line in seen}


def test_it_runs_what_a_manifest_runs_as_the_user_of_the_manifest(steps, tmp_path):
    args = ["-np", "2", "--image", "i", "--kubernetes-manifest", str(tmp_path / "job.json"), "true"]
    assert cli.main(args) == 0
    manifest = json.loads((tmp_path / "job.json").read_text())["spec"]
    template = manifest["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    last = dict(steps)
    assert json.loads(last["CMD"]) == template["containers"][0]["command"]
    assert int(last["USER"]) == template["securityContext"]["runAsUser"]
    assert int(last["EXPOSE"]) == SSH_PORT
    assert last["WORKDIR"] == KubernetesJob.home
    assert any(f"--uid {last['USER']}" in value for name, value in steps if name == "RUN")


def test_both_ends_of_ssh_agree_with_the_manifest():
    client = settings("ssh_config")
    server = settings("sshd_config")
    assert client["Port"] == server["Port"] == str(SSH_PORT)
    assert server["HostKey"].startswith(f"{KubernetesJob.home}/.ssh/")
    assert server["SetEnv"].startswith("PATH=/opt/hvdlite/bin:")


def settings(name: str) -> dict[str, str]:
    lines = (line.strip() for line in (ROOT / "docker" / name).read_text().splitlines())
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
