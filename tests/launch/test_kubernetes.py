"""Manifests for Kubernetes: golden files, the schemas of the operator and of pods, and every fault at once."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from hvdlite.launch import cli
from hvdlite.launch.job import parse_hostfile
from hvdlite.launch.kubernetes import quantity

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLAIN = ["-np", "4", "--slots-per-worker", "2", "--image", "r.example/train:1"]
TRAIN = ["python", "train.py", "--lr", "0.1", "--note", "$(HOME) and more"]
JOBS = {
    "plain": PLAIN,
    "gpu": [
        *("-np", "16", "--slots-per-worker", "8", "--image", "r.example/train@sha256:" + "0" * 64),
        *("--namespace", "team-a", "--job-name", "gpt", "--gpus-per-worker", "8", "--cpus-per-worker", "64"),
        *("--memory-per-worker", "512Gi", "--shm-size", "64Gi", "--rdma", "rdma/hca", "--rdma", "vpc.aws/efa=4"),
        *("--volume", "data:/data:ro", "--volume", "out:/out", "--host-network", "--run-launcher-as-worker"),
        *("-x", "HVDLITE_SPIN=0", "-x", "LD_LIBRARY_PATH", "--backoff-limit", "3", "--clean-pod-policy", "All"),
    ],
    "mpich": [*PLAIN, "--mpi-implementation", "MPICH", "--user-id", "1001", "--container-home", "/home/me"],
    "intel": [*PLAIN, "--mpi-implementation", "Intel", "--bind-to", "core", "--mpi-args=-iface eth0", "--verbose"],
    "alone": ["-np", "2", "--slots-per-worker", "2", "--image", "train", "--run-launcher-as-worker"],
}  # fmt: skip


def written(path: Path, options: list[str], command: list[str] = TRAIN) -> str:
    assert cli.main([*options, "--kubernetes-manifest", str(path), *command]) == 0
    return path.read_text()


def faults(capsys, *arguments: str) -> str:
    assert cli.main(["--kubernetes-manifest", "job.yaml", *arguments]) == cli.CANNOT_START
    return capsys.readouterr().err


@pytest.mark.parametrize("name", JOBS)
def test_the_manifest_is_the_golden_file(tmp_path, name):
    assert written(tmp_path / "job.yaml", JOBS[name]) == (HERE / f"golden/mpijob_{name}.yaml").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_the_manifest_keeps_to_the_schemas(tmp_path, name):
    manifest = json.loads(written(tmp_path / "job.json", JOBS[name]))
    jsonschema.validate(manifest, json.loads((HERE / "mpijob.schema.json").read_text()))
    for role in manifest["spec"]["mpiReplicaSpecs"].values():
        template = {"apiVersion": "v1", "kind": "Pod", **role["template"]}
        kubernetes_validate.validate(template, "1.31", strict=True)
        for container in template["spec"]["containers"]:
            resources = container.get("resources", {"limits": {}, "requests": {}})
            assert resources["limits"] == resources["requests"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted == {volume["name"] for volume in template["spec"].get("volumes", [])}


def test_the_schemas_see_a_wrong_field(tmp_path):
    manifest = json.loads(written(tmp_path / "job.json", PLAIN))
    schema = json.loads((HERE / "mpijob.schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="waitForWorkers"):
        jsonschema.validate({**manifest, "spec": {**manifest["spec"], "waitForWorkers": True}}, schema)
    template = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    template["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.31", strict=True)


def test_yaml_and_json_say_the_same(tmp_path):
    text = written(tmp_path / "job.yaml", JOBS["gpu"])
    assert yaml.safe_load(text) == json.loads(written(tmp_path / "job.json", JOBS["gpu"])) | {}
    assert "&id" not in text  # nothing refers to another place


def test_the_launcher_runs_the_command_as_hvdrun_reads_it(tmp_path):
    manifest = json.loads(written(tmp_path / "job.json", JOBS["gpu"]))
    (container,) = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    line = [text.replace("$$(", "$(") for text in (*container["command"], *container["args"])]
    options = cli._parser().parse_args(line[1:])
    assert (options.ranks, options.hostfile, options.export, options.command) == (
        *(16, "/etc/mpi/hostfile", ["HVDLITE_SPIN", "LD_LIBRARY_PATH"], TRAIN),
    )


@pytest.mark.parametrize("text", ["a.job.ns.svc slots=2\nb.job.ns.svc slots=2\n", "a.job.ns.svc:2\nb.job.ns.svc:2\n"])
def test_the_launcher_reads_the_host_files_of_the_operator(text):
    assert [(host.name, host.slots) for host in parse_hostfile(text, "f")] == [("a.job.ns.svc", 2), ("b.job.ns.svc", 2)]


def test_all_faults_are_told_at_once_each_with_its_field(capsys):
    told = faults(
        capsys,
        *("-H", "a:2", "--job-name", "A_b", "--namespace", "x.y", "--slots-per-worker", "two", "--user-id", "0"),
        *("--cpus-per-worker", "3x", "--memory-per-worker", "1Gi", "--shm-size", "2Gi", "--rdma", "hca"),
        *("--volume", "data:here", "--mpi-implementation", "LAM", "--clean-pod-policy", "some", "-x", "a b=1"),
    )
    fields = [
        *("--slots-per-worker 'two'", "-H, --hostfile", "-np: missing", "--job-name 'A_b'", "--namespace 'x.y'"),
        *("--image: missing", "command: missing", "-x 'a b=1'", "--volume data:here", "--user-id 0"),
        *("--mpi-implementation 'LAM'", "--clean-pod-policy 'some'", "--cpus-per-worker '3x'", "--shm-size 2Gi"),
        "--rdma 'hca'",
    ]
    assert f"{len(fields)} faults in this job:" in told
    assert [line for line in told.splitlines() if line.startswith("  ")] == [
        *(line for field in fields for line in told.splitlines() if line.startswith(f"  {field}"))
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-np", "3", "--slots-per-worker", "2"], "-np 3: does not fill workers of 2 ranks"),
        (["-np", "2", "--job-name", "a" * 55], "has 64 characters, 63 are allowed"),
        (["-np", "2", "--image", "a b"], "--image 'a b': not the name of an image"),
        (["-np", "2", "--volume", "data:/x", "--volume", "out:/x/"], "'/x' is mounted more than once"),
        (["-np", "2", "--shm-size", "0"], "--shm-size '0': not a quantity above 0"),
        (["-np", "2", "--ssh-port", "22"], "--ssh-port, --ssh-identity-file: the operator gives the keys"),
        (["-np", "2", "--rdma", "rdma/hca=0"], "--rdma rdma/hca=0: expected a whole number"),
    ],
)
def test_a_fault_is_told(capsys, arguments, told):
    assert told in faults(capsys, "--image", "i", *arguments, "python", "train.py")


def test_what_hvdrun_is_told_reaches_the_hvdrun_in_the_pod(tmp_path, capsys):
    options = ["--launcher", "mpirun", "--output-filename", "/logs", "--network-interfaces", "eth0,eth1", "--label"]
    options += ["--no-host-check"]
    options += ["--binding-args=--map-by core", "--start-timeout", "9", "--tcp", "--prefix-output-with-timestamp"]
    given = ["-np", "2", *options, "--verbose"]
    text = written(tmp_path / "job.json", [*given, "--image", "i", "--cycle-time-ms", "1"], ["true"])
    assert "--cycle-time-ms has no effect" in capsys.readouterr().err
    (container,) = json.loads(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    in_pod = cli._parser().parse_args([*container["command"][1:], *container["args"]])
    assert in_pod == cli._parser().parse_args([*given, "--hostfile", "/etc/mpi/hostfile", "true"])


def test_nothing_is_written_when_there_is_a_fault(tmp_path):
    assert cli.main(["-np", "2", "--kubernetes-manifest", str(tmp_path / "job.yaml"), "true"]) == cli.CANNOT_START
    assert not list(tmp_path.iterdir())


def test_options_for_kubernetes_without_a_manifest_are_refused(capsys):
    assert cli.main(["-np", "2", "--image", "i", "--host-network", "true"]) == cli.CANNOT_START
    assert "--image, --host-network: for Kubernetes. Add --kubernetes-manifest FILE" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(capsys):
    args = [*PLAIN, "--kubernetes-manifest", "/nowhere/job.json", "true"]
    assert cli.main(args) == cli.CANNOT_START
    assert "cannot write /nowhere/job.json" in capsys.readouterr().err


def test_without_pyyaml_the_remedy_is_told_and_json_works(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'hvdlite[yaml]'" in faults(capsys, *PLAIN, "true")
    assert json.loads(written(tmp_path / "job.json", PLAIN))["kind"] == "MPIJob"


def test_the_example_is_what_the_documented_command_writes(tmp_path):
    page = (ROOT / "docs/launching.md").read_text()
    (found,) = re.findall(r"^\$ (hvdrun --kubernetes-manifest (?:.*\\\n)*.*)$", page, re.MULTILINE)
    words = shlex.split(found.replace("\\\n", " "))
    assert words[1:3] == ["--kubernetes-manifest", "examples/launch/mpijob.yaml"]
    (tmp_path / "examples/launch").mkdir(parents=True)
    words[2] = str(tmp_path / words[2])
    assert cli.main(words[1:]) == 0
    assert Path(words[2]).read_text() == (ROOT / "examples/launch/mpijob.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("0.5", 0.5), ("500m", 0.5), ("1k", 1000), ("2Mi", 2 * 2**20), ("1G", 1e9), ("1 G", None), ("GB", None)],
)
def test_a_quantity_is_read_as_kubernetes_does(text, number):
    assert quantity(text) == number
