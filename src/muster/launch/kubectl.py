"""Calls of kubectl: the current context, the kinds of job the cluster has, and starting one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.errors import LaunchError

LIMIT_S = 60


def context() -> str | None:
    """The name of the cluster that kubectl talks to, if there is one."""
    if shutil.which("kubectl") is None:
        return None
    done = _kubectl("config", "current-context")
    return (done.stdout.strip() or None) if done.returncode == 0 else None


def has_operator() -> bool:
    """Whether the cluster has TrainJobs. By API discovery, which every user may do; reading the CRD needs
    more rights."""
    done = _kubectl("api-resources", "--api-group=trainer.kubeflow.org", "--output=name")
    if done.returncode != 0:
        raise LaunchError(
            f"kubectl cannot reach the cluster: {_reason(done)}; fix the connection, or give "
            "kubernetes.kind (job or trainjob) to only write the file"
        )
    return "trainjobs.trainer.kubeflow.org" in done.stdout.split()


def apply(path: Path) -> None:
    """Create what `path` holds; the job is the last object in it."""
    done = _kubectl("apply", "-f", str(path))
    if done.returncode != 0:
        cure = f"fix that, then start it with: kubectl apply -f {path}"
        if "runtimePatches" in done.stderr:
            cure = "muster needs Kubeflow Trainer 2.2 or newer; use kubernetes.kind=job instead"
        raise LaunchError(f"kubectl apply refused {path}: {_reason(done)}; {cure}")
    last = done.stdout.strip().splitlines()[-1]
    if not last.endswith(" created"):
        raise LaunchError(
            f"the cluster has this job already ({last}) and does not start it twice; to go on with "
            f"the run: kubectl delete -f {path} && kubectl apply -f {path}"
        )


def apply_secret(document: Mapping[str, Any]) -> None:
    """Not from a file, so that it is on no disk of this machine's."""
    done = _kubectl("apply", "-f", "-", given=json.dumps(document))
    if done.returncode != 0:
        raise LaunchError(f"kubectl apply refused the Secret of the run: {_reason(done)}; fix that")


def _kubectl(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", *arguments, "--request-timeout=30s"]
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{' '.join(command)}` has not answered for {LIMIT_S} s; is the cluster reachable?"
        ) from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
