"""What `muster check --environment` prints, on a machine whose driver stands in for NVIDIA's."""

from __future__ import annotations

import subprocess

import pytest

from muster.cli.environment import show_environment


@pytest.fixture
def four_gpus(driver, monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_P2P_LEVEL", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN; it's mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo,docker")
    monkeypatch.setenv("COLUMNS", "200")


def line(text, name):
    (found,) = [line for line in text.splitlines() if name in line]
    return found


def test_the_table_says_who_set_what_and_why_and_what_is_left_out(four_gpus, capsys):
    show_environment(strategy="fsdp")
    text = capsys.readouterr().out
    assert "4 × Test GPU 0 (10 GiB)" in text
    assert "you" in line(text, "NCCL_DEBUG")
    assert "muster" in line(text, "NCCL_P2P_LEVEL")
    assert "by NVLink" in line(text, "NCCL_P2P_LEVEL")
    assert "left out" in line(text, "CUDA_DEVICE_MAX_CONNECTIONS")
    assert "all-gathers" in line(text, "CUDA_DEVICE_MAX_CONNECTIONS")


def test_without_a_strategy_it_shows_what_an_open_recipe_gets(four_gpus, capsys):
    show_environment()
    shown = line(capsys.readouterr().out, "CUDA_DEVICE_MAX_CONNECTIONS")
    assert "left out" in shown
    assert "strategy ddp, by name, sets 1" in shown


def test_what_a_mask_hides_is_said(four_gpus, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    show_environment()
    assert "GPU 2, 3 hidden by CUDA_VISIBLE_DEVICES" in capsys.readouterr().out


def test_a_shell_takes_the_lines_as_they_are(four_gpus, capsys):
    show_environment(ranks=4, export=True)
    lines = capsys.readouterr().out
    assert all(text.startswith("export ") and "  # " in text for text in lines.splitlines())
    script = 'eval "$1"; printf "%s|%s|%s" "$NCCL_SOCKET_IFNAME" "$NCCL_DEBUG" "$NCCL_P2P_LEVEL"'
    done = subprocess.run(
        ["bash", "-euc", script, "bash", lines], capture_output=True, text=True, env={}, check=True
    )
    assert done.stdout == "^lo,docker|WARN; it's mine|NVL"


def test_fewer_ranks_and_several_nodes_are_asked_for(four_gpus, capsys):
    show_environment(ranks=1, export=True)
    assert "NCCL_P2P_LEVEL" not in capsys.readouterr().out
    show_environment(ranks=1, nodes=2, master="127.0.0.1")
    text = capsys.readouterr().out
    assert "loopback" in line(text, "GLOO_SOCKET_IFNAME")
