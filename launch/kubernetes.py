"""From a Kubernetes job to an MPIJob manifest (kubeflow.org/v2beta1, the MPI operator). Values in, values out.

The operator starts workers that run sshd, writes their names to a host file in the launcher's
pod, and the launcher runs `hvdrun` with it. Sessions of sshd do not see the environment of
their container, so whatever the ranks need is named in hvdrun's `-x`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .hosts import Faults

HOSTFILE = "/etc/mpi/hostfile"  # where the operator mounts it in the launcher
SSH_PORT = 2222  # below 1024 takes a capability that a user other than root does not have
IMPLEMENTATIONS = ("OpenMPI", "Intel", "MPICH")
CLEAN_POD_POLICIES = ("None", "Running", "All")
_LAUNCHER_LIMITS = {"cpu": "1", "memory": "1Gi"}  # it runs mpirun and hands lines of output on
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: it becomes a service, too
_DNS = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")  # RFC 1123
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|[MGTPE]|[KMGTPE]i)?")
_FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3}
_FACTORS |= {letter: 1000.0**n for n, letter in enumerate("MGTPE", start=2)}
_FACTORS |= {f"{letter}i": 1024.0**n for n, letter in enumerate("KMGTPE", start=1)}


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, and where the pods see it."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job for the MPI operator. A worker is a pod that holds `slots` ranks.

    Attributes:
        command: program and arguments of a rank.
        hvdrun: options of the hvdrun in the launcher, apart from ranks, hosts and variables.
        exports: variables for the ranks, `NAME` (as the launcher's image has it) or `NAME=value`.
        namespace: empty: the one of kubectl's context.
        cpus, memory: of a worker, as quantities; empty: as the cluster has it.
        gpus: nvidia.com/gpu of a worker.
        devices: further whole resources of a worker, such as ("rdma/hca", "1").
        shm_size: of /dev/shm in a worker. Containers have 64 MB by default.
        launcher_is_worker: the launcher holds ranks, too, so that no pod is there for mpirun alone.
    """

    name: str
    image: str
    command: tuple[str, ...]
    ranks: int
    slots: int = 1
    hvdrun: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    namespace: str = ""
    implementation: str = "OpenMPI"
    cpus: str = ""
    memory: str = ""
    gpus: int = 0
    devices: tuple[tuple[str, str], ...] = ()
    shm_size: str = "2Gi"
    volumes: tuple[Volume, ...] = ()
    host_network: bool = False
    launcher_is_worker: bool = False
    clean_pod_policy: str = "Running"
    backoff_limit: int = 0
    user: int = 1000
    home: str = "/home/mpiuser"

    def check(self) -> None:
        """Raise Faults, each with its option and its value."""
        faults = [
            *_faults_of_names(self),
            *_faults_of_volumes(self),
            *_faults_of_numbers(self),
            *_faults_of_resources(self),
        ]
        if faults:
            raise Faults(faults)


def _faults_of_names(job: KubernetesJob) -> list[str]:
    faults = []
    longest = f"{job.name}-worker-{max(_workers(job) - 1, 0)}"  # a host name: at most 63 characters
    if not _LABEL.fullmatch(job.name):
        faults.append(f"--job-name {job.name!r}: lower-case letters, digits and '-', a letter first (RFC 1035)")
    elif len(longest) > 63:
        faults.append(f"--job-name {job.name!r}: its worker {longest!r} has {len(longest)} characters, 63 are allowed")
    if job.namespace and not (_DNS.fullmatch(job.namespace) and "." not in job.namespace and len(job.namespace) <= 63):
        faults.append(f"--namespace {job.namespace!r}: lower-case letters, digits and '-', at most 63 (RFC 1123)")
    if not job.image:
        faults.append("--image: missing. Name a container image with hvdlite and the program in it")
    elif not _IMAGE.fullmatch(job.image):
        faults.append(f"--image {job.image!r}: not the name of an image, such as registry.example/train:1")
    if not job.command:
        faults.append("command: missing. Example: hvdrun -np 2 --kubernetes-manifest job.yaml ... python train.py")
    if not job.home.startswith("/"):
        faults.append(f"--container-home {job.home!r}: an absolute path is needed")
    for export in job.exports:
        if not _VARIABLE.fullmatch(export.partition("=")[0]):
            faults.append(f"-x {export!r}: expected NAME or NAME=value")
    return faults


def _faults_of_volumes(job: KubernetesJob) -> list[str]:
    faults = []
    for volume in job.volumes:
        if not _DNS.fullmatch(volume.claim):
            faults.append(f"--volume {volume.claim!r}: not the name of a claim (RFC 1123)")
        if not volume.path.startswith("/"):
            faults.append(f"--volume {volume.claim}:{volume.path}: the path has to be absolute")
    paths = [volume.path.rstrip("/") for volume in job.volumes]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        faults.append(f"--volume: {path!r} is mounted more than once")
    return faults


def _faults_of_numbers(job: KubernetesJob) -> list[str]:
    faults = []
    if job.ranks < 1:
        faults.append(f"-np {job.ranks}: at least 1 rank is needed")
    if job.slots < 1:
        faults.append(f"--slots-per-worker {job.slots}: at least 1 is needed")
    elif job.ranks % job.slots:
        faults.append(f"-np {job.ranks}: does not fill workers of {job.slots} ranks (--slots-per-worker)")
    if job.user < 1:
        faults.append(f"--user-id {job.user}: not root, so 1 or more")
    if job.implementation not in IMPLEMENTATIONS:
        faults.append(f"--mpi-implementation {job.implementation!r}: one of {', '.join(IMPLEMENTATIONS)}")
    if job.clean_pod_policy not in CLEAN_POD_POLICIES:
        faults.append(f"--clean-pod-policy {job.clean_pod_policy!r}: one of {', '.join(CLEAN_POD_POLICIES)}")
    return faults


def _faults_of_resources(job: KubernetesJob) -> list[str]:
    faults = []
    given = {"--cpus-per-worker": job.cpus, "--memory-per-worker": job.memory, "--shm-size": job.shm_size}
    amounts = {option: quantity(text) for option, text in given.items() if text}
    for option, amount in amounts.items():
        if not amount:
            faults.append(f"{option} {given[option]!r}: not a quantity above 0, such as 4, 500m or 16Gi")
    memory, shm = amounts.get("--memory-per-worker"), amounts.get("--shm-size")
    if memory and shm and shm >= memory:
        faults.append(
            f"--shm-size {job.shm_size}: must be smaller than --memory-per-worker {job.memory}, which it counts towards"
        )
    for name, count in job.devices:
        prefix, slash, rest = name.partition("/")
        if not (slash and _DNS.fullmatch(prefix) and re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", rest)):
            faults.append(f"--rdma {name!r}: not a resource of a device plugin, such as rdma/hca")
        if not count.isdecimal() or int(count) < 1:
            faults.append(f"--rdma {name}={count}: expected a whole number, 1 or more")
    return faults


def quantity(text: str) -> float | None:
    """Return the number that a resource quantity stands for, or None if it is none.

    >>> quantity("500m"), quantity("2Gi"), quantity("2 GB")
    (0.5, 2147483648.0, None)
    """
    found = _QUANTITY.fullmatch(text)
    return float(found[1]) * _FACTORS[found[2] or ""] if found else None


def _workers(job: KubernetesJob) -> int:
    """Return how many pods of the role Worker there are; the launcher may be one more that holds ranks."""
    return job.ranks // max(job.slots, 1) - job.launcher_is_worker


def render_manifest(job: KubernetesJob) -> dict[str, Any]:
    """Return the MPIJob for `job`. Raises Faults."""
    job.check()
    metadata = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    roles = {"Launcher": _role(1, _launcher(job))}
    if _workers(job):  # the operator refuses 0
        roles["Worker"] = _role(_workers(job), _worker(job))
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": job.slots,
            "runLauncherAsWorker": job.launcher_is_worker,
            # Else mpirun meets host names that do not resolve and ports where nobody listens yet.
            "launcherCreationPolicy": "WaitForWorkersReady" if _workers(job) else "AtStartup",
            "mpiImplementation": job.implementation,
            "sshAuthMountPath": f"{job.home}/.ssh",
            "runPolicy": {"cleanPodPolicy": job.clean_pod_policy, "backoffLimit": job.backoff_limit},
            "mpiReplicaSpecs": roles,
        },
    }


def _role(replicas: int, template: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": replicas, "restartPolicy": "Never", "template": template}


def _launcher(job: KubernetesJob) -> dict[str, Any]:
    names = [export.partition("=")[0] for export in job.exports]
    container: dict[str, Any] = {
        "name": "launcher",
        "image": job.image,
        "command": ["hvdrun", "-np", str(job.ranks), "--hostfile", HOSTFILE],
        "args": [*job.hvdrun, *(part for name in names for part in ("-x", name)), *map(_literal, job.command)],
    }
    values = [export.partition("=") for export in job.exports if "=" in export]
    if values:
        container["env"] = [{"name": name, "value": _literal(value)} for name, _, value in values]
    return _pod(job, container, holds_ranks=job.launcher_is_worker)


def _literal(text: str) -> str:
    """Return `text` so that Kubernetes leaves it alone: it puts variables in for $(NAME)."""
    return text.replace("$(", "$$(")


def _worker(job: KubernetesJob) -> dict[str, Any]:
    container = {
        "name": "worker",
        "image": job.image,
        "command": ["/usr/sbin/sshd", "-De", "-f", f"{job.home}/.sshd_config"],
        # On the network of the node it is the node's port, and the scheduler keeps two jobs apart.
        "ports": [{"name": "ssh", "containerPort": SSH_PORT, "protocol": "TCP"}],
        # What WaitForWorkersReady waits for.
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "initialDelaySeconds": 1, "periodSeconds": 2},
    }
    return _pod(job, container, holds_ranks=True)


def _pod(job: KubernetesJob, container: dict[str, Any], holds_ranks: bool) -> dict[str, Any]:
    """Return the template of a pod: user, resources, and for one that holds ranks also volumes and the network."""
    labels = {
        "app.kubernetes.io/name": "hvdlite",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": "ranks" if holds_ranks else "launcher",
    }
    security: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": job.user, "runAsGroup": job.user}
    if holds_ranks and job.volumes:  # so that they can be written to; no walk over all files where that is so already
        security |= {"fsGroup": job.user, "fsGroupChangePolicy": "OnRootMismatch"}
    spec: dict[str, Any] = {"securityContext": security}
    limits = _limits(job) if holds_ranks else _LAUNCHER_LIMITS
    if limits:
        container["resources"] = {"limits": dict(limits), "requests": dict(limits)}
    mounts, volumes = _mounts(job) if holds_ranks else ([], [])
    if holds_ranks and job.devices:  # to register memory with the network card
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if holds_ranks and job.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "affinity": _one_per_node(labels)}
    if mounts:
        container["volumeMounts"], spec["volumes"] = mounts, volumes
    return {"metadata": {"labels": labels}, "spec": {**spec, "containers": [container]}}


def _limits(job: KubernetesJob) -> dict[str, str]:
    limits = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": str(job.gpus or ""), **dict(job.devices)}
    return {name: amount for name, amount in limits.items() if amount}


def _mounts(job: KubernetesJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm_size}}]
    claims = list(dict.fromkeys(volume.claim for volume in job.volumes))  # one claim may have two places
    for volume in job.volumes:
        name = f"claim-{claims.index(volume.claim)}"  # a claim's own name may be longer than a volume's
        mounts.append({"name": name, "mountPath": volume.path} | ({"readOnly": True} if volume.read_only else {}))
    for number, claim in enumerate(claims):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return mounts, volumes


def _one_per_node(labels: dict[str, str]) -> dict[str, Any]:
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
