"""Language models: probabilities that sum to one, and files that say where they are wrong."""

import gzip
import itertools
import math

import pytest

from arpa import write_arpa
from muster.errors import DataError
from muster.evaluate.ngram import END, START, UNKNOWN, build, read_arpa

TEXTS = ["the cat sat", "the dog sat down", "a cat ran", "the cat ran down", "", "down"]

# p(b | a) is listed; p(a | a) backs off by 10**-0.5 to p(a).
ARPA = """made by hand

\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-99\t<s>\t-0.25
-0.6\ta\t-0.5
-0.7\tb
-0.4\t</s>
-2.0\t<unk>

\\2-grams:
-0.1\ta b
-0.2\t<s> a

\\end\\
"""


def written(tmp_path, text: str):
    path = tmp_path / "model.arpa"
    path.write_text(text)
    return path


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one_after_any_context(order):
    model = build(TEXTS, order)
    words = [*model.vocabulary, START, "never-seen"]
    contexts = [(), *((w,) for w in words), *itertools.product(words, repeat=2)]
    for context in [*contexts, ("the", "dog", "sat"), (START, "the", "cat", "ran")]:
        total = sum(10 ** model.score(word, context) for word in model.vocabulary)
        assert total == pytest.approx(1.0, abs=1e-12), context


def test_the_vocabulary_holds_the_sentence_end_and_unknown_but_not_the_start():
    vocabulary = build(TEXTS, 2).vocabulary
    assert END in vocabulary
    assert UNKNOWN in vocabulary
    assert START not in vocabulary


def test_witten_bell_by_hand():
    model = build(["a b", "a a"], 2)
    # Six events (a b </s> a a </s>) of three kinds; four words share the uniform floor.
    p_a = (3 + 3 * 1 / 4) / (6 + 3)
    p_unk = (0 + 3 * 1 / 4) / (6 + 3)
    assert 10 ** model.score("a") == pytest.approx(p_a)
    assert 10 ** model.score("zebra") == pytest.approx(p_unk)
    # After a came b, a and </s>, once each.
    assert 10 ** model.score("a", ("a",)) == pytest.approx((1 + 3 * p_a) / (3 + 3))
    assert 10 ** model.score("zebra", ("a",)) == pytest.approx(3 * p_unk / 6)
    # Two sentences, both begin with a.
    assert 10 ** model.score("a", (START,)) == pytest.approx((2 + 1 * p_a) / (2 + 1))


def test_longer_contexts_fit_the_text_better():
    def total(model):
        sentences = [[START, *text.split(), END] for text in TEXTS if text]
        return sum(model.score(s[i], s[:i]) for s in sentences for i in range(1, len(s)))

    assert total(build(TEXTS, 1)) < total(build(TEXTS, 2)) < total(build(TEXTS, 3))


def test_only_the_last_words_of_a_context_count():
    model = build(TEXTS, 3)
    assert model.score("sat", ("ran", "a", "the", "dog")) == model.score("sat", ("the", "dog"))
    assert build(TEXTS, 1).score("sat", ("the", "dog")) == build(TEXTS, 1).score("sat")


def test_the_order_shrinks_to_what_the_text_holds():
    assert build(["yes", "no"], 9).order == 3  # <s> yes </s>


@pytest.mark.parametrize(
    ("texts", "order", "complaint"),
    [
        (["", " "], 2, "no text"),
        (["a"], 0, "order 0"),
        (["a", "<s> b </s>"], 2, "Row 1"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(texts, order, complaint):
    with pytest.raises(DataError, match=complaint):
        build(texts, order)


def test_backing_off_follows_the_file(tmp_path):
    model = read_arpa(written(tmp_path, ARPA))
    assert model.order == 2
    assert "b" in model
    assert "c" not in model
    assert model.score("b", ("a",)) == -0.1
    assert model.score("a", ("a",)) == pytest.approx(-0.5 - 0.6)
    assert model.score("a", ("b",)) == -0.6  # b has no weight: 1
    assert model.score("zebra", ("a",)) == pytest.approx(-0.5 - 2.0)
    assert model.score("a", ("zebra",)) == -0.6
    assert model.score("b", (START,)) == pytest.approx(-0.25 - 0.7)


def test_a_file_without_unknown_still_scores_unknown_words(tmp_path):
    text = ARPA.replace("-2.0\t<unk>\n", "").replace("ngram 1=5", "ngram 1=4")
    assert read_arpa(written(tmp_path, text)).score("zebra") == -100.0


def test_another_spelling_of_unknown_is_understood(tmp_path):
    assert read_arpa(written(tmp_path, ARPA.replace("<unk>", "<UNK>"))).score("zebra") == -2.0


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
def test_a_file_is_read_plain_or_compressed(tmp_path, name):
    model = build([*TEXTS, "caf\u00e9 a\u200bb"], 3)
    write_arpa(model, tmp_path / name)
    again = read_arpa(tmp_path / name)
    assert again.order == 3
    assert again.entries.keys() == model.entries.keys()
    for words, (log_prob, weight) in model.entries.items():
        assert again.entries[words] == pytest.approx((log_prob, weight), abs=1e-6)


@pytest.mark.parametrize(
    ("good", "bad", "line", "complaint"),
    [
        ("\\data\\", "data", 18, "no .data. line"),
        ("ngram 1=5\nngram 2=2\n", "", 5, "ngram 1=COUNT"),
        ("ngram 2=2", "ngram 3=2", 5, "ngram 2=COUNT"),
        ("ngram 1=5", "ngram 1=6", 14, "says 6 1-grams, the file has 5"),
        ("\\2-grams:", "\\3-grams:", 14, "expected .2-grams:"),
        ("-0.6\ta", "minus\ta", 9, "'minus' is not a number"),
        ("-0.6\ta", "nan\ta", 9, "'nan' is not a number"),
        ("-0.6\ta", "0.6\ta", 9, "above 0"),
        ("\t-0.5", "\tx", 9, "'x' is not a number"),
        ("-0.1\ta b", "-0.1\ta", 15, "found 2 fields"),
        ("-0.1\ta b", "-0.1\ta b c d", 15, "found 5 fields"),
        ("<s> a\n", "a b\n", 16, "twice"),
        ("\\end\\\n", "", 17, "cut short"),
        ("\\end\\", "\\3-grams:", 18, "expected .end."),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, good, bad, line, complaint):
    assert good in ARPA
    path = written(tmp_path, ARPA.replace(good, bad, 1))
    with pytest.raises(DataError, match=rf"model\.arpa, line {line}: .*{complaint}"):
        read_arpa(path)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    path = tmp_path / "model.arpa"
    path.write_bytes(ARPA.encode().replace(b"\tb\n", b"\t\xff\n"))
    with pytest.raises(DataError, match="line 10: not UTF-8"):
        read_arpa(path)


def test_a_missing_or_truncated_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.arpa.*evaluation\.ngram"):
        read_arpa(tmp_path / "nowhere.arpa")
    whole = gzip.compress(ARPA.encode())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="whole ARPA file"):
        read_arpa(tmp_path / "cut.gz")


def test_a_score_is_a_finite_logarithm():
    model = build(TEXTS, 3)
    assert all(math.isfinite(x) for entry in model.entries.values() for x in entry)
