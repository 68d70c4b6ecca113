"""Where the time of a few training steps went, from PyTorch's profiler traces (Chrome's JSON format).

Computing is any kernel, copy or fill on a GPU; on a CPU rank, any operator outside the threads that
run collectives. Communicating is NCCL's kernels and gloo's collectives. Communication is exposed
where no computation overlaps with it; where there is neither, the device is idle. So computing,
exposed communication and idle time add up to the whole. A trace counts in microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from muster.observe.intervals import Span, length, minus, union

PHASE = "phase: "  # begins the name of a phase's range in the trace
WAITING = "waiting for data"
STEP = "ProfilerStep#"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
COMPILED = "## Call CompiledFxGraph"
NOT_COMPUTING = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional")
GAPS, KERNELS = 5, 12  # the largest, in a summary

Event = dict[str, Any]


@dataclass(frozen=True)
class TraceEvent:
    """One kernel, operator or collective. `asked`: when the program asked for it."""

    name: str
    start: float
    end: float
    asked: float
    thread: Any

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True)
class Timeline:
    """What one rank did from the first recorded step to the last."""

    steps: list[Span]
    phases: list[tuple[Span, str]]  # in order, one after the other
    computing: list[TraceEvent]
    communicating: list[TraceEvent]
    on_gpu: bool

    @property
    def window(self) -> Span:
        return self.steps[0][0], self.steps[-1][1]

    def phase(self, moment: float) -> str:
        i = bisect_right(self.phases, moment, key=lambda phase: phase[0][0]) - 1
        return self.phases[i][1] if i >= 0 and moment < self.phases[i][0][1] else "between phases"


def read(trace: dict[str, Any]) -> Timeline:
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    steps = sorted(_span(e) for e in marks if e["name"].startswith(STEP))
    if not steps:
        raise ValueError("the trace has no complete step")
    phases = sorted(
        (_span(e), e["name"].removeprefix(PHASE)) for e in marks if e["name"].startswith(PHASE)
    )
    gloo = [e for e in marks if e["name"].startswith("gloo:")]
    device = [e for e in events if e.get("cat") in ON_DEVICE]
    asked = {_correlation(e): e["ts"] for e in events if e.get("cat") in LAUNCHES}
    if device:
        computed = [e for e in device if not _is_nccl(e)]
    else:
        carriers = {e["tid"] for e in gloo}
        computed = [e for e in events if _is_operator(e) and e["tid"] not in carriers]
    sent = [*gloo, *filter(_is_nccl, device)]
    window = steps[0][0], steps[-1][1]
    return Timeline(
        steps, phases, _works(computed, asked, window), _works(sent, asked, window), bool(device)
    )


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _correlation(event: Event) -> Any:
    """What a kernel has in common with the call that launched it."""
    return event.get("args", {}).get("correlation", event["name"])


def _is_nccl(event: Event) -> bool:
    return event.get("cat") == "kernel" and "nccl" in event["name"].lower()


def _is_operator(event: Event) -> bool:
    """Whether an operator computes from its begin to its end. Nodes of the backward graph may wait for
    others in between: only the operators inside them count."""
    name = event["name"]
    named = "::" in name and not name.startswith(NOT_COMPUTING)
    return event.get("cat") == "cpu_op" and (named or name.startswith(COMPILED))


def _works(events: Iterable[Event], asked: dict[Any, float], window: Span) -> list[TraceEvent]:
    """In order, and only what lies in the window."""
    found = []
    for event in events:
        start, end = max(event["ts"], window[0]), min(event["ts"] + event["dur"], window[1])
        if start < end:
            moment = asked.get(_correlation(event), float(event["ts"]))
            found.append(TraceEvent(event["name"], start, end, moment, event.get("tid")))
    return sorted(found, key=lambda work: (work.start, -work.end))


def summarise(trace: dict[str, Any]) -> dict[str, Any]:
    """One rank's steps. Shares are of the whole time; milliseconds of phases are per step."""
    time = read(trace)
    whole, count = time.window[1] - time.window[0], len(time.steps)
    computing = union(work.span for work in time.computing)
    communicating = union(work.span for work in time.communicating)
    exposed = minus(communicating, computing)
    idle = minus([time.window], union([*computing, *communicating]))
    waiting = union(span for span, name in time.phases if name == WAITING)
    return {
        "rank": trace.get("distributedInfo", {}).get("rank", 0),
        "device": "gpu" if time.on_gpu else "cpu",
        "step_ms": whole / count / 1e3,
        "steps_ms": [(end - start) / 1e3 for start, end in time.steps],
        "computing": length(computing) / whole,
        "communication": length(communicating) / whole,
        "exposed_communication": length(exposed) / whole,
        "idle": length(idle) / whole,
        "waiting_for_data": length(waiting) / whole,
        "phases": _phases(time),
        "kernels": _kernels(time, whole),
        "gaps": _gaps(time, idle),
    }


def _phases(time: Timeline) -> list[dict[str, Any]]:
    """`wall_ms` is the program's own time. Work belongs to the phase that asked for it: a GPU may be
    computing gradients while the program already waits in the next phase."""
    wall: dict[str, float] = defaultdict(float)
    for (start, end), name in time.phases:
        wall[name] += max(0.0, min(end, time.window[1]) - max(start, time.window[0]))
    spans: dict[str, dict[str, list[Span]]] = {}
    for kind, works in (("computing", time.computing), ("communication", time.communicating)):
        spans[kind] = defaultdict(list)
        for work in works:
            spans[kind][time.phase(work.asked)].append(work.span)
    scale = 1e3 * len(time.steps)
    return [
        {
            "phase": name,
            "wall_ms": seconds / scale,
            **{f"{kind}_ms": length(union(found[name])) / scale for kind, found in spans.items()},
        }
        for name, seconds in wall.items()
    ]


def _kernels(time: Timeline, whole: float) -> list[dict[str, Any]]:
    """By name, most time first. Time in operators that another one called is theirs alone."""
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for work, own in [
        *_own_times(time.computing),
        *((work, work.end - work.start) for work in time.communicating),
    ]:
        calls[work.name] += 1
        spent[work.name] += own
    return [
        {"name": name, "calls": calls[name], "ms": spent[name] / 1e3, "share": spent[name] / whole}
        for name in sorted(spent, key=lambda name: -spent[name])
    ]


def _own_times(works: list[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Each with its time less that of what it called, in the same thread or stream."""
    own = [work.end - work.start for work in works]
    callers: dict[Any, list[int]] = defaultdict(list)
    for i, work in enumerate(works):
        open_ = callers[work.thread]
        while open_ and works[open_[-1]].end <= work.start:
            open_.pop()
        if open_:
            own[open_[-1]] -= min(work.end, works[open_[-1]].end) - work.start
        open_.append(i)
    return list(zip(works, own, strict=True))


def _gaps(time: Timeline, idle: list[Span]) -> list[dict[str, Any]]:
    """The longest, with the work that ended last before it and the first one after it."""
    works = [*time.computing, *time.communicating]
    by_start = sorted(works, key=lambda work: (work.start, -work.end))
    by_end = sorted(works, key=lambda work: (work.end, -work.start))
    found = []
    for start, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:GAPS]:
        before = bisect_right(by_end, start, key=lambda work: work.end) - 1
        after = bisect_left(by_start, end, key=lambda work: work.start)
        found.append(
            {
                "ms": (end - start) / 1e3,
                "at_ms": (start - time.window[0]) / 1e3,
                "phase": time.phase((start + end) / 2),
                "before": by_end[before].name if before >= 0 else "",
                "after": by_start[after].name if after < len(by_start) else "",
            }
        )
    return found


def over_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of the ranks; calls of a kernel are added up."""
    names = [name for name, value in ranks[0].items() if isinstance(value, float)]
    kernels: dict[str, dict[str, Any]] = {}
    for kernel in (kernel for rank in ranks for kernel in rank["kernels"]):
        seen = kernels.setdefault(
            kernel["name"], {"name": kernel["name"], "calls": 0, "ms": 0.0, "share": 0.0}
        )
        seen["calls"] += kernel["calls"]
        seen["ms"] += kernel["ms"]
        seen["share"] += kernel["share"] / len(ranks)
    phases: dict[str, dict[str, Any]] = {}
    for phase in (phase for rank in ranks for phase in rank["phases"]):
        mean = phases.setdefault(phase["phase"], {"phase": phase["phase"]})
        for name in ("wall_ms", "computing_ms", "communication_ms"):
            mean[name] = mean.get(name, 0.0) + phase[name] / len(ranks)
    gaps = [{"rank": rank["rank"], **gap} for rank in ranks for gap in rank["gaps"]]
    return {
        **{name: sum(rank[name] for rank in ranks) / len(ranks) for name in names},
        "phases": list(phases.values()),
        "kernels": sorted(kernels.values(), key=lambda kernel: -kernel["ms"])[:KERNELS],
        "gaps": sorted(gaps, key=lambda gap: -gap["ms"])[:GAPS],
    }
