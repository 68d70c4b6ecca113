"""Decoding agrees with the definition of CTC: the sum over every alignment."""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from muster.errors import MusterError
from muster.evaluate.ctc_decode import greedy, prefix_beam
from muster.evaluate.ngram import END, START, build

PIECES = ["", "a", "b", " "]


def random_log_probs(time: int, vocab: int, seed: int, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(time, vocab, generator=generator, dtype=torch.float64)
    return (sharpness * logits).log_softmax(-1)


def collapse(path, blank=0):
    return tuple(token for token, _ in itertools.groupby(path) if token != blank)


def every_labelling(log_probs: torch.Tensor, blank: int = 0) -> dict[tuple[int, ...], float]:
    """ln p of each labelling, from all vocab ** time alignments."""
    time, vocab = log_probs.shape
    rows = log_probs.tolist()
    sums: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for path in itertools.product(range(vocab), repeat=time):
        sums[collapse(path, blank)] += math.exp(sum(rows[t][i] for t, i in enumerate(path)))
    return {labels: math.log(p) for labels, p in sums.items()}


def from_probs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize(("time", "vocab"), [(1, 3), (5, 3), (4, 4), (7, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_every_labelling_with_its_exact_probability(time, vocab, seed, blank):
    log_probs = random_log_probs(time, vocab, seed)
    truth = every_labelling(log_probs, blank)
    found = prefix_beam(log_probs, width=10**6, min_log_prob=-math.inf, blank=blank)
    assert {tuple(ids): score for ids, score in found} == pytest.approx(truth, abs=1e-9)
    assert tuple(found[0][0]) == max(truth, key=truth.__getitem__)
    assert [score for _, score in found] == sorted((s for _, s in found), reverse=True)


def test_a_beam_of_ordinary_width_finds_the_best_labelling_too():
    for seed in range(20):
        log_probs = random_log_probs(6, 4, seed, sharpness=3.0)
        truth = every_labelling(log_probs)
        found = prefix_beam(log_probs, width=8)
        assert tuple(found[0][0]) == max(truth, key=truth.__getitem__)
        assert len(found) <= 8


def test_a_prefix_that_was_pruned_and_found_again_is_still_one_prefix():
    for seed in range(60):
        log_probs = random_log_probs(30, 3, seed)
        found = [tuple(ids) for ids, _ in prefix_beam(log_probs, width=5)]
        assert len(set(found)) == len(found)


def test_the_beam_sees_what_the_best_path_does_not():
    log_probs = from_probs([0.6, 0.4], [0.6, 0.4])  # p() = 0.36, p(a) = 0.64
    assert greedy(log_probs[None], torch.tensor([2])) == [[]]
    (best, score), *_ = prefix_beam(log_probs, width=4)
    assert best == [1]
    assert score == pytest.approx(math.log(0.64))


def test_a_repeated_symbol_takes_a_blank_between():
    doubled = from_probs([0.1, 0.9], [0.9, 0.1], [0.1, 0.9])
    assert prefix_beam(doubled, width=4)[0][0] == [1, 1]
    held = from_probs([0.1, 0.9], [0.1, 0.9], [0.1, 0.9])
    assert prefix_beam(held, width=4)[0][0] == [1]


def test_unlikely_symbols_are_skipped_but_never_the_likeliest():
    log_probs = from_probs([0.5, 0.499, 0.001], [0.001, 0.999, 0.0])
    pruned = prefix_beam(log_probs, width=50, min_log_prob=math.log(0.01))
    assert {tuple(ids) for ids, _ in pruned} == {(1,)}
    assert {tuple(ids) for ids, _ in prefix_beam(log_probs, width=50, min_log_prob=-99)} == {
        (), (1,), (2,), (2, 1),
    }  # fmt: skip
    flat = torch.full((3, 1000), -math.log(1000.0), dtype=torch.float64)
    assert len(prefix_beam(flat, width=50, min_log_prob=-1.0)) == 1


def test_the_symbols_followed_in_a_frame_can_be_counted_out():
    log_probs = from_probs([0.1, 0.2, 0.4, 0.3])
    assert [ids for ids, _ in prefix_beam(log_probs, width=9, max_symbols=2)] == [[2], [3]]


def test_no_frames_give_the_empty_labelling():
    assert prefix_beam(torch.zeros(0, 4), width=3) == [([], 0.0)]


def test_a_diverged_model_is_named_as_such():
    broken = random_log_probs(3, 3, seed=0)
    broken[1] = math.nan
    with pytest.raises(MusterError, match="Frame 1 "):
        prefix_beam(broken, width=3)


def test_misuse_of_the_beam_is_refused():
    log_probs = random_log_probs(2, 3, seed=0)
    with pytest.raises(ValueError, match="width"):
        prefix_beam(log_probs, width=0)
    with pytest.raises(ValueError, match="pieces"):
        prefix_beam(log_probs, width=2, word_bonus=1.0)


@pytest.mark.parametrize("pieces", [PIECES, ["", " a", "b", " ba"]], ids=["letters", "subwords"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_with_a_language_model_the_score_is_the_sum_of_its_parts(pieces, order):
    lm = build(["a b", "ab a a", "b"], order)
    log_probs = random_log_probs(6, 4, seed=order)
    found = prefix_beam(
        log_probs,
        width=10**6,
        pieces=pieces,
        lm=lm,
        lm_weight=0.7,
        word_bonus=0.3,
        min_log_prob=-math.inf,
    )

    def full_score(labels, acoustic):
        words = "".join(pieces[i] for i in labels).split()
        sentence = [START, *words, END]
        lm_score = sum(lm.score(w, sentence[:i]) for i, w in enumerate(sentence) if i)
        return acoustic + 0.7 * math.log(10) * lm_score + 0.3 * len(words)

    truth = {k: full_score(k, score) for k, score in every_labelling(log_probs).items()}
    assert {tuple(ids): score for ids, score in found} == pytest.approx(truth, abs=1e-9)
    assert tuple(found[0][0]) == max(truth, key=truth.__getitem__)


def test_the_language_model_flips_a_close_decision():
    #                       blank  a     b     space
    log_probs = from_probs(
        [0.01, 0.97, 0.01, 0.01],
        [0.01, 0.01, 0.01, 0.97],
        [0.01, 0.50, 0.48, 0.01],
    )
    lm = build(["a b"] * 20, order=2)
    assert prefix_beam(log_probs, width=8, pieces=PIECES)[0][0] == [1, 3, 1]
    assert prefix_beam(log_probs, width=8, pieces=PIECES, lm=lm)[0][0] == [1, 3, 2]
    mute = prefix_beam(log_probs, width=8, pieces=PIECES, lm=lm, lm_weight=0.0)
    assert mute[0][0] == [1, 3, 1]


def test_the_language_model_steers_a_narrow_beam_on_its_way():
    log_probs = from_probs(
        [0.00, 0.40, 0.60, 0.00],
        [0.00, 0.00, 0.00, 1.00],
        [0.00, 0.45, 0.55, 0.00],
    )
    lm = build(["a a"] * 20, order=2)
    heard = prefix_beam(log_probs, width=2, pieces=PIECES)
    assert [ids for ids, _ in heard] == [[2, 3, 2], [2, 3, 1]]
    assert prefix_beam(log_probs, width=2, pieces=PIECES, lm=lm)[0][0] == [1, 3, 1]


def test_a_word_bonus_splits_where_the_sound_is_undecided():
    log_probs = from_probs(
        [0.01, 0.97, 0.01, 0.01], [0.51, 0.01, 0.01, 0.47], [0.01, 0.01, 0.97, 0.01]
    )
    assert prefix_beam(log_probs, width=8, pieces=PIECES)[0][0] == [1, 2]
    assert prefix_beam(log_probs, width=8, pieces=PIECES, word_bonus=1.0)[0][0] == [1, 3, 2]


@pytest.mark.parametrize("blank", [0, 3])
def test_the_best_path_collapses_each_clip_within_its_length(blank):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 12, 4, generator=generator)
    lengths = torch.tensor([12, 7, 1, 0, 12, 3, 11, 5])
    expected = [
        list(collapse(clip[:length].argmax(-1).tolist(), blank))
        for clip, length in zip(logits, lengths.tolist(), strict=True)
    ]
    assert greedy(logits, lengths, blank) == expected
    assert expected[3] == []
    assert max(map(len, expected)) > 4


def test_the_best_path_keeps_doubled_letters_and_joins_held_ones():
    path = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 0, 2]])
    logits = torch.nn.functional.one_hot(path, 3).float()
    assert greedy(logits, torch.tensor([9])) == [[1, 1, 2, 2]]
    assert greedy(logits[:, :0], torch.tensor([0])) == [[]]


def test_a_certain_symbol_that_begins_no_known_word_ends_no_search():
    """Its frame is passed over: no spelling of a known word goes on with it."""
    rows = from_probs(
        [0.05, 0.95, 0, 0], [0, 0, 1, 0], [0.9, 0.1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]
    )
    found = prefix_beam(rows, 4, pieces=PIECES, lm=build(["a a a"], 2), known_words=True)
    assert found[0][0] == [1, 3, 1]  # "a a", and no "b"
