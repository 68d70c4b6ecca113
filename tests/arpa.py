"""An n-gram model as an ARPA file, as other programs write it."""

from __future__ import annotations

import gzip
from pathlib import Path

from muster.evaluate.ngram import NGram


def write_arpa(model: NGram, path: Path) -> None:
    """Compressed where the name ends in .gz."""
    groups = [[w for w in model.entries if len(w) == n] for n in range(1, model.order + 1)]
    lines = ["\\data\\", *(f"ngram {n}={len(group)}" for n, group in enumerate(groups, 1))]
    for n, group in enumerate(groups, 1):
        lines += ["", f"\\{n}-grams:"]
        for words in sorted(group):
            log_prob, weight = model.entries[words]
            tail = f"\t{weight:.8g}" if weight else ""
            lines.append(f"{log_prob:.8g}\t{' '.join(words)}{tail}")
    lines += ["", "\\end\\", ""]
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
