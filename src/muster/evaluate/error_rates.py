"""Word and character error rates as counts that add.

Rates of batches or ranks cannot be averaged (a clip of two words would weigh as much as one of
forty), so every rank counts, the counts are summed, and only the sum is divided.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import jiwer


@dataclass(frozen=True)
class EditCounts:
    """Edits that turn references into hypotheses. `EditCounts()` is the zero of the addition."""

    words: int = 0
    word_substitutions: int = 0
    word_deletions: int = 0
    word_insertions: int = 0
    chars: int = 0
    char_edits: int = 0
    clips: int = 0
    exact_clips: int = 0

    def __add__(self, other: EditCounts) -> EditCounts:
        return EditCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def word_edits(self) -> int:
        return self.word_substitutions + self.word_deletions + self.word_insertions

    @property
    def wer(self) -> float:
        """Edits per reference word, above 1 where the model babbles.

        Without any reference word it is the number of insertions, which is also jiwer's
        convention: finite, and zero only where the model stayed silent too.
        """
        return self.word_edits / max(self.words, 1)

    @property
    def cer(self) -> float:
        """Edits per reference character, spaces between words included."""
        return self.char_edits / max(self.chars, 1)


def count(reference: str, hypothesis: str) -> EditCounts:
    """The edits of one clip. How much white space stands between words does not matter."""
    reference, hypothesis = " ".join(reference.split()), " ".join(hypothesis.split())
    words, chars = len(reference.split()), len(reference)
    if reference == hypothesis:
        return EditCounts(words=words, chars=chars, clips=1, exact_clips=1)
    by_word = jiwer.process_words(reference, hypothesis)
    by_char = jiwer.process_characters(reference, hypothesis)
    return EditCounts(
        words=words,
        word_substitutions=by_word.substitutions,
        word_deletions=by_word.deletions,
        word_insertions=by_word.insertions,
        chars=chars,
        char_edits=by_char.substitutions + by_char.deletions + by_char.insertions,
        clips=1,
    )
