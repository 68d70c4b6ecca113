"""What the table's models leave out: windows, isolated documents, checkpointing, ZeRO's skipped steps."""

from __future__ import annotations

import pytest

from muster.checks.parity import distance

HYBRID = ("distributed.strategy=hybrid", "distributed.tensor=2", "distributed.pipeline=2")
ISOLATED = ("data.isolate_documents=true",)


FSDP = ("distributed.strategy=fsdp",)
CONTEXT = ("distributed.strategy=context",)
SHARED = ("distributed.strategy=hybrid", "distributed.context=2", "distributed.tensor=2")


@pytest.mark.parametrize(
    ("model", "options", "world", "layout"),
    [
        pytest.param("window", (), 4, HYBRID, id="window-hybrid", marks=pytest.mark.full),
        pytest.param("gpt", ISOLATED, 2, FSDP, id="isolated-fsdp"),
        pytest.param("gpt", ISOLATED, 4, HYBRID, id="isolated-hybrid", marks=pytest.mark.full),
        pytest.param("window", (), 2, FSDP, id="window-fsdp", marks=pytest.mark.full),
        pytest.param("gpt", ISOLATED, 2, CONTEXT, id="isolated-context"),
        pytest.param("window", (), 2, CONTEXT, id="window-context"),
        pytest.param("window", ISOLATED, 4, CONTEXT, id="both-context", marks=pytest.mark.full),
        pytest.param("window", ISOLATED, 4, SHARED, id="both-shared", marks=pytest.mark.full),
    ],
)
def test_masks_reach_every_layer_of_every_layout(course_of, model, options, world, layout):
    alone = course_of(model, 1, options)
    found = distance(alone, course_of(model, world, (*options, *layout)))
    assert found.small, found


def test_the_masks_of_these_rows_matter(course_of):
    assert not distance(course_of("window", 1), course_of("llama", 1)).small
    assert not distance(course_of("gpt", 1, ISOLATED), course_of("gpt", 1)).small


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("fsdp", "full"),
        pytest.param("zero3", "selective", marks=pytest.mark.guides),
        # After ZeRO 3 in the same process.
        pytest.param("fsdp", "selective", marks=pytest.mark.full),
        pytest.param("zero3", "full", marks=pytest.mark.full),
    ],
)
def test_checkpointing_activations_changes_nothing(course_of, strategy, mode):
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    options = (f"training.activation_checkpointing={mode}", f"distributed.strategy={strategy}")
    found = distance(course_of("gpt", 1), course_of("gpt", 2, options))
    assert found.small, found


@pytest.mark.parametrize(
    "option",
    [
        "training.activation_checkpointing=full",
        pytest.param("training.activation_checkpointing=selective", marks=pytest.mark.full),
        pytest.param("training.compile=true", marks=pytest.mark.full),
        pytest.param("distributed.fsdp.cpu_offload=true", marks=pytest.mark.full),
        pytest.param("distributed.fsdp.sharding=shard_grad_op", marks=pytest.mark.full),
    ],
)
def test_context_ranks_share_sequences_with_every_option(course_of, option):
    found = distance(course_of("llama", 1), course_of("llama", 2, (*CONTEXT, option), 4))
    assert found.small, found


def skip_one(mesh, stage: int, offload: str) -> list[bool]:
    """A step whose loss is not finite although every gradient is."""
    from parallel.models import GPT, LR, make_batch, make_engine, make_functions, micro_batches

    options = {"strategy": f"zero{stage}", "deepspeed": {"offload_optimizer": offload}}
    engine = make_engine(mesh, GPT, options)
    batch = make_batch(GPT, 8)
    pieces, functions = micro_batches(mesh, options, batch, 2), make_functions(batch.units)

    def weights():
        return [t.full_tensor().clone() for t in engine.state()["model"].values()]

    engine.accumulate(pieces, functions)
    engine.step(LR)
    before = weights()
    engine.accumulate(pieces, functions)
    engine.zero_grad()
    kept = all((a == b).all() for a, b in zip(before, weights(), strict=True))
    engine.accumulate(pieces, functions)
    engine.step(LR)
    moved = any((a != b).any() for a, b in zip(before, weights(), strict=True))
    return [kept, moved]


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, "none"),
        (2, "cpu"),
        *(pytest.param(*c, marks=pytest.mark.full) for c in ((2, "none"), (3, "none"), (3, "cpu"))),
    ],
)
def test_zero_forgets_the_gradients_of_a_skipped_step(ranks, stage, offload):
    pytest.importorskip("deepspeed")
    assert ranks(2)(skip_one, stage, offload) == [[True, True]] * 2
