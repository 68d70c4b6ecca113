"""Each epoch cuts the text elsewhere, loses nothing, and does so in the same way everywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from muster.data.batches import BatchPlan
from muster.data.loader import Batch, Loader
from muster.data.text.packing import EPOCHS_HELD, MOVING_REST, REST, PackedSource
from muster.data.text.tokenizers import Bytes

END = 256
TEXTS = ["hello world", "naïve 漢字", "x", "to be or not to be " * 9, "😀", "second last", "z" * 30]
TOTAL = sum(len(text.encode()) + 1 for text in TEXTS)
MOVING = ["shuffled", "shifted"]


@pytest.fixture
def open_text(tmp_path, monkeypatch):
    """`open_text(length, packing, …)`: the texts as a source."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def opened(length: int, packing: str, texts=TEXTS, *, seed: int = 3, whole: bool = True):
        path = tmp_path / f"{len(texts)}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return PackedSource([path], Bytes(), length, whole=whole, packing=packing, seed=seed)

    return opened


def tokens(source: PackedSource) -> list[list[int]]:
    return [source.load(i).tokens.tolist() for i in range(len(source))]


def from_lists(order: list[int], offset: int, length: int) -> list[list[tuple[int, int, int, int]]]:
    """Input, target, document and place in it, for each target of each sequence."""
    cells = []
    for number in order:
        targets = [*TEXTS[number].encode(), END]
        inputs = [END, *targets[:-1]]
        cells += [(a, b, number, at) for at, (a, b) in enumerate(zip(inputs, targets, strict=True))]
    cells = cells[offset:] + cells[:offset]
    return [cells[i : i + length] for i in range(0, len(cells) - length + 1, length)]


@pytest.mark.parametrize("packing", [*MOVING, "fixed"])
@pytest.mark.parametrize("length", [5, 64])
def test_an_epoch_is_what_lists_of_its_documents_give(open_text, packing, length):
    source = open_text(length, packing)
    for epoch in range(4):
        made = source.of_epoch(epoch)
        order = made.arrangement.order
        order = list(range(len(TEXTS))) if order is None else order.tolist()
        expected = from_lists(order, made.arrangement.offset, length)
        assert sorted(order) == list(range(len(TEXTS)))
        assert len(made) == len(source) == len(expected) == TOTAL // length
        for index, cells in enumerate(expected):
            sample, first = made.load(index), cells[0][3]
            assert sample.id == index
            assert sample.tokens.tolist() == [a for a, *_ in cells] + [cells[-1][1]]
            assert sample.bytes == sum(target != END for _, target, *_ in cells)
            positions, documents, number = [], [], 0
            for at, (*_, within) in enumerate(cells):
                number += at > 0 and within == 0
                documents.append(number)
                positions.append(within if number else within - first)
            assert sample.positions.tolist() == positions
            assert sample.documents.tolist() == documents
            assert f"row {cells[0][2]}" in made.name(index)


@pytest.mark.parametrize("packing", MOVING)
def test_each_epoch_has_every_token_but_the_rest_and_all_epochs_have_them_all(open_text, packing):
    source = open_text(50, packing)
    seen = np.zeros(TOTAL, int)
    for epoch in range(12):
        made = source.of_epoch(epoch)
        targets = np.concatenate([made.arrangement.place(50 * i, 50)[0] for i in range(len(made))])
        counts = np.bincount(targets, minlength=TOTAL)
        assert counts.max() == 1
        assert (counts == 0).sum() == TOTAL % 50 == source.left_out[MOVING_REST] > 0
        seen += counts
    assert seen.min() > 0
    assert open_text(50, "fixed").left_out == {REST: TOTAL % 50}
    assert open_text(50, "fixed", whole=False).left_out == {}
    assert open_text(TOTAL // 4, packing).left_out == {}


@pytest.mark.parametrize("packing", MOVING)
def test_cuts_follow_the_seed_and_the_epoch_and_nothing_else(open_text, packing):
    source = open_text(16, packing)
    epochs = [tokens(source.of_epoch(epoch)) for epoch in range(4)]
    assert len({json.dumps(epoch) for epoch in epochs}) == 4
    again = open_text(16, packing)
    assert [tokens(again.of_epoch(epoch)) for epoch in (3, 0, 2, 1)] == [
        epochs[epoch] for epoch in (3, 0, 2, 1)
    ]
    assert tokens(again.of_epoch(3).of_epoch(1)) == epochs[1]
    assert tokens(open_text(16, packing, seed=4).of_epoch(0)) != epochs[0]
    fixed = open_text(16, "fixed")
    assert tokens(source) == tokens(fixed) == tokens(fixed.of_epoch(7))


@pytest.mark.parametrize("packing", MOVING)
def test_the_cuts_of_a_single_document_move_too(open_text, packing):
    source = open_text(16, packing, TEXTS[3:4])
    assert len({tuple(source.of_epoch(epoch).load(0).tokens) for epoch in range(4)}) == 4


def test_names_tell_the_epoch_that_a_sequence_is_of(open_text):
    source = open_text(16, "shuffled")
    assert source.of_epoch(2).name(1).startswith("sequence 1 of epoch 2, from ")
    assert source.name(1).startswith("sequence 1, from ")


def test_where_documents_begin_identifies_the_data_if_their_order_changes(open_text):
    sources = [open_text(16, packing) for packing in ("shuffled", "shifted", "fixed")]
    before = [source.fingerprint() for source in sources]
    assert before[1] == before[2] != before[0]
    for source in sources:
        object.__setattr__(source.stream, "starts", source.stream.starts[::2])
    after = [source.fingerprint() for source in sources]
    assert after[1:] == before[1:]
    assert after[0] != before[0]


def collate(samples, epoch, longest=0.0) -> Batch:
    rows = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    return Batch([sample.id for sample in samples], {"tokens": rows}, len(samples), 1, 1)


def global_batch(loaders: list[Loader], step: int) -> dict[int, list[int]]:
    batches = [batch for loader in loaders for batch in loader.micro_batches(step)]
    return {i: row for b in batches for i, row in zip(b.ids, b["tokens"].tolist(), strict=True)}


def test_every_world_size_reads_the_same_sequences_in_each_step(open_text):
    def loaders(ranks: int, accumulation: int) -> list[Loader]:
        source = open_text(16, "shuffled")
        plan = BatchPlan(source.lengths, 6, seed=3)
        options = {"ranks": ranks, "accumulation": accumulation}
        return [Loader(source, plan, collate, rank=rank, **options) for rank in range(ranks)]

    one, three = loaders(1, 2), loaders(3, 1)
    per_epoch = one[0].plan.steps_per_epoch
    assert per_epoch == 2
    for step in (5, 0, 1, 2, 3):
        found = global_batch(one, step)
        assert found == global_batch(three, step)
        arranged = open_text(16, "shuffled").of_epoch(step // per_epoch)
        assert found == {i: arranged.load(i).tokens.tolist() for i in found}


@pytest.mark.parametrize("workers", [1, 4])
def test_threads_that_are_epochs_ahead_read_their_own_epoch(open_text, workers):
    """One step is an epoch here, and five are prepared ahead."""
    source = open_text(16, "shuffled")
    plan = BatchPlan(source.lengths, len(source), seed=3)
    loader = Loader(source, plan, collate, workers=workers, prefetch=5)
    straight = [batches[0]["tokens"].tolist() for batches in loader.steps(0, 12)]
    assert len(source._epochs) <= EPOCHS_HELD
    other = open_text(16, "shuffled")
    later = Loader(other, plan, collate, workers=2).steps(5, 12)
    assert [batches[0]["tokens"].tolist() for batches in later] == straight[5:]
    for epoch, rows in enumerate(straight):
        assert sorted(rows) == sorted(tokens(other.of_epoch(epoch)))
