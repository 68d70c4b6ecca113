"""Which rank this process is, by the variables its launcher set."""

import os
from unittest.mock import patch

import pytest

from muster.errors import LaunchError
from muster.hardware.inventory import Cpus, Gpu, Inventory
from muster.launch import cluster
from muster.launch.cluster import PORT, Node, RankInfo, detect, hostnames, node
from muster.launch.process import leave_torchruns_folder, set_up_process

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TORCHRUN.items() if name not in names}


# As `srun --nodes=2 --ntasks-per-node=4` sets them for task 5 of step 1, in a job of 16 tasks.
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-7",
}


def test_torchrun_tells_the_place():
    rank_info = detect(TORCHRUN)
    assert (rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world) == (
        5,
        8,
        1,
        4,
    )
    assert (rank_info.address, rank_info.port) == ("node-0", 29500)


def test_srun_tells_the_place_by_its_step_and_not_by_its_job():
    rank_info = detect(SRUN)
    assert (rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world) == (
        5,
        8,
        1,
        4,
    )
    assert rank_info.address == "gpu03"


def test_all_tasks_of_a_step_derive_one_port_and_another_step_another():
    one = detect(SRUN)
    assert (
        detect(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}).port
        == one.port
    )
    assert detect(SRUN | {"SLURM_STEP_ID": "2"}).port != one.port
    assert detect(SRUN | {"MASTER_PORT": "4711"}).port == 4711


def test_uneven_tasks_per_node_are_counted_per_node():
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}
    assert detect(uneven).local_world == 3


def test_a_batch_script_is_not_a_rank_though_its_job_has_many():
    batch = {
        name: value for name, value in SRUN.items() if "STEP" not in name
    }  # as sbatch sets them
    batch |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert detect(batch).world == 1
    assert node(batch) == Node()


def test_one_task_per_node_starts_that_nodes_ranks():
    launcher = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    found = node(launcher)
    assert (found.rank, found.nodes, found.address) == (1, 2, "gpu03")
    with pytest.raises(LaunchError, match="--nodes 3, but the scheduler gave this job 2"):
        node(launcher, nodes=3)


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("host", ["host"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu[099-101].cluster", ["gpu099.cluster", "gpu100.cluster", "gpu101.cluster"]),
    ],
)
def test_slurms_short_list_of_hosts_is_written_out(short, names):
    assert hostnames(short) == names


def test_mpirun_tells_the_place_and_needs_an_address_on_several_machines():
    with pytest.raises(LaunchError, match="mpirun -x MASTER_ADDR="):
        detect(MPIRUN)
    rank_info = detect(MPIRUN | {"MASTER_ADDR": "10.0.0.1"})
    assert (rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world) == (
        3,
        4,
        1,
        2,
    )
    alone = detect(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"})
    assert alone.address == "127.0.0.1"
    assert alone.port > 0


def test_leftovers_that_contradict_the_launcher_are_refused_by_name():
    with pytest.raises(LaunchError, match="torchrun's variables say rank 0, srun's say 5"):
        detect(SRUN | TORCHRUN | {"RANK": "0"})
    with pytest.raises(LaunchError, match="number of ranks 8, mpirun's say 4"):
        detect(TORCHRUN | MPIRUN | {"RANK": "3", "MASTER_ADDR": "10.0.0.1"})


def test_torchrun_under_srun_is_believed():
    both = SRUN | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert detect(both).rank == 2


def test_a_node_by_flags():
    assert node({}) == Node()
    assert node({}, 2, 1, "10.0.0.1") == Node(1, 2, "10.0.0.1", PORT)
    with pytest.raises(LaunchError, match="--nodes 2 needs --node-rank"):
        node({}, 2)
    with pytest.raises(LaunchError, match="--nodes 2 needs --master-addr"):
        node({}, 2, 1)
    with pytest.raises(LaunchError, match="--node-rank 2 does not exist with --nodes 2"):
        node({}, 2, 2, "10.0.0.1")


def test_a_node_by_kubeflow():
    env = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
        "PET_NPROC_PER_NODE": "4",
    }
    assert node(env) == Node(1, 2, "job-node-0-0.job", 29400)


def test_without_variables_the_process_is_alone():
    assert detect({}) == RankInfo(0, 1, 0, 1)
    assert detect({"PATH": "/bin", "LOCAL_RANK": "3"}).world == 1


def test_without_a_local_world_size_all_ranks_are_on_one_machine():
    assert detect(without("LOCAL_WORLD_SIZE")).local_world == 8


@pytest.mark.parametrize(
    "missing", [["LOCAL_RANK"], ["MASTER_ADDR"], ["MASTER_ADDR", "MASTER_PORT"]]
)
def test_a_missing_variable_is_named(missing):
    with pytest.raises(LaunchError, match=f"but {', '.join(missing)} is not; start with torchrun"):
        detect(without(*missing))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "one", "-1", "2.0", "²"])
def test_what_is_no_number_is_named(name, value):
    with pytest.raises(LaunchError, match=f"^{name} is '{value}', expected a whole number"):
        detect(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("rank", "world", "size"),
    [
        ("RANK", "WORLD_SIZE", 8),
        ("RANK", "WORLD_SIZE", 9),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE", 4),
    ],
)
def test_a_rank_beyond_the_world_is_refused(rank, world, size):
    with pytest.raises(LaunchError, match=rf"^{rank}={size} does not exist with {world}="):
        detect(TORCHRUN | {rank: str(size)})


def test_a_world_of_nobody_is_refused():
    with pytest.raises(LaunchError, match="RANK=0 does not exist with WORLD_SIZE=0"):
        detect(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "0"})


@pytest.mark.parametrize(
    ("launcher", "allowed", "threads"),
    [("srun", 16, 16), ("mpirun", 32, 16), ("mpirun", 64, 16), ("torchrun", 16, 4)],
    ids=["bound to its own", "bound to a package", "not bound", "under taskset"],
)
def test_a_bound_rank_computes_on_all_of_its_own_cores(monkeypatch, launcher, allowed, threads):
    """Four ranks on a machine of 64 cores."""
    cpu, used = Cpus(tuple(range(allowed)), tuple(range(64))), []
    found = Inventory((), allowed, 512.0, "host", cpu=cpu)
    monkeypatch.setattr("muster.launch.process.inventory.detect", lambda: found)
    monkeypatch.setattr("muster.launch.process.affinity.pin", lambda cores: True)
    monkeypatch.setattr("torch.set_num_threads", used.append)
    with patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        set_up_process(RankInfo(0, 4, 0, 4, launcher=launcher), "ddp")
        assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert used == [threads]


def test_a_rank_of_any_launcher_leaves_the_console_to_nccls_warnings(monkeypatch):
    gpus = tuple(Gpu(i, "NVIDIA H200", 140.0, f"GPU-{i}") for i in range(2))
    found = Inventory(gpus, 2, 512.0, "host")
    monkeypatch.setattr("muster.launch.process.inventory.detect", lambda: found)
    monkeypatch.setattr("muster.launch.process.affinity.pin", lambda cores: True)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    for given, expected in ((None, "WARN"), ("INFO", "INFO")):  # by muster's launcher, or the user
        with patch.dict(os.environ):
            os.environ.pop("NCCL_DEBUG", None)
            os.environ.update({"NCCL_DEBUG": given} if given else {})
            set_up_process(RankInfo(0, 2, 0, 2, launcher="torchrun"), "ddp")
            assert os.environ["NCCL_DEBUG"] == expected


@pytest.mark.parametrize(("own", "rank"), [(True, 0), (False, 1)])
def test_an_address_of_ones_own_decides_who_is_node_0_also_under_srun(monkeypatch, own, rank):
    """SLURM's first machine is gone, and another is to be node 0."""
    monkeypatch.setattr(cluster, "_is_own", lambda address: own)
    task = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert node(task, "1:2").rank == 1
    found = node(task, "1:2", address="10.0.0.9", port=4000)
    assert (found.rank, found.address, found.port) == (rank, "10.0.0.9", 4000)


def test_the_last_rank_to_leave_removes_the_folder_that_torchrun_made(tmp_path, monkeypatch):
    attempt = tmp_path / "torchelastic_ab12" / "run_cd34" / "attempt_0"
    ranks = [attempt / "0", attempt / "1"]
    for rank in ranks:
        rank.mkdir(parents=True)
    (ranks[1] / "error.json").touch()
    for rank in ranks:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank / "error.json"))
        leave_torchruns_folder()
    assert [place.name for place in attempt.iterdir()] == ["1"]  # there is something in it
    (ranks[1] / "error.json").unlink()
    leave_torchruns_folder()
    assert list(tmp_path.iterdir()) == []
    given = tmp_path / "logs" / "run_cd34" / "attempt_0" / "0"
    given.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(given / "error.json"))
    leave_torchruns_folder()
    assert given.is_dir()  # the user's --log-dir
