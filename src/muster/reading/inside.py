"""Names of files that a file tells, such as an index or a manifest: inside its own folder, or refused."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from muster.errors import UnreadableError
from muster.reading.files import LONGEST_NAME
from muster.reading.text import in_one_line, printable

LONGEST = 1024  # characters of a name


def inside(folder: Path, name: object, told_by: object) -> Path:
    """The file of that name in `folder`, there or not: not by an absolute path, not through `..`, and not
    through a link that leads elsewhere, other than into the blobs of the Hugging Face Hub's own cache."""

    def refuse(words: str) -> UnreadableError:
        return UnreadableError(
            f"{printable(str(told_by))}: names the file {in_one_line(name)!r}, {words}"
        )

    if not isinstance(name, str) or not name or "\0" in name:
        raise refuse("which is no name of a file")
    if len(name) > LONGEST:
        raise refuse(f"which is longer than {LONGEST} characters")
    parts = PurePosixPath(name).parts
    if any(len(part.encode(errors="replace")) > LONGEST_NAME for part in parts):
        raise refuse(f"which is longer than {LONGEST_NAME} bytes")
    if name.startswith(("/", "~")) or ".." in parts or not parts:
        raise refuse(
            f"which is not inside {printable(str(folder))}; expected a name in that folder"
        )
    path = folder / name
    try:
        real, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle; a surrogate
        raise refuse("which cannot be followed") from None
    if not real.is_relative_to(root) and not _of_the_hub(real, root):
        raise refuse(f"which leads outside {printable(str(folder))}; put the file itself there")
    return path


def _of_the_hub(real: Path, root: Path) -> bool:
    """Whether it is a blob of the same repository: `models--x/snapshots/revision`, `models--x/blobs/hash`."""
    caches = [folder.parent for folder in (root, *root.parents) if folder.name == "snapshots"]
    return any(real.is_relative_to(cache / "blobs") for cache in caches[:1])
