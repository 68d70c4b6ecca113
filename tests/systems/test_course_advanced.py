"""The lessons of systems/distributed-training/05-advanced, each proving its own claim."""

from __future__ import annotations

import re

import pytest

from course import broken, torchrun

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        pytest.param(2, "shard 1 × tensor 2", marks=pytest.mark.full),
        pytest.param(4, "shard 2 × tensor 2", marks=pytest.mark.full),
    ],
)
def test_the_hybrid_trains_as_one_process(ranks, shape):
    small = ["--length", "32", "--steps", "2"]
    words = torchrun("05-advanced/hybrid_parallelism.py", *small, ranks=ranks)
    assert f"replicate 1 × {shape}: losses and gradient norms within" in words
    assert all(f"rank {rank}: " in words for rank in range(ranks))


@pytest.mark.full
def test_the_hybrid_with_a_pipeline_trains_as_one_process():
    small = ["--length", "32", "--steps", "2", "--pipeline", "2"]
    for ranks, shape in ((2, "shard 1 × tensor 1"), (4, "shard 1 × tensor 2")):
        words = torchrun("05-advanced/hybrid_parallelism.py", *small, ranks=ranks)
        assert f"pipeline 2 × replicate 1 × {shape}: losses and gradient norms within" in words


@pytest.mark.guides
def test_a_pipeline_has_the_gradients_of_one_process_and_few_micro_batches_in_flight():
    words = torchrun("05-advanced/pipeline_parallelism.py", "--length", "32")
    assert "2 stage(s), 4 micro-batches: gradients within" in words
    assert "the bubble is 20% of a step" in words
    assert re.findall(r"rank \d: layers .*, (\d) in flight", words) == ["4", "4", "2", "1"]


@pytest.mark.guides
def test_all_ranks_skip_the_step_that_overflows_on_one():
    words = torchrun("05-advanced/fp16_gradscaler.py")
    assert "2 rank(s): 100% of an unscaled float16 gradient is lost" in words
    assert "all ranks skipped the step that overflowed on rank 0" in words


@pytest.mark.full
def test_ranks_that_do_not_agree_on_a_skipped_step_are_noticed(tmp_path):
    lesson, line = "05-advanced/fp16_gradscaler.py", "wrapped = DistributedDataParallel(model)"
    words = torchrun(broken(lesson, line, "wrapped = model", tmp_path), fails=True)
    assert "AssertionError: moved in steps" in words


@pytest.mark.both
@pytest.mark.guides
def test_accumulated_is_the_large_batch_and_the_mean_of_means_is_not():
    words = torchrun("05-advanced/gradient_accumulation.py", "--length", "32")
    assert "2 rank(s) × 4 micro-batches equal the large batch" in words
    assert "no_sync sends 1/4 of the bytes" in words


@pytest.mark.full
def test_overlap_changes_neither_gradients_nor_bytes():
    few = ["--length", "32", "--repeats", "2"]
    words = torchrun("05-advanced/communication_overlap.py", *few)
    assert "2 rank(s), 5 ways: the same 3.78 MiB sent" in words
    assert words.count("exposed communication") == 5


@pytest.mark.parametrize(
    ("lesson", "line", "instead", "complaint"),
    [
        (
            "gradient_accumulation.py",
            "summed(net, x, y) * mesh.world / units",
            "summed(net, x, y) / units",  # DDP divides a second time
            "from the large batch",
        ),
        pytest.param(
            "communication_overlap.py",
            "dist.all_reduce(parameter.grad.div_(dist.get_world_size()))",
            "parameter.grad.div_(dist.get_world_size())",
            "apart",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "pipeline_parallelism.py",
            "whole.plan.vocab) / batch.units",
            "whole.plan.vocab) / (targets != IGNORE).sum()",  # of each micro-batch
            "off",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "hybrid_parallelism.py",
            "(data_rank, data_ranks)",
            "(mesh.rank, mesh.world)",  # tensor ranks that see different data
            "apart",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_lesson_without_its_crucial_line_fails(tmp_path, lesson, line, instead, complaint):
    script = broken(f"05-advanced/{lesson}", line, instead, tmp_path)
    words = torchrun(script, "--length", "32", fails=True)
    assert "AssertionError" in words
    assert complaint in words
