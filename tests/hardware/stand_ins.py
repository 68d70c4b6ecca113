"""What the stand-ins of conftest.py are made of."""

from pathlib import Path

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]  # of the four GPUs of `driver`


def write(root: Path, **files: str | int) -> Path:
    """`write(root, **{"a/b": "words"})` lays files below `root`."""
    for name, words in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{words}\n")
    return root
