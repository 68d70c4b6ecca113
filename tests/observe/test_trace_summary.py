"""Where the time of a trace went: the arithmetic of spans, and traces made by hand."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from muster.observe.intervals import length, minus, union
from muster.observe.profile_page import headline, page
from muster.observe.trace import over_all, summarise


def cells(spans) -> set[int]:
    """Brute force: the whole numbers that half-open spans cover."""
    return {i for start, end in spans for i in range(start, end)}


def test_union_and_difference_agree_with_counting_cells():
    draw = random.Random(0)
    for _ in range(2000):
        these, those = (
            [(at, at + draw.randint(0, 6)) for at in draw.choices(range(40), k=draw.randint(0, 8))]
            for _ in range(2)
        )
        a, b = union(these), union(those)
        assert cells(a) == cells(these)
        assert all(start < end for start, end in a)
        assert all(first[1] < second[0] for first, second in pairwise(a))
        left = minus(a, b)
        assert cells(left) == cells(these) - cells(those)
        assert length(left) == len(cells(left))


def event(cat: str, name: str, start: float, end: float, tid=1, **args) -> dict:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": tid,
        "args": args,
    }


def mark(name: str, start: float, end: float, tid=1) -> dict:
    return event("user_annotation", name, start, end, tid)


STEPS = [mark("ProfilerStep#1", 1000, 2000), mark("ProfilerStep#2", 2000, 3000)]


def cpu_trace() -> dict:
    """Two steps of 1 ms on a CPU rank: 900 µs computing, 600 communicating of which 400 exposed."""
    return {
        "distributedInfo": {"rank": 3},
        "traceEvents": [
            *STEPS,
            mark("phase: waiting for data", 1000, 1200),
            mark("phase: forward and backward", 1200, 1900),
            mark("phase: forward and backward", 2000, 3000),
            event("cpu_op", "aten::linear", 1200, 1600),
            event("cpu_op", "aten::addmm", 1250, 1550),
            event("cpu_op", "autograd::engine::evaluate_function: X", 1200, 1900),
            event("cpu_op", "RegisterPostBackwardFunctionBackward", 1200, 1900),
            event("cpu_op", "c10d::allreduce_", 1600, 1700),
            mark("gloo:all_reduce", 1500, 1700, tid=9),
            event("cpu_op", "aten::add_", 1600, 1650, tid=9),  # inside the collective
            mark("gloo:all_reduce", 2400, 2800, tid=9),
            event("cpu_op", "aten::mm", 2000, 2500),
            event("cpu_op", "aten::mm", 900, 950),  # before the first step
            {"ph": "i", "name": "no span", "ts": 1},
        ],
    }


def test_on_a_cpu_exposed_communication_is_that_with_no_operator_under_it():
    found = summarise(cpu_trace())
    assert (found["rank"], found["device"]) == (3, "cpu")
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["steps_ms"] == pytest.approx([1.0, 1.0])
    assert found["computing"] == pytest.approx(900 / 2000)
    assert found["communication"] == pytest.approx(600 / 2000)
    assert found["exposed_communication"] == pytest.approx(400 / 2000)
    assert found["idle"] == pytest.approx(700 / 2000)
    assert found["waiting_for_data"] == pytest.approx(200 / 2000)


def test_an_operators_time_is_its_own_and_not_that_of_what_it_calls():
    found = {k["name"]: (k["calls"], k["ms"]) for k in summarise(cpu_trace())["kernels"]}
    assert found == {
        "aten::mm": (1, pytest.approx(0.5)),
        "aten::addmm": (1, pytest.approx(0.3)),
        "aten::linear": (1, pytest.approx(0.1)),
        "gloo:all_reduce": (2, pytest.approx(0.6)),
    }


def test_gaps_are_named_after_what_lies_on_both_sides():
    longest, *rest = summarise(cpu_trace())["gaps"]
    assert longest["ms"] == pytest.approx(0.3)
    assert (longest["before"], longest["after"]) == ("gloo:all_reduce", "aten::mm")
    assert longest["phase"] == "forward and backward"
    assert [gap["ms"] for gap in rest] == pytest.approx([0.2, 0.2])
    assert {(gap["before"], gap["after"], gap["phase"]) for gap in rest} == {
        ("", "aten::linear", "waiting for data"),
        ("gloo:all_reduce", "", "forward and backward"),
    }


def gpu_trace() -> dict:
    """The program is ahead: it asks for the work of the gradients at once and waits in the next
    phase. 1,200 µs of kernels and a copy, 600 of NCCL of which 200 exposed."""
    return {
        "traceEvents": [
            *STEPS,
            mark("phase: forward and backward", 1000, 1100),
            mark("phase: optimizer step", 1100, 3000),
            event("gpu_user_annotation", "ProfilerStep#1", 1200, 2900, tid=7),
            event("cuda_runtime", "cudaLaunchKernel", 1010, 1020, correlation=1),
            event("cuda_runtime", "cudaLaunchKernel", 1030, 1040, correlation=2),
            event("cuda_driver", "cuLaunchKernel", 1200, 1210, correlation=3),
            event("kernel", "gemm", 1200, 2200, tid=7, correlation=1),
            event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                1800,
                2400,
                tid=8,
                correlation=2,
            ),
            event("gpu_memcpy", "Memcpy HtoD", 2400, 2600, tid=7, correlation=3),
            event("cpu_op", "aten::mm", 1000, 3000),  # on the host: no computing
        ]
    }


def test_on_a_gpu_only_kernels_and_copies_count_and_belong_to_the_phase_that_asked():
    found = summarise(gpu_trace())
    assert (found["rank"], found["device"]) == (0, "gpu")
    assert found["computing"] == pytest.approx(1200 / 2000)
    assert found["communication"] == pytest.approx(600 / 2000)
    assert found["exposed_communication"] == pytest.approx(200 / 2000)
    assert found["idle"] == pytest.approx(600 / 2000)
    phases = {p["phase"]: p for p in found["phases"]}
    assert phases["forward and backward"] == {
        "phase": "forward and backward",
        "wall_ms": pytest.approx(0.05),
        "computing_ms": pytest.approx(0.5),
        "communication_ms": pytest.approx(0.3),
    }
    assert phases["optimizer step"]["computing_ms"] == pytest.approx(0.1)
    assert phases["optimizer step"]["communication_ms"] == 0


def test_random_traces_are_shared_out_as_counting_cells_says():
    draw = random.Random(1)
    for _ in range(200):
        spans = {kind: [] for kind in ("gemm", "nccl")}
        events = list(STEPS)
        for i in range(draw.randint(1, 30)):
            kind, start = draw.choice(["gemm", "nccl"]), draw.randint(900, 3050)
            spans[kind].append((start, start + draw.randint(1, 200)))
            events.append(event("kernel", f"{kind}Kernel{i}", *spans[kind][-1], tid=i % 3))
        found, window = summarise({"traceEvents": events}), set(range(1000, 3000))
        compute, sent = (cells(spans[kind]) & window for kind in ("gemm", "nccl"))
        assert found["computing"] * 2000 == pytest.approx(len(compute))
        assert found["communication"] * 2000 == pytest.approx(len(sent))
        assert found["exposed_communication"] * 2000 == pytest.approx(len(sent - compute))
        assert found["idle"] * 2000 == pytest.approx(len(window - sent - compute))


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no complete step"):
        summarise({"traceEvents": [event("cpu_op", "aten::mm", 0, 1)]})


def test_ranks_are_averaged_and_their_calls_added_up():
    other = cpu_trace()
    other["traceEvents"] = [e for e in other["traceEvents"] if e["name"] != "aten::mm"]
    ranks = [summarise(cpu_trace()), summarise(other)]
    every = over_all(ranks)
    assert every["computing"] == pytest.approx((900 + 400) / 2 / 2000)
    kernels = {k["name"]: k for k in every["kernels"]}
    assert kernels["gloo:all_reduce"]["calls"] == 4
    assert kernels["gloo:all_reduce"]["ms"] == pytest.approx(1.2)
    assert kernels["aten::mm"]["share"] == pytest.approx(0.5 / 2 / 2)
    assert [k["ms"] for k in every["kernels"]] == sorted(
        (k["ms"] for k in every["kernels"]), reverse=True
    )
    phases = {p["phase"]: p["wall_ms"] for p in every["phases"]}
    assert phases == pytest.approx({"waiting for data": 0.1, "forward and backward": 0.85})


def test_the_page_of_many_ranks_stays_one_page(tmp_path):
    ranks = [{**summarise(cpu_trace()), "rank": rank} for rank in range(64)]
    ranks[40]["computing"] = 0.1
    summary = {"steps": [4, 5], "notes": ["a"], "all": over_all(ranks), "ranks": ranks}
    text = page(summary)
    lines = text.splitlines()
    assert lines[0] == "profile of steps 4 to 5 on 64 CPU rank(s); the 16 that compute least"
    assert lines[1] == "note: a"
    assert any(line.split()[:3] == ["40", "1.00", "10.0%"] for line in lines)
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    assert headline(tmp_path, "runs/a") is None
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "summary.json").write_text(json.dumps(summary))
    assert headline(tmp_path, "runs/a") == (
        "profile of steps 4 to 5 on 64 CPU rank(s): computing 44%, exposed communication 20%, "
        "idle 35%; see runs/a/profile/summary.txt\nnote: a"
    )
