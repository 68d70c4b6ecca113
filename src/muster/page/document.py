"""What the page and the report draw, as JSON: the page's script and `report.html` read these keys.

Numbers are rounded to six digits. What is not known or not finite is null. Times are seconds since 1970.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from muster.observe.evaluations import Best

Level = Literal["bad", "warn", "good"]
RankState = Literal["ok", "slow", "idle", "silent", "failed", "ended"]
Numbers = list[float | None]


class Progress(TypedDict):
    step: int
    steps: int | None  # None before the first step


class Throughput(TypedDict):
    value: float
    unit: str  # tokens/s, × real time, samples/s


class Summary(TypedDict):
    """A line of the list of runs."""

    name: str
    state: str  # queued starting running finished failed stopped; interrupted: its process is gone
    words: str | None  # what failed
    task: str
    model: str
    strategy: str
    world: int | None
    nodes: list[str]  # hosts
    created: float
    seconds: float  # in all its starts, to the end or the last sign of life
    progress: Progress
    loss: float | None
    best: Best | None
    throughput: Throughput | None
    rehearsal: bool


class RunPart(Summary):
    eta_s: float | None
    devices: list[str]
    directory: str
    parameters: int | None
    precision: str | None
    global_batch_size: int | None
    restarts: int
    cause: str | None  # of a failure
    cure: str | None


class Finding(TypedDict):
    """One sentence; the worst come first."""

    level: Level
    text: str
    rank: int | None


class Series(TypedDict):
    """`low` and `high` are the least and the greatest of each point's steps; empty where every point is
    one step."""

    unit: str
    mean: Numbers
    low: Numbers
    high: Numbers


class Curves(TypedDict):
    """At most `downsample.POINTS` points. `step` is the last step of each point."""

    step: list[int]
    time: Numbers
    series: dict[str, Series]


class Score(TypedDict):
    step: int
    time: float
    split: str
    scores: dict[str, float]
    best: bool  # the best of the run so far as it is known now: one per split at most
    remarks: list[str]


class Mark(TypedDict):
    kind: Literal["checkpoint", "restart", "resume", "failure", "stop", "start"]
    step: int | None
    time: float
    text: str


class Planned(TypedDict):
    what: str
    unit: str
    planned: float | None
    measured: float | None


class Row(TypedDict):
    """One rank. Times are means of its last steps, in seconds per step."""

    rank: int
    node: str
    device: str
    step: int | None
    phase: str
    silent_s: float  # since its last heartbeat
    utilisation: float | None  # of its device, 0 to 1; of a CPU rank, of the cores it may use
    memory_gib: float | None  # in use on its device
    memory_total_gib: float | None
    power_w: float | None
    temperature_c: float | None
    compute_s: float | None
    wait_s: float | None
    data_s: float | None
    state: RankState


class Ranks(TypedDict):
    rows: list[Row]


class Heat(TypedDict):
    """Seconds per step of each rank, the mean of the steps of each bin: `compute[rank][bin]`. The bins lie
    between the steps of `step`, which is one longer: the bin i holds `step[i] < s <= step[i + 1]`."""

    ranks: list[int]
    step: list[int]
    compute: list[Numbers]
    wait: list[Numbers]
    data: list[Numbers]


class Difference(TypedDict):
    """Words of a reference and of what was recognised, aligned."""

    op: Literal["same", "sub", "del", "ins"]
    ref: str
    hyp: str


class Mistake(TypedDict):
    id: str
    reference: str
    hypothesis: str
    errors: int
    words: int  # of the reference
    seconds: float | None  # of the audio
    audio: bool  # whether its audio is kept
    diff: list[Difference]


class Generated(TypedDict):
    step: int
    prompt: str
    text: str
    expected: str | None


class Examples(TypedDict):
    split: str  # that was scored; empty before
    mistakes: list[Mistake]
    generated: list[Generated]


class Told(TypedDict):
    recipe: list[dict[str, Any]]  # key, value, default: whether it is the default
    environment: list[dict[str, Any]]  # name, value, reason, by: user, muster or null
    data: list[dict[str, Any]]  # split, files, samples, hours, tokens, documents, dropped
    notes: list[str]  # what else is said about the data
    software: dict[str, Any]
    choices: list[dict[str, Any]]  # key, value, reason: what `auto` came to


class Document(TypedDict):
    """A run."""

    run: RunPart
    findings: list[Finding]
    curves: Curves
    evaluations: list[Score]
    marks: list[Mark]
    planned: list[Planned]
    ranks: Ranks
    heat: Heat
    examples: Examples
    told: Told


class Ratio(TypedDict):
    name: str
    a: float | None
    b: float | None
    ratio: float | None  # b / a


class FirstDifference(TypedDict):
    step: int
    series: str
    a: float | None
    b: float | None


class Comparison(TypedDict):
    a: Summary
    b: Summary
    recipe: list[dict[str, Any]]  # key, a, b: only what differs, here and below
    data: list[dict[str, Any]]
    environment: list[dict[str, Any]]
    scores: list[Ratio]
    speed: list[Ratio]  # medians over the steps
    curves: dict[Literal["a", "b"], Curves]
    first_difference: FirstDifference | None  # of the losses that both have
