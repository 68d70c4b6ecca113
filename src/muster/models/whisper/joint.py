"""Joint CTC/attention decoding: a CTC head scores the decoder's next token too.

For a text h and a token c, CTC gives p(h·c … | audio) / p(h … | audio): of the alignments that begin with h,
the share that goes on with c (Watanabe et al. 2017, "Hybrid CTC/Attention Architecture for End-to-End Speech
Recognition"). It is a distribution over the next token, as the decoder's is; their logarithms are added with
weights. The recursions over frames are cumulative sums, and all tokens are one matrix product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muster.models.whisper.search import NEVER, CachedDecoder


class CTCPrefixes:
    """Of every row, ln p of the alignments of its text so far with the first t frames, t = 0 … frames:
    those that end in blank and those that end in the text's last token, both `[rows, frames + 1]`."""

    def __init__(self, logits: Tensor) -> None:
        """`logits` [batch, frames, symbols]: the tokens of text, and the blank last."""
        self.log_probs = logits.float().log_softmax(2)
        self.blank = logits.shape[2] - 1
        self.probs = self.log_probs[..., : self.blank].exp()
        blanks = self.log_probs[..., self.blank].double().cumsum(1)
        self.in_blank = torch.cat([torch.zeros_like(blanks[:, :1]), blanks], 1)
        self.in_token = torch.full_like(self.in_blank, -math.inf)
        self.last = torch.full((len(logits),), -1, device=logits.device)
        self.text = blanks.new_zeros(len(logits))  # ln p of the text with anything after it
        self.longer = self._longer()

    def next(self) -> Tensor:
        """[rows, tokens + 1], float32: ln p of each token as the next one, and of the text's end."""
        whole = torch.logaddexp(self.in_blank, self.in_token)[:, -1:]
        scores = torch.cat([self.longer, whole], 1) - self.text[:, None]
        possible = self.text.isfinite()[:, None]  # else the decoder alone decides
        return scores.where(possible, 0.0).clamp(min=NEVER).float()

    def append(self, tokens: Tensor) -> None:
        """One to each text, `[rows]`; of texts that have ended, any."""
        tokens = tokens.clamp(max=self.blank - 1)
        self.text = self.longer.gather(1, tokens[:, None])[:, 0]
        before = torch.logaddexp(self.in_blank, self.in_token)
        repeats = (tokens == self.last)[:, None]  # takes a blank between
        before = self.in_blank.where(repeats, before)[:, :-1]
        self.in_token = _running(before, self._frames_of(tokens))
        blanks = self._frames_of(torch.full_like(tokens, self.blank))
        self.in_blank = _running(self.in_token[:, :-1], blanks)
        self.last = tokens
        self.longer = self._longer()

    def select(self, rows: Tensor) -> None:
        """Reorder the texts to `rows`, each within its own clip's."""
        self.in_blank, self.in_token = self.in_blank[rows], self.in_token[rows]
        self.last, self.text, self.longer = self.last[rows], self.text[rows], self.longer[rows]

    def _longer(self) -> Tensor:
        """[rows, tokens]: ln p of the text with each token after it, and anything after that."""
        either = torch.logaddexp(self.in_blank, self.in_token)
        repeated = torch.arange(self.blank, device=self.last.device) == self.last[:, None]
        return self._begun(self.in_blank).where(repeated, self._begun(either))

    def _begun(self, before: Tensor) -> Tensor:
        """[rows, tokens]: each token begins in any frame, after what `before` [rows, frames + 1] allows."""
        most = before.amax(1, keepdim=True).clamp(min=NEVER)
        share = (before - most)[:, :-1].exp().float()
        sums = share.unflatten(0, (len(self.probs), -1)) @ self.probs
        return sums.flatten(0, 1).double().log() + most

    def _frames_of(self, tokens: Tensor) -> Tensor:
        """[rows, frames]: ln p of one symbol of each row."""
        each = tokens.unflatten(0, (len(self.log_probs), 1, -1))
        found = self.log_probs.gather(2, each.expand(-1, self.log_probs.shape[1], -1))
        return found.transpose(1, 2).flatten(0, 1).double()


def _running(before: Tensor, steps: Tensor) -> Tensor:
    """r[t] = ln(exp r[t - 1] + exp before[t - 1]) + steps[t - 1], from r[0] = -inf: `[rows, frames + 1]`."""
    total = steps.cumsum(1)
    found = total + (before - (total - steps)).logcumsumexp(1)
    return torch.cat([torch.full_like(found[:, :1], -math.inf), found], 1)


class JointDecoder:
    """A decoder's log-probabilities and those of a CTC head, weighted."""

    def __init__(self, decoder: CachedDecoder, prefixes: CTCPrefixes, weight: float) -> None:
        self.decoder, self.prefixes, self.weight = decoder, prefixes, weight
        self.prompted = False

    def next(self, tokens: Tensor) -> Tensor:
        scores = self.decoder.next(tokens).log_softmax(1)
        if self.prompted:
            self.prefixes.append(tokens[:, -1])
        self.prompted = True
        joint = torch.full_like(scores, NEVER)  # of tokens that are neither text nor its end
        text = self.prefixes.blank + 1  # its end follows the tokens of text
        joint[:, :text] = (1 - self.weight) * scores[:, :text] + self.weight * self.prefixes.next()
        return joint

    def select(self, rows: Tensor) -> None:
        self.decoder.select(rows)
        self.prefixes.select(rows)
