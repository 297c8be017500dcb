"""hvdrun's options for Kubernetes: from parsed arguments to a KubernetesJob, and from a manifest to text."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from hvdlite.errors import LaunchError

from . import forwarding, horovodrun
from .hosts import Faults
from .kubernetes import KubernetesJob, Volume, render_manifest
from .slurm_script import file_name

_TEXTS = {  # option: (attribute of KubernetesJob, placeholder, help)
    "--image": ("image", "IMAGE", "container image with hvdlite and the program in it"),
    "--job-name": ("name", "NAME", "name of the MPIJob (default: the file's name without its ending)"),
    "--namespace": ("namespace", "NAME", "namespace (default: that of kubectl's context)"),
    "--mpi-implementation": ("implementation", "MPI", "the image's: OpenMPI (default), Intel or MPICH"),
    "--cpus-per-worker": ("cpus", "QUANTITY", "processors of a worker, such as 4 or 500m"),
    "--memory-per-worker": ("memory", "QUANTITY", "memory of a worker, such as 16Gi"),
    "--shm-size": ("shm_size", "QUANTITY", "/dev/shm of a worker (default: 2Gi)"),
    "--clean-pod-policy": ("clean_pod_policy", "POLICY", "pods to remove at the end: Running (default), All or None"),
    "--container-home": ("home", "PATH", "the image's home with .sshd_config (default: /home/mpiuser)"),
}
_NUMBERS = {
    "--slots-per-worker": ("slots", "N", "ranks in a worker (default: 1)"),
    "--gpus-per-worker": ("gpus", "N", "GPUs (nvidia.com/gpu) of a worker"),
    "--backoff-limit": ("backoff_limit", "N", "how often to start again after a failure (default: 0)"),
    "--user-id": ("user", "ID", "user in the image, not root (default: 1000)"),
}
_LISTS = {
    "--rdma": ("devices", "RESOURCE[=N]", "device resource of a worker, such as rdma/hca=1; may be repeated"),
    "--volume": ("volumes", "CLAIM:PATH[:ro]", "mount a persistent volume claim; may be repeated"),
}
_SWITCHES = {
    "--host-network": ("host_network", "the nodes' own network, one worker per node"),
    "--run-launcher-as-worker": ("launcher_is_worker", "the launcher's pod holds ranks, too"),
}


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Kubernetes").add_argument
    add(
        "--kubernetes-manifest",
        type=file_name,
        metavar="FILE",
        help="write an MPIJob (kubeflow.org/v2beta1) and start nothing; .yaml, .json, or - for the standard output",
    )
    # Numbers are read later, so that all faults are told at once.
    for option, (name, metavar, text) in {**_TEXTS, **_NUMBERS}.items():
        add(option, dest=f"kubernetes_{name}", metavar=metavar, help=text)
    for option, (name, metavar, text) in _LISTS.items():
        add(option, dest=f"kubernetes_{name}", metavar=metavar, help=text, action="append")
    for option, (name, text) in _SWITCHES.items():
        # None rather than False unless given: then it is seen that it was.
        add(option, dest=f"kubernetes_{name}", help=text, action="store_const", const=True)


def kubernetes_text(options: argparse.Namespace) -> str | None:
    """Return the manifest that `options` ask for as text, or None when they ask for none."""
    path = options.kubernetes_manifest
    if not path:
        tables = {**_TEXTS, **_NUMBERS, **_LISTS, **_SWITCHES}
        stray = [option for option, (name, *_) in tables.items() if getattr(options, f"kubernetes_{name}") is not None]
        if stray:
            raise LaunchError(f"{', '.join(stray)}: for Kubernetes. Add --kubernetes-manifest FILE, or leave it out")
        return None
    return _as_text(render_manifest(_job(options, path)), path)


def _job(options: argparse.Namespace, path: str) -> KubernetesJob:
    exports, faults = horovodrun.exports(options)
    named = forwarding.named(options.export)  # what -x says beats other options
    fields: dict[str, Any] = {}
    for name, *_ in {**_TEXTS, **_SWITCHES}.values():
        if (given := getattr(options, f"kubernetes_{name}")) is not None:
            fields[name] = given
    for option, (name, *_) in _NUMBERS.items():
        text = getattr(options, f"kubernetes_{name}")
        if text is not None and not text.isdecimal():
            faults.append(f"{option} {text!r}: expected a whole number")
        elif text is not None:
            fields[name] = int(text)
    fields["devices"] = tuple(map(_device, options.kubernetes_devices or ()))
    fields["volumes"] = tuple(map(_volume, options.kubernetes_volumes or ()))
    if options.hosts or options.hostfile:
        faults.append("-H, --hostfile: the operator chooses the hosts. Say -np and --slots-per-worker instead")
    if options.ssh_port or options.ssh_identity_file:
        faults.append("--ssh-port, --ssh-identity-file: the operator gives the keys, and the image's sshd has its port")
    if options.ranks is None:
        faults.append("-np: missing. How many ranks?")
    job = KubernetesJob(
        command=tuple(options.command[1:] if options.command[:1] == ["--"] else options.command),
        ranks=options.ranks or fields.get("slots", 1),
        hvdrun=_handed_on(options),
        exports=(*options.export, *(export for export in exports if export.partition("=")[0] not in named)),
        **{"name": _stem(path), "image": "", **fields},
    )
    try:
        job.check()
    except Faults as error:
        faults += error.faults
    if faults:
        raise Faults(faults)
    return job


def _handed_on(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that mean something to the hvdrun in the launcher's pod."""
    args: list[str] = []
    if options.bind_to != "none":
        args += ["--bind-to", options.bind_to]
    if options.mpi_args:
        args += [f"--mpi-args={shlex.join(shlex.split(options.mpi_args))}"]  # with =, for it begins with a dash
    if options.binding_args:
        args += [f"--binding-args={options.binding_args}"]
    if options.launcher != "auto":
        args += ["--launcher", options.launcher]
    if options.output_filename:
        args += ["--output-filename", options.output_filename]
    if options.interfaces:
        args += ["--network-interfaces", ",".join(options.interfaces)]
    if options.start_timeout:
        args += ["--start-timeout", str(options.start_timeout)]
    switches = {
        "--as-horovod": options.as_horovod, "--label": options.label, "--no-label": options.label is False,
        "--raw": options.raw, "--no-host-check": options.unchecked, "--tcp": options.tcp,
        "--prefix-output-with-timestamp": options.stamped, "--verbose": options.verbose,
    }  # fmt: skip
    return (*args, *(option for option, given in switches.items() if given))


def _device(text: str) -> tuple[str, str]:
    name, found, count = text.partition("=")
    return name, count if found else "1"


def _volume(text: str) -> Volume:
    claim, _, path = text.partition(":")
    return Volume(claim, path.removesuffix(":ro"), read_only=path.endswith(":ro"))


def _stem(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0] if path != "-" else "train"


def _as_text(manifest: dict[str, Any], path: str) -> str:
    if path.endswith(".json"):
        return json.dumps(manifest, indent=2) + "\n"
    try:
        import yaml
    except ImportError as error:
        raise LaunchError(
            f"{path}: writing YAML needs PyYAML, which is not installed. "
            "`pip install 'hvdlite[yaml]'`, or name a file that ends in .json: kubectl reads both"
        ) from error

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Repeats what occurs twice, where YAML would refer to it."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump(manifest, Dumper=Plain, sort_keys=False, default_flow_style=False, width=110)
    return text
