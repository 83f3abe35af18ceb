"""Files that outlive a power cut, and how to tell whether one is as it was written."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until what is in a file, or which files are in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits; reads as it goes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
