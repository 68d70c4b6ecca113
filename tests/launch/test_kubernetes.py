"""Jobs for Kubernetes, held against the published schemas; only kubectl is played by another."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from muster.cli import app
from muster.errors import LaunchError, MusterError, RecipeError
from muster.launch import cluster, kubernetes
from muster.launch.job import ClusterJob
from muster.recipe.load import from_resolved, load
from muster.run_directory import Run

VERSIONS = ["1.29", "1.37"]  # the first in which a failure limit per pod is on, and the newest here
IMAGE = "kubernetes.image=ghcr.io/someone/muster:1"
CLAIM = "kubernetes.volume_claim=speech"


def make_job(folder: Path, *overrides: str, name: str = "speech-20260101-120000") -> ClusterJob:
    """Two nodes with the four GPUs each of guide 000."""
    run = folder / name
    run.mkdir(exist_ok=True)
    recipe = load("speech", [IMAGE, CLAIM, *overrides])
    return ClusterJob(run, recipe, nodes=2, ranks=4, gpus=True)


def objects(job: ClusterJob, kind: kubernetes.Kind | None = None) -> dict[str, Any]:
    documents = list(yaml.safe_load_all(kubernetes.render(job, kind)))
    return {document["kind"]: document for document in documents}


def pod_of(job: ClusterJob, kind: kubernetes.Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's spec and its container, wherever this kind of job keeps their parts."""
    if kind == "job":
        pod = objects(job, kind)["Job"]["spec"]["template"]["spec"]
        return pod, pod["containers"][0]
    spec = objects(job, kind)["TrainJob"]["spec"]
    template = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    pod = template["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    trainer = spec["trainer"]
    return pod, {**pod["containers"][0], **trainer, "resources": trainer["resourcesPerNode"]}


both = pytest.mark.parametrize("kind", ["job", "trainjob"])
cases = pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["kubernetes.infiniband=rdma/hca_shared_devices_a", "kubernetes.gpu_resource=amd.com/gpu"],
    ],
    ids=["plain", "infiniband"],
)


@cases
@pytest.mark.parametrize("version", VERSIONS)
def test_the_plain_job_fits_the_published_schemas(tmp_path, version, overrides):
    found = objects(make_job(tmp_path, *overrides), "job")
    assert list(found) == ["ConfigMap", "NetworkPolicy", "Service", "Job"]
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_a_key_that_does_not_exist(tmp_path):
    job = objects(make_job(tmp_path), "job")["Job"]
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@cases
def test_the_trainjob_is_made_of_kubeflows_own_types(tmp_path, overrides):
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import (  # slow to import
        TrainerV1alpha1TrainJob,
    )

    found = objects(make_job(tmp_path, *overrides), "trainjob")
    assert list(found) == ["ConfigMap", "NetworkPolicy", "TrainJob"]
    known = TrainerV1alpha1TrainJob.from_dict(found["TrainJob"])
    assert known is not None
    assert known.to_dict() == found["TrainJob"]  # from_dict drops what the types do not know
    assert found["TrainJob"]["apiVersion"] == "trainer.kubeflow.org/v1alpha1"


@both
def test_rendered_twice_it_is_the_same_text(tmp_path, kind):
    job = make_job(tmp_path)
    backwards = replace(job, environment={"NCCL_IB_HCA": "mlx5", "A": "1"})
    forwards = replace(job, environment={"A": "1", "NCCL_IB_HCA": "mlx5"})
    assert kubernetes.render(backwards, kind) == kubernetes.render(forwards, kind)


@both
def test_a_pod_asks_for_its_gpus_and_has_room_in_shared_memory(tmp_path, kind):
    pod, container = pod_of(make_job(tmp_path), kind)
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes["shared-memory"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert volumes["workspace"] == {"persistentVolumeClaim": {"claimName": "speech"}}
    assert places == {
        "recipe": "/etc/muster",
        "shared-memory": "/dev/shm",
        "workspace": "/workspace",
    }


@both
def test_no_pod_runs_as_root_or_can_become_it(tmp_path, kind):
    pod, container = pod_of(make_job(tmp_path, "kubernetes.user=1234"), kind)
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (
        True,
        1234,
        1234,
    )
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


@both
def test_infiniband_is_asked_for_and_may_lock_memory(tmp_path, kind):
    _, container = pod_of(make_job(tmp_path, "kubernetes.infiniband=rdma/hca"), kind)
    assert container["resources"]["limits"]["rdma/hca"] == "1"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


@both
def test_nccl_hears_the_guides_words_unless_the_user_has_others(tmp_path, kind):
    job = replace(make_job(tmp_path), environment={"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "1e3"})
    _, container = pod_of(job, kind)
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert values["NCCL_SOCKET_IFNAME"] == "^lo,docker"
    assert values["NCCL_DEBUG"] == "WARN"
    assert "value: '1e3'" in kubernetes.render(job, kind)  # Kubernetes' YAML knows 1e3 as a number
    on_cpus = replace(job, gpus=False, environment={})
    _, container = pod_of(on_cpus, kind)
    assert not [entry for entry in container["env"] if entry["name"].startswith("NCCL")]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_the_recipe_travels_whole(tmp_path):
    job = make_job(tmp_path, r"data.tokenizer.characters='a: #b\'é '", "description='1e3'")
    (tmp_path / "recipe.yaml").write_text(objects(job)["ConfigMap"]["data"]["recipe.yaml"])
    assert from_resolved(tmp_path / "recipe.yaml") == job.recipe


def parsed(command: list[str], index: int) -> dict[str, Any]:
    """What `muster train` makes of a container's command."""
    assert command[:3] == ["env", "--chdir=/workspace", "muster"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command[4:]]
    group: Any = typer.main.get_command(app)
    return dict(group.commands[command[3]].make_context("train", words).params)


def test_pods_of_the_plain_job_find_the_first_one_by_name(tmp_path):
    job = make_job(tmp_path, "kubernetes.namespace=speech-team")
    found = objects(job, "job")
    spec, name = found["Job"]["spec"], found["Job"]["metadata"]["name"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == name
    service = found["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    asked = parsed(pod["containers"][0]["command"], index=1)
    assert asked["recipe"] == "/etc/muster/recipe.yaml"
    assert (asked["run_name"], asked["gpus"]) == (job.name, "4")
    assert (asked["nodes"], asked["node_rank"]) == ("2", 1)
    assert asked["master_addr"] == f"{name}-0.{name}.speech-team.svc"
    assert asked["master_port"] == service["ports"][0]["port"] == 29500


@pytest.mark.parametrize("version", ["1.31", VERSIONS[-1]])  # the first with successPolicy
def test_an_elastic_job_has_a_pod_for_every_node_and_ends_with_node_0(tmp_path, version):
    job = replace(make_job(tmp_path), nodes=4, least=2)
    found = objects(job)
    assert list(found) == ["ConfigMap", "NetworkPolicy", "Service", "Job"]
    kubernetes_validate.validate(found["Job"], version, strict=True)
    spec = found["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (4, 4, 2)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["backoffLimitPerIndex"] == 3
    for index in (0, 3):
        asked = parsed(spec["template"]["spec"]["containers"][0]["command"], index)
        node = cluster.node({}, asked["nodes"], asked["node_rank"], asked["master_addr"])
        assert (node.least, node.nodes, node.rank) == (2, 4, index)


def test_a_trainjob_is_not_elastic(tmp_path, kubectl):
    job = replace(make_job(tmp_path, "kubernetes.kind=trainjob"), least=1)
    with pytest.raises(RecipeError, match=r"--nodes is 1:2; set kubernetes\.kind=job"):
        kubernetes.render(job)
    kubectl.answers(config=CONTEXT, api_resources=OPERATOR)
    kubernetes.submit(replace(make_job(tmp_path), least=1))
    assert "kind: TrainJob" not in (tmp_path / job.name / "kubernetes.yaml").read_text()


OWN = b"$(HOME) and 'quotes' of a secret"


@both
def test_pods_have_the_users_secret_by_reference_and_no_file_has_it(tmp_path, kubectl, kind):
    kubectl.answers(config=CONTEXT)
    job = replace(make_job(tmp_path, f"kubernetes.kind={kind}"), secret=OWN)
    said = kubernetes.submit(job)
    assert f"kubectl delete secret {job.name} --namespace default" in said
    _, container = pod_of(job, kind)
    (entry,) = [entry for entry in container["env"] if entry["name"] == "MUSTER_SECRET"]
    wanted = {"name": job.name, "key": "MUSTER_SECRET"}
    assert entry == {"name": "MUSTER_SECRET", "valueFrom": {"secretKeyRef": wanted}}
    (document,) = kubectl.given()
    kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    assert (document["kind"], document["metadata"]["name"]) == ("Secret", job.name)
    assert base64.b64decode(document["data"]["MUSTER_SECRET"]) == OWN
    told = [*kubectl.heard(), said, repr(job)]
    texts = [path.read_text() for path in job.run.rglob("*") if path.is_file()]
    for sign in (OWN.decode(), document["data"]["MUSTER_SECRET"]):
        assert not any(sign in str(text) for text in (*told, *texts))


def test_without_kubectl_the_secret_is_made_by_a_command_that_does_not_show_it(tmp_path, kubectl):
    job = replace(make_job(tmp_path), secret=OWN)
    command = kubernetes.submit(job).partition("start it with: ")[2]
    kubectl.answers()
    shell = {"PATH": os.environ["PATH"], "MUSTER_SECRET": OWN.decode()}
    subprocess.run(["/bin/sh", "-ec", command], env=shell, check=True)
    create, apply = kubectl.heard(last=0)
    assert create == [
        *("create", "secret", "generic", job.name, "--namespace", "default"),
        "--from-file=MUSTER_SECRET=/dev/stdin",
    ]
    assert kubectl.stdin() == OWN.decode()
    assert apply == ["apply", "-f", str(job.run / "kubernetes.yaml")]
    assert OWN.decode() not in command


def test_a_trainjob_leaves_nodes_and_addresses_to_kubeflow(tmp_path):
    job = make_job(tmp_path, "kubernetes.runtime=our-torch")
    spec = objects(job, "trainjob")["TrainJob"]["spec"]
    assert spec["runtimeRef"] == {"name": "our-torch"}
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 4)
    asked = parsed(spec["trainer"]["command"], index=0)
    assert (asked["run_name"], asked["gpus"], asked["node_rank"]) == (job.name, "4", None)
    assert asked["master_addr"] is None


def test_a_preempted_pod_comes_back_without_counting_as_a_failure(tmp_path):
    spec = objects(make_job(tmp_path, "kubernetes.restarts=5"), "job")["Job"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (5, 0)
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"]["values"] == [143]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_names_become_dns_labels_that_stay_apart():
    names = ["speech-20260101-120000", "Speech.v2_x-1", "speech.v2-x-1", "7b", "_", "x" * 90]
    made = [kubernetes.object_name(name) for name in names]
    assert made[0] == names[0]
    assert len(set(made)) == len(names)
    for name in made:
        assert len(name) <= 40
        assert name[0].isalpha()
        assert name[-1].isalnum()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["kubernetes.image=null"], "kubernetes.image: a pod needs one"),
        (["kubernetes.volume_claim=null"], "kubernetes.volume_claim: 2 nodes write one run"),
        (["logging.dir=/home/me/runs"], "kubernetes.mount_path, which is /workspace"),
        (["kubernetes.memory=64GB"], "kubernetes.memory: got '64GB'"),
        (["kubernetes.shared_memory='16 Gi'"], "kubernetes.shared_memory: got '16 Gi'"),
        (["kubernetes.shared_memory=64Gi"], "raise kubernetes.memory above it"),
        (["kubernetes.user=0"], "kubernetes.user: 0 is root"),
        (["kubernetes.namespace=Team"], "kubernetes.namespace: got 'Team'"),
        (["kubernetes.mount_path=data"], "kubernetes.mount_path: got 'data'"),
        (["kubernetes.mount_path=/data/../etc"], "kubernetes.mount_path: got '/data/../etc'"),
        (["kubernetes.mount_path='/$(HOME)'"], "kubernetes.mount_path: got '/$(HOME)'"),
        (["kubernetes.mount_path=/etc/ssl"], "kubernetes.mount_path: /etc is the image's own"),
        (["kubernetes.image='a b'"], "kubernetes.image: got 'a b'"),
        (["kubernetes.gpu_resource='$(X)'"], "kubernetes.gpu_resource: got '$(X)'"),
    ],
)
def test_what_the_cluster_would_refuse_is_refused_here(tmp_path, overrides, words):
    with pytest.raises(RecipeError) as refused:
        kubernetes.render(make_job(tmp_path, *overrides))
    assert words in str(refused.value)


def test_one_node_needs_no_claim_and_runs_below_the_mount_are_kept(tmp_path):
    job = make_job(tmp_path, "kubernetes.volume_claim=null", "logging.dir=/workspace/runs")
    pod, _ = pod_of(replace(job, nodes=1), "job")
    assert {"name": "workspace", "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_MASTER_ADDR", "WORLD_SIZE"])
def test_variables_that_say_who_is_who_are_the_jobs_own(tmp_path, name):
    with pytest.raises(LaunchError, match=f"{name} cannot be given"):
        kubernetes.render(replace(make_job(tmp_path), environment={name: "1"}))


@both
def test_values_of_the_environment_are_not_expanded(tmp_path, kind):
    given = {"NCCL_A": "$(HOME) $$(B) $HOME"}
    _, container = pod_of(replace(make_job(tmp_path), environment=given), kind)
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert values["NCCL_A"] == "$$(HOME) $$$$(B) $$HOME"  # `$$` is `$`, in Kubernetes


def test_names_that_a_shell_or_a_scheduler_would_read_otherwise_are_refused(tmp_path):
    job = make_job(tmp_path)
    for name in ("NCCL_$(id)", "NCCL A", "NCCL_A=B", "NCCL_\n", "1"):
        with pytest.raises(LaunchError, match="cannot be handed to ranks"):
            replace(job, environment={name: "1"})
    for name in ("latest", "a\nkind: Pod", "a b"):
        with pytest.raises(MusterError, match="cannot be the name of a run"):
            replace(job, run=tmp_path / name)


@both
def test_only_pods_of_the_run_and_readers_of_metrics_reach_a_pod(tmp_path, kind):
    found = objects(make_job(tmp_path), kind)
    spec = found["NetworkPolicy"]["spec"]
    (label,) = spec["podSelector"]["matchLabels"].items()
    assert spec["ingress"] == [{"from": [{"podSelector": {"matchLabels": dict([label])}}]}]
    if kind == "job":
        labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
        assert label in labels.items()
    open_to_all = objects(make_job(tmp_path, "logging.prometheus=9100"), kind)["NetworkPolicy"]
    assert open_to_all["spec"]["ingress"][1:] == [{"ports": [{"port": 9100}]}]


KUBECTL = """#!{python}
import json, sys, yaml
said = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(json.dumps(said) + "\\n")
code, out, err = {answers!r}.get(said[0], (0, "", ""))
if said[0] == "create":
    with open({calls!r} + ".stdin", "w") as file:
        file.write(open("/dev/stdin").read())
if said[0] == "apply" and said[2] == "-":
    with open({calls!r} + ".given", "a") as file:
        file.write(sys.stdin.read() + "\\n")
elif said[0] == "apply" and not (code or out):
    for part in yaml.safe_load_all(open(said[2])):
        group = part["apiVersion"].partition("/")[0] if "/" in part["apiVersion"] else ""
        kind = part["kind"].lower() + ("." + group if group else "")
        out += kind + "/" + part["metadata"]["name"] + " created\\n"
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
CONTEXT = (0, "our-cluster\n", "")
OPERATOR = (
    0,
    "clustertrainingruntimes.trainer.kubeflow.org\ntrainjobs.trainer.kubeflow.org\n",
    "",
)


class Kubectl:
    """An executable of that name, alone on the PATH, so that no real cluster is ever asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls = folder, folder / "calls.jsonl"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))

    def answers(self, **answers: tuple[int, str, str]) -> None:
        """By first word (`api_resources` for api-resources): exit code, output, errors."""
        named = {word.replace("_", "-"): answer for word, answer in answers.items()}
        program = self.folder / "kubectl"
        program.write_text(
            KUBECTL.format(python=sys.executable, calls=str(self.calls), answers=named)
        )
        program.chmod(0o755)

    def heard(self, last: int = 1) -> list[list[str]]:
        """Without the `last` words: the time limit."""
        text = self.calls.read_text() if self.calls.exists() else ""
        words = [json.loads(line) for line in text.splitlines()]
        return [w[: len(w) - last] for w in words]

    def stdin(self) -> str:
        """Of the latest `create`."""
        return Path(f"{self.calls}.stdin").read_text()

    def given(self) -> list[dict[str, Any]]:
        """What was to be applied, and in no file."""
        lines = Path(f"{self.calls}.given").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    return Kubectl(tmp_path / "bin", monkeypatch)


def test_without_kubectl_the_file_is_written_and_how_to_use_it_said(tmp_path, kubectl):
    job = make_job(tmp_path)
    words = kubernetes.submit(job)
    written = job.run / "kubernetes.yaml"
    assert f"kubectl apply -f {written}" in words
    assert written.read_text() == kubernetes.render(job, "job")
    assert Run(job.run).state() == "stopped"


def test_a_kubectl_without_a_cluster_is_asked_for_nothing_more(tmp_path, kubectl):
    kubectl.answers(config=(1, "", "error: current-context is not set\n"))
    job = make_job(tmp_path, "kubernetes.kind=trainjob")
    assert "no kubectl with a current context" in kubernetes.submit(job)
    assert kubectl.heard() == [["config", "current-context"]]
    assert "kind: TrainJob" in (job.run / "kubernetes.yaml").read_text()


@pytest.mark.parametrize(
    ("operator", "kind", "selector"),
    [
        (OPERATOR, "TrainJob", "jobset.sigs.k8s.io/jobset-name"),
        ((0, "", ""), "Job", "app.kubernetes.io/instance"),
    ],
    ids=["kubeflow", "no operator"],
)
def test_the_cluster_says_which_kind_of_job_it_takes(tmp_path, kubectl, operator, kind, selector):
    kubectl.answers(config=CONTEXT, api_resources=operator)
    job = make_job(tmp_path)
    words = kubernetes.submit(job)
    written = job.run / "kubernetes.yaml"
    assert kubectl.heard()[-1] == ["apply", "-f", str(written)]
    assert kind in [part["kind"] for part in yaml.safe_load_all(written.read_text())]
    assert "of our-cluster" in words
    assert f"--selector {selector}={job.name}" in words


def test_a_kind_that_is_given_is_not_asked_for(tmp_path, kubectl):
    kubectl.answers(config=CONTEXT, api_resources=OPERATOR)
    job = make_job(tmp_path, "kubernetes.kind=job")
    kubernetes.submit(job)
    assert [said[0] for said in kubectl.heard()] == ["config", "apply"]
    assert "kind: Job" in (job.run / "kubernetes.yaml").read_text()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            {"apply": (1, "", 'Error from server (Forbidden): User "me" cannot create jobs\n')},
            'Error from server (Forbidden): User "me" cannot create jobs; fix that',
        ),
        (
            {
                "api_resources": OPERATOR,
                "apply": (1, "", 'strict decoding error: unknown field "spec.runtimePatches"\n'),
            },
            "Kubeflow Trainer 2.2 or newer",
        ),
        (
            {"api_resources": (1, "", "Unable to connect to the server: dial tcp: i/o timeout\n")},
            "i/o timeout; fix the connection",
        ),
        (
            {"apply": (0, "configmap/a unchanged\njob.batch/a unchanged\n", "")},
            "the cluster has this job already (job.batch/a unchanged)",
        ),
    ],
    ids=["forbidden", "old kubeflow", "out of reach", "there already"],
)
def test_what_the_cluster_says_is_told(tmp_path, kubectl, answers, words):
    kubectl.answers(config=CONTEXT, **answers)
    job = make_job(tmp_path)
    with pytest.raises(MusterError) as refused:
        kubernetes.submit(job)
    assert words in str(refused.value)
    assert Run(job.run).state() != "queued"


def test_a_cluster_that_never_answers_ends_the_wait(tmp_path, kubectl, monkeypatch):
    program = tmp_path / "bin" / "kubectl"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    program.chmod(0o755)
    monkeypatch.setattr("muster.launch.kubectl.LIMIT_S", 0.5)
    with pytest.raises(LaunchError, match="has not answered"):
        kubernetes.submit(make_job(tmp_path))
