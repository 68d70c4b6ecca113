"""Kubernetes: a Kubeflow TrainJob, or a plain Indexed Job where the operator is missing.

Both carry the recipe in a ConfigMap and run `muster train` in one pod per node. A pod that
restarts opens the run of the same name on the volume, and so resumes from the last checkpoint.
"""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from muster.errors import LaunchError, RecipeError
from muster.launch import kubectl, kubernetes_pod, secret
from muster.launch.cluster import PORT
from muster.launch.job import ClusterJob
from muster.recipe.describe import to_yaml
from muster.recipe.own_task import parse, shown
from muster.recipe.schema import Recipe
from muster.run_directory import SIGNALLED, Run
from muster.writing import write

Kind = Literal["trainjob", "job"]
Document = dict[str, Any]

CONTAINER = "node"  # what Kubeflow's runtimes call the container, and the job, that train
KEPT_S = 7 * 24 * 3600  # an ended job and its logs
NAME_LENGTH = 40  # with -node-0-12-x7k2p still within the 63 of a host name


def render(job: ClusterJob, kind: Kind | None = None) -> str:
    """The job as YAML; the same job gives the same text. Without `kind` the recipe's, or a plain job."""
    check(job.recipe, job.nodes, job.least)
    kind = kind or _kind(job, ask=False)
    objects = [_train_job(job)] if kind == "trainjob" else [_service(job), _indexed_job(job)]
    objects = [_network_policy(job, kind), *objects]
    comment = f"# Run {job.name}, written by muster train --on kubernetes.\n"
    return comment + yaml.dump_all(
        [_config_map(job), *objects], Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )


def submit(job: ClusterJob) -> str:
    """Write the YAML into the run directory, and apply it where kubectl has a context; returns what to do
    next."""
    check(job.recipe, job.nodes, job.least)
    context, path = kubectl.context(), job.run / "kubernetes.yaml"
    kind = _kind(job, ask=context is not None)
    write(path, render(job, kind))
    run = Run(job.run)
    if context is None:
        run.update(state="stopped", ended=time.time())  # until someone applies it
        return (
            f"wrote {path}; there is no kubectl with a current context here: where there is one, "
            f"start it with: {_create_secret(job)}kubectl apply -f {path}"
        )
    # before `apply`: the pods may read run.json at once
    run.update(state="queued", failure=None, ended=None, exit_code=None)
    try:
        if job.secret:
            kubectl.apply_secret(kubernetes_pod.secret_of(job, _metadata(job)))
        kubectl.apply(path)
    except LaunchError:
        run.update(
            state="starting"
        )  # not submitted: the state is then `interrupted`, and the run can be resumed
        raise
    name, space = object_name(job.name), job.recipe.kubernetes.namespace
    return (
        f"{kind} {name} in namespace {space} of {context}\n"
        f"follow it: kubectl logs --follow --namespace {space} --selector {'='.join(_selector(name, kind))}\n"
        f"end it:    kubectl delete -f {path}"
        + (f" && kubectl delete secret {name} --namespace {space}" if job.secret else "")
    )


def _create_secret(job: ClusterJob) -> str:
    """The command without the value, which the shell itself writes from its environment: on the command line of a
    program, every user of the machine could read it."""
    if not job.secret:
        return ""
    where = f"{object_name(job.name)} --namespace {job.recipe.kubernetes.namespace}"
    value = f"--from-file={secret.VARIABLE}=/dev/stdin"
    return f'printf %s "${secret.VARIABLE}" | kubectl create secret generic {where} {value} && '


def _kind(job: ClusterJob, ask: bool) -> Kind:
    asked = job.recipe.kubernetes.kind
    if asked != "auto":
        return asked
    if job.least is not None:
        return "job"
    return "trainjob" if ask and kubectl.has_operator() else "job"


def object_name(run: str) -> str:
    """A DNS label for `run`; a name that had to be changed gets a hash appended."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    if name == run and len(name) <= NAME_LENGTH:
        return name
    digits = hashlib.sha256(run.encode()).hexdigest()[:6]
    return f"{name[: NAME_LENGTH - 7].rstrip('-')}-{digits}"


def check(recipe: Recipe, nodes: int, least: int | None = None) -> None:
    """Refuse what the cluster would report only later, or not at all."""
    options, runs = recipe.kubernetes, PurePosixPath(recipe.logging.dir)
    if not options.image:
        raise RecipeError("kubernetes.image: a pod needs one; give an image that has muster in it")
    if least is not None and options.kind == "trainjob":
        raise RecipeError(
            f"kubernetes.kind: a TrainJob has a fixed number of nodes, and --nodes is {least}:{nodes}; set "
            "kubernetes.kind=job"
        )
    if nodes > 1 and not options.volume_claim:
        raise RecipeError(
            f"kubernetes.volume_claim: {nodes} nodes write one run; give a PersistentVolumeClaim that "
            "all of them can mount (ReadWriteMany)"
        )
    if runs.is_absolute() and not runs.is_relative_to(options.mount_path):
        raise RecipeError(
            f"logging.dir: a pod has no {runs} that outlives it; give a relative folder, or one below "
            f"kubernetes.mount_path, which is {options.mount_path}"
        )


def _command(job: ClusterJob, *more: str) -> list[str]:
    """The two kinds of job set the working directory in different ways; `env` works for both."""
    return [
        "env",
        f"--chdir={job.recipe.kubernetes.mount_path}",
        *("muster", "train", f"{kubernetes_pod.RECIPE_FOLDER}/recipe.yaml"),
        *("--run", job.name, "--gpus", str(job.ranks)),
        *more,
    ]


def _config_map(job: ClusterJob) -> Document:
    """The recipe and, beside it, the file of a user's own task."""
    recipe, data = job.recipe, {}
    if (own := parse(recipe.task)) and own.is_file:
        file = Path(own.place)
        data[file.name] = file.read_text()
        recipe = shown(recipe, file.parent)
    return _object(job, "v1", "ConfigMap", data={"recipe.yaml": to_yaml(recipe), **data})


def _service(job: ClusterJob) -> Document:
    """A headless service: gives each pod a DNS name. Pods resolve each other before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(job),
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return _object(job, "v1", "Service", spec=spec)


def _network_policy(job: ClusterJob, kind: Kind) -> Document:
    """Only pods of the same run reach a pod's ports, and whoever reads its metrics: gloo and NCCL take any
    sender at its word."""
    pods = {"matchLabels": dict([_selector(object_name(job.name), kind)])}
    ingress: list[Document] = [{"from": [{"podSelector": pods}]}]
    if job.recipe.logging.prometheus is not None:
        ingress.append({"ports": [{"port": job.recipe.logging.prometheus}]})
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _indexed_job(job: ClusterJob) -> Document:
    options, name = job.recipe.kubernetes, object_name(job.name)
    nodes = ["--nodes", job.asked_nodes, "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    master = f"{name}-0.{name}.{options.namespace}.svc"
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": _command(job, *nodes, "--master-addr", master, "--master-port", str(PORT)),
        "env": kubernetes_pod.environment(job, object_name(job.name)),
        "resources": kubernetes_pod.resources(job),
        "securityContext": kubernetes_pod.container_security(job),
        "volumeMounts": kubernetes_pod.mounts(job),
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "automountServiceAccountToken": False,
        **kubernetes_pod.spec(job, object_name(job.name)),
        "containers": [container],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": options.restarts,
        "maxFailedIndexes": job.nodes - (job.least or job.nodes),
        **(_ends_with_node_0() if job.least else {}),
        "podFailurePolicy": _failure_policy(),
        "ttlSecondsAfterFinished": KEPT_S,
        "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
    }
    return _object(job, "batch/v1", "Job", spec=spec)


def _ends_with_node_0() -> Document:
    """The run's end is node 0's; pods that still wait then, for a machine or for their part, are removed."""
    return {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def _failure_policy() -> Document:
    """A failed node ends the others too, so failures are counted per pod. A pod that was evicted, or that
    saved and ended because another one was, has not failed."""
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    ended = {"containerName": CONTAINER, "operator": "In", "values": [SIGNALLED]}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": evicted},
            {"action": "Ignore", "onExitCodes": ended},
        ]
    }


def _train_job(job: ClusterJob) -> Document:
    """Restarts, and which node a pod is, are the runtime's: it sets the PET_ variables muster reads."""
    trainer = {
        "image": job.recipe.kubernetes.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "command": _command(job),
        "env": kubernetes_pod.environment(job, object_name(job.name)),
        "resourcesPerNode": kubernetes_pod.resources(job),
    }
    container = {
        "name": CONTAINER,
        "volumeMounts": kubernetes_pod.mounts(job),
        "securityContext": kubernetes_pod.container_security(job),
    }
    pods = {
        "name": CONTAINER,
        "template": {
            "spec": {
                "template": {
                    "spec": {
                        **kubernetes_pod.spec(job, object_name(job.name)),
                        "containers": [container],
                    }
                }
            }
        },
    }
    patch = {
        "manager": "muster",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [pods]}}},
    }
    spec = {
        "runtimeRef": {"name": job.recipe.kubernetes.runtime},
        "trainer": trainer,
        "runtimePatches": [patch],
    }
    return _object(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec=spec)


def _object(job: ClusterJob, version: str, kind: str, **content: Document) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": _metadata(job), **content}


def _metadata(job: ClusterJob) -> Document:
    return {
        "name": object_name(job.name),
        "namespace": job.recipe.kubernetes.namespace,
        "labels": _labels(job),
    }


def _labels(job: ClusterJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "muster",
        "app.kubernetes.io/instance": object_name(job.name),
    }


def _selector(name: str, kind: Kind) -> tuple[str, str]:
    """The label that all pods of the job have, and its value."""
    label = "jobset.sigs.k8s.io/jobset-name" if kind == "trainjob" else "app.kubernetes.io/instance"
    return label, name


class _Dumper(yaml.SafeDumper):
    """The recipe stays readable within the job, line by line, and equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """What begins like a number keeps its quotes: Kubernetes reads `1e3` as one, PyYAML does not."""
    style = "|" if "\n" in text else "'" if re.match(r"[-+.]?\d", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
