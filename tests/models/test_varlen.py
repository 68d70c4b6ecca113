"""Documents apart by the variable-length kernel: what is asked of it, and where it is asked.

The kernel itself needs a GPU (tests/gpu/test_varlen.py). Here a function that computes what its
documentation says, one document at a time, stands in its place.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from muster.data.text.packing import document_starts
from muster.models import varlen
from muster.models.attention import Attention
from muster.models.decoder import Decoder
from muster.models.presets import configure

LENGTHS = ([5, 1, 9, 5], [20], [1] * 6 + [14])
DOCUMENTS = torch.stack(
    [torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in LENGTHS]
)
STARTS = torch.from_numpy(document_starts(DOCUMENTS.numpy(), 9))


def documented(q, k, v, edges_q, edges_k, max_q, max_k, *, window_size, enable_gqa=False):
    """torch.nn.attention.varlen.varlen_attn by its documentation, for self-attention."""
    assert edges_q is edges_k
    assert edges_q.dtype == torch.int32
    assert window_size[1] == 0
    assert enable_gqa == (q.shape[1] != k.shape[1])
    out = torch.full_like(q, torch.nan)
    for begin, end in zip(edges_q[:-1].tolist(), edges_q[1:].tolist(), strict=True):
        assert 0 <= end - begin <= min(max_q, max_k)
        ours, theirs, values = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        rows, columns = torch.arange(end - begin)[:, None], torch.arange(end - begin)
        seen = columns <= rows
        if window_size[0] >= 0:
            seen &= columns >= rows - window_size[0]
        mixed = F.scaled_dot_product_attention(ours, theirs, values, seen, enable_gqa=enable_gqa)
        out[begin:end] = mixed.transpose(0, 1)
    return out


@pytest.fixture(params=[True, False], ids=["groups", "no groups"])
def calls(monkeypatch, request) -> list[torch.Size]:
    """The kernel's stand-in, as if this CPU could run it in any type; the shapes it was called with."""
    found: list[torch.Size] = []

    def function(q, *args, **options):
        found.append(q.shape)
        return documented(q, *args, **options)

    monkeypatch.setattr(varlen, "_function", lambda: (function, request.param))
    monkeypatch.setattr(varlen, "kernel_runs", lambda device: True)
    monkeypatch.setattr(varlen, "HALVES", (torch.float64,))
    monkeypatch.setattr(varlen, "PADDED", 1)  # these sequences are short
    monkeypatch.setattr(varlen, "SHORT", 20)
    return found


def test_edges_are_where_documents_begin_in_the_batch_laid_flat():
    edges = varlen.edges_of(STARTS, 20)
    assert edges.dtype == torch.int32
    assert len(edges) == 3 * 9 + 1
    begins = [sum(x[:i]) + 20 * row for row, x in enumerate(LENGTHS) for i in range(len(x))]
    assert sorted(set(edges.tolist())) == [*begins, 60]
    assert edges.diff().min() == 0


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("preset", ["gpt2-micro", "llama-micro"])
def test_the_kernel_is_asked_for_what_the_mask_computes(calls, preset, window):
    config = dataclasses.replace(configure(preset, vocab=257), window=window)
    torch.manual_seed(0)
    model = Decoder(config).eval().double()
    tokens = torch.randint(257, (3, 20))
    positions = torch.cat([torch.arange(n) for x in LENGTHS for n in x]).view(3, 20)
    masked = model(tokens, positions, DOCUMENTS)
    assert not calls
    asked = model(tokens, positions, DOCUMENTS, starts=STARTS)
    assert calls == [(60, config.heads, config.head_size)] * config.layers
    torch.testing.assert_close(asked, masked)
    weights = list(model.parameters())
    expected, found = (torch.autograd.grad(x.square().sum(), weights) for x in (masked, asked))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_only_what_the_kernel_can_is_left_to_it(calls, monkeypatch):
    config = configure("llama-micro", vocab=257)
    q = torch.randn(1, config.heads, 20, config.head_size).double()
    k = torch.randn(1, config.kv_heads, 20, config.head_size)
    documents = varlen.documents_of(DOCUMENTS[:1], STARTS[:1])
    run = lambda q, documents, dropout: Attention.attend(q, k.to(q.dtype), k.to(q.dtype), documents, 0, config, dropout)  # noqa: E731 # fmt: skip
    run(q, documents, 0.0)
    assert len(calls) == 1
    run(q, documents, 0.1)  # it has no dropout
    run(q.float(), documents, 0.0)  # not in this type
    run(q, varlen.documents_of(DOCUMENTS[:1], None), 0.0)
    run(q, None, 0.0)
    assert len(calls) == 1
    assert varlen.documents_of(None, STARTS) is None
    monkeypatch.setattr(varlen, "SHORT", 21)
    assert varlen.documents_of(DOCUMENTS, STARTS) == (DOCUMENTS, None)
    monkeypatch.setattr(varlen, "SHORT", 20)
    monkeypatch.setattr(varlen, "PADDED", 20 * varlen.MOST_PADDED // 9 + 1)  # too many of them
    assert varlen.documents_of(DOCUMENTS, STARTS) == (DOCUMENTS, None)
    monkeypatch.undo()
    assert varlen.documents_of(DOCUMENTS, STARTS) == (DOCUMENTS, None)  # a CPU
    assert set(varlen.HALVES) == {torch.float16, torch.bfloat16}


def test_this_torch_has_the_kernel_with_what_is_asked_of_it():
    assert varlen._function() == (torch.nn.attention.varlen.varlen_attn, True)


def test_documents_begin_where_their_number_changes():
    numbers = np.array([[0, 0, 3, 3, 3, 1], [2, 2, 2, 2, 2, 2]])
    assert document_starts(numbers, 4).tolist() == [[0, 2, 5, 6], [0, 6, 6, 6]]
