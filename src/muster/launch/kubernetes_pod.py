"""What a pod of a run gets: variables, resources, volumes, and as whom it runs."""

from __future__ import annotations

import base64
from typing import Any

from muster.errors import LaunchError
from muster.launch import secret
from muster.launch.job import ClusterJob

Document = dict[str, Any]

RECIPE_FOLDER = "/etc/muster"
# Kubeflow sets the PET_ ones and refuses them from others; all of them would contradict the command.
TAKEN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
GPU_ENVIRONMENT = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "^lo,docker"}


def environment(job: ClusterJob, name: str) -> list[Document]:
    """A user without an entry in the image's /etc/passwd has neither a name nor a home directory; torch's
    caches need the one, other caches the other."""
    taken = sorted(n for n in job.environment if n in TAKEN or n.startswith("PET_"))
    if taken:
        raise LaunchError(f"{', '.join(taken)} cannot be given: the job sets its own; unset it")
    values = {
        "HOME": job.recipe.kubernetes.mount_path,
        "USER": "muster",
        **(GPU_ENVIRONMENT if job.gpus else {}),
        **job.environment,
    }
    # Kubernetes puts other variables in place of $(NAME), and $ in place of $$.
    found: list[Document] = [
        {"name": n, "value": v.replace("$", "$$")} for n, v in sorted(values.items())
    ]
    if job.secret:
        key = {"name": name, "key": secret.VARIABLE}
        found.append({"name": secret.VARIABLE, "valueFrom": {"secretKeyRef": key}})
    return found


def secret_of(job: ClusterJob, metadata: Document) -> Document:
    """The object with the user's own MUSTER_SECRET, for storage that keeps no modes. It is in no file."""
    data = {secret.VARIABLE: base64.b64encode(job.secret or b"").decode()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": data,
    }


def resources(job: ClusterJob) -> Document:
    """Limits equal requests: such a pod is the last to be evicted, and its ranks see their cores."""
    options = job.recipe.kubernetes
    amounts = {"cpu": str(options.cpus), "memory": options.memory}
    if job.gpus:
        amounts[options.gpu_resource] = str(job.ranks)
    if options.infiniband:
        amounts[options.infiniband] = "1"
    return {"requests": amounts, "limits": dict(amounts)}


def spec(job: ClusterJob, name: str) -> Document:
    options = job.recipe.kubernetes
    claim = {"persistentVolumeClaim": {"claimName": options.volume_claim}}
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    return {
        "terminationGracePeriodSeconds": options.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": memory},
            {"name": "workspace", **(claim if options.volume_claim else {"emptyDir": {}})},
        ],
    }


def mounts(job: ClusterJob) -> list[Document]:
    return [
        {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "workspace", "mountPath": job.recipe.kubernetes.mount_path},
    ]


def container_security(job: ClusterJob) -> Document:
    capabilities = {"drop": ["ALL"]}
    if job.recipe.kubernetes.infiniband:
        capabilities["add"] = ["IPC_LOCK"]  # RDMA pins its buffers
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}
