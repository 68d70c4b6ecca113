"""A real pretrained model and real human speech, where they lie beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("MUSTER_SHARED") or Path(__file__).resolve().parents[2] / "shared")
WHISPER = SHARED / "models" / "whisper-tiny.en"
LIBRISPEECH = SHARED / "data" / "librispeech_mini"
FSDD = SHARED / "data" / "fsdd"

needs_whisper = pytest.mark.skipif(
    not WHISPER.is_dir(),
    reason=f"no pretrained Whisper at {WHISPER}; MUSTER_SHARED names its folder",
)
needs_speech = pytest.mark.skipif(
    not (LIBRISPEECH.is_dir() and FSDD.is_dir()),
    reason=f"no speech at {SHARED / 'data'}; MUSTER_SHARED names its folder",
)
