"""Reads the files of torch.distributed.checkpoint without running code that they may carry.

torch unpickles `.metadata`, and values that are no tensors, with whatever classes they name: a stranger's
checkpoint could run any program. Here only the classes that torch writes for tensors are known; muster
saves nothing else.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from muster.errors import CheckpointError
from muster.reading.files import read_bytes

METADATA = ".metadata"
MOST = 2**30  # bytes of it
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class CheckpointReader(FileSystemReader):
    """`files`: names of those that the manifest has checksums of; no others are read."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._metadata = _read(folder, files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read(folder: Path, files: Collection[str]) -> Metadata:
    path = folder / METADATA
    try:
        text = read_bytes(path, MOST)
        _check_memo(text)
        found = _Unpickler(io.BytesIO(text)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        read = {str(info.relative_path) for info in (found.storage_data or {}).values()}
    except Exception as error:  # what a damaged pickle raises is any of a dozen
        raise CheckpointError(
            f"{path} cannot be read: {error}; it is damaged, or no checkpoint of torch's"
        ) from None
    if unknown := read - set(files):
        raise CheckpointError(
            f"{path} points to {min(unknown)}, which is no file of this checkpoint"
        )
    return found


def _check_memo(text: bytes) -> None:
    """Python makes room for as many objects as the highest number that one is remembered by, 2^32 in five bytes."""
    for opcode, argument, _ in pickletools.genops(text):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(text):
            raise pickle.UnpicklingError(f"it remembers an object by the number {argument}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if plain or name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is none of the classes of a checkpoint and could run code"
        )
