"""A corpus several times larger than the memory it may take is trained on in bounded memory."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clips import AUDIO, encode, tone, write_parquet

from muster.data.batches import MAX_WAIT_POOLS, BatchPlan
from muster.data.loader import Batch, Loader
from muster.data.speech.source import SpeechLimits, SpeechSource

CLIPS, PER_GROUP, SECONDS = 2400, 32, 4  # 300 MB of WAV in row groups of 4 MB; 600 MB decoded
BOUND_MB = 180  # 25 of row groups, 8 of kept clips, 45 of batches ahead, as much again of slack
FLAT_MB = 50

EPOCH = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from muster.data.batches import BatchPlan
from muster.data.loader import Batch, Loader
from muster.data.speech.source import SpeechLimits, SpeechSource

def collate(samples, epoch, longest=None):
    waves = np.stack([s.samples for s in samples])  # torch keeps freed memory on some processors
    return Batch([s.id for s in samples], {"samples": torch.from_numpy(waves)}, 1, 1, 1)

def memory(line):
    words = next(w for w in Path("/proc/self/status").read_text().splitlines() if w.startswith(line))
    return int(words.split()[1]) / 1000

Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts from here
start = memory("VmRSS")
paths = sorted(Path(sys.argv[1]).glob("*.parquet"))
source = SpeechSource(paths, SpeechLimits(cache_bytes=8 << 20, shuffle=sys.argv[2]))
source.files.row_groups.budget = 0
source.reserve(64)
plan = BatchPlan(source.lengths, 16, seed=0, pool_batches=4, groups=source.groups)
loader = Loader(source, plan, collate, workers=2)
stop = min(plan.steps_per_epoch, int(sys.argv[3]))
seen, middle = [], 0.0
for step, batches in enumerate(loader.steps(0, stop)):
    seen += [i for batch in batches for i in batch.ids]
    if step == stop // 2:
        middle = memory("VmHWM")
reads = source.files.row_groups.reads
print(json.dumps({
    "grown": memory("VmHWM") - start, "later": memory("VmHWM") - middle, "seen": len(set(seen)), "steps": stop,
    "groups": len(reads), "reads": sum(reads.values()), "most": max(reads.values()),
}))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(0).standard_normal(SECONDS * 16000) * 0.1
    clip = {"bytes": encode(noise), "path": None}
    rows = CLIPS // 4
    table = pa.table({"audio": pa.array([clip] * rows, AUDIO), "text": ["a"] * rows})
    for part in range(4):
        pq.write_table(
            table,
            folder / f"{part}.parquet",
            row_group_size=PER_GROUP,
            use_dictionary=False,
            compression="none",
        )
    assert sum(path.stat().st_size for path in folder.iterdir()) > 300e6
    return folder


def run_epoch(folder, shuffle: str, steps: int = 1000) -> dict[str, float]:
    command = [sys.executable, "-c", EPOCH, str(folder), shuffle, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    return json.loads(done.stdout)


@pytest.mark.guides
def test_an_epoch_takes_little_memory_and_reads_each_row_group_about_once(corpus):
    found = run_epoch(corpus, "auto")
    assert found["seen"] == CLIPS
    assert found["groups"] == 4 * -(-CLIPS // 4 // PER_GROUP)
    assert found["grown"] < BOUND_MB
    assert found["later"] < FLAT_MB
    assert found["most"] <= 3
    assert found["reads"] <= 1.3 * found["groups"]


@pytest.mark.full
def test_the_same_without_row_groups_reads_them_over_and_over(corpus):
    found = run_epoch(corpus, "full", steps=6)
    assert found["reads"] > 5 * found["steps"], "or the test above shows nothing"


@pytest.mark.parametrize(("windows", "pools"), [(False, 1), (True, (2 + MAX_WAIT_POOLS) / 2)])
def test_every_rank_reads_every_row_group_once_and_keeps_two_stretches(tmp_path, windows, pools):
    rows, per_group, ranks, batch, pool_batches = 480, 24, 2, 8, 6
    clips = [encode(tone(0.1, 200 + i)) for i in range(rows)]
    path = write_parquet(tmp_path / "a.parquet", clips, ["a"] * rows, AUDIO, per_group)
    for rank in range(ranks):
        source = SpeechSource([path], SpeechLimits(cache_bytes=0, shuffle="groups"))
        row_groups, largest = source.files.row_groups, source.files.tables[0].sizes.max()
        row_groups.budget = 0
        plan = BatchPlan(
            source.lengths,
            batch,
            seed=0,
            pool_batches=pool_batches,
            groups=source.groups,
            windows=np.arange(rows) % 3.0 if windows else None,
        )
        source.reserve(plan.reserve_size)
        kept = pools * pool_batches * batch * largest / per_group
        assert row_groups.budget == pytest.approx(2 * (kept + largest), rel=1e-3)
        loader = Loader(source, plan, note_ids, rank=rank, ranks=ranks, workers=1)
        steps = [b.ids for step in loader.steps(0, plan.steps_per_epoch) for b in step]
        assert sum(map(len, steps)) == rows // ranks
        assert row_groups.reads == {(0, group): 1 for group in range(rows // per_group)}


def note_ids(samples, epoch, longest=None) -> Batch:
    return Batch([s.id for s in samples], {"none": torch.zeros(1)}, 1, 1, 1)
