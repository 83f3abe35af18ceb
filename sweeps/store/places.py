"""Where a store is: all that touches its files, so that a bucket can take the place of a folder.

Paths are relative to the store and use "/", such as `metrics/ab12-1.parquet`. Every file appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sweeps.store.schema import StoreError

FOLDERS = ("trials", "metrics", "sweeps", "claims", "checkpoints")
"""What every store has."""

MIN_FREE_BYTES = 16 * 2**20
"""Less free space than this is named before anything starts."""

_MAX_WRITERS = 8
"""Files that are made to last at once."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class Entry(NamedTuple):
    """A finished file of a folder."""

    name: str
    version: tuple[int, ...]  # changes when the file is replaced
    modified: float  # seconds since the epoch


class Place(ABC):
    """A folder, or a prefix of a bucket, that can hold a store.

    Attributes:
      shown: how messages name it; never with credentials.
      is_remote: whether every operation is a request over the network.
      heartbeat_every_s: how often a claim may be rewritten.
      flush_every_s: how often live parts are replaced.
      num_readers: threads that read files at once.
      settles_after_s: a file younger than this may be replaced without its version changing.
    """

    shown: str
    is_remote = False
    heartbeat_every_s = 1.0
    flush_every_s = 5.0
    num_readers = 4  # one file each; more only contend for the interpreter
    settles_after_s = 0.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"

    def shown_path(self, path: str) -> str:
        """How messages name a file of it."""
        return f"{self.shown.rstrip('/')}/{path}"

    @abstractmethod
    def entries(self, folder: str, suffix: str = "", wanted: Callable[[str], bool] = lambda name: True) -> list[Entry]:
        """The finished files of a folder by name; those with a leading dot are still being written. [] if absent.

        Args:
          folder: where to look.
          suffix: how their names end.
          wanted: whether a name is of interest; no more than its name is asked of a file that is not.

        Raises:
          StoreError: the folder can't be read.
        """

    @abstractmethod
    def names(self, folder: str, prefix: str = "") -> list[str]:
        """Names of the files and folders in a folder that start so, unfinished ones too; [] if absent."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A file's content. Raises FileNotFoundError, OSError."""

    @abstractmethod
    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replaces a file whole: whoever reads or crashes meanwhile has the old one or the new one.

        Args:
          path: of the file; its folder is made where it is missing, but never the store itself.
          data: the new content.
          durable: whether it must outlive a power cut.

        Raises:
          OSError: it can't be written; the old one stays.
        """

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """`write` for several files, durably. Where one can't be written, others may have been.

        Args:
          files: path → new content.

        Raises:
          OSError: one of them can't be written.
        """
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Creates a file that nobody else has; False where somebody was faster."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def modified(self, path: str) -> float:
        """When a file was written, in seconds since the epoch. Raises FileNotFoundError."""

    @abstractmethod
    def touch(self, path: str) -> None:
        """Makes a file look written just now."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file or a folder; one that is absent is fine."""

    @abstractmethod
    def move(self, path: str, to: str) -> None:
        """Moves a file within the store."""

    @abstractmethod
    def write_folder(self, path: str, write: Callable[[Path], None]) -> None:
        """Makes a folder whole or not at all.

        Args:
          path: of the folder.
          write: fills a folder of this machine that does not exist yet, and sees to it that it lasts.
        """

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""

    @abstractmethod
    def local_folder(self, path: str) -> Path:
        """A folder of the store as one of this machine."""

    @abstractmethod
    def make(self) -> None:
        """Makes the store and its folders where they are missing. Raises OSError."""

    @abstractmethod
    def is_store(self) -> str | None:
        """None, or why there is no store here.

        Raises:
          OSError: it can't be told.
        """

    @abstractmethod
    def check_writable(self) -> None:
        """Tries to write, before anything starts.

        Raises:
          StoreError: path and reason, in one line.
        """

    def wait_to_retry(self) -> bool:
        """After a failed write: waits until another try may help. False where it would not, without waiting."""
        return False


class LocalPlace(Place):
    """A folder of a file system, be it a network's. Renames make a file appear whole; claims are exclusive."""

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()
        self.shown = str(self.root)

    def entries(self, folder: str, suffix: str = "", wanted: Callable[[str], bool] = lambda name: True) -> list[Entry]:
        entries = []
        try:
            with os.scandir(self.root / folder) as scan:
                for item in scan:
                    if item.name.startswith((".", "_")) or not item.name.endswith(suffix) or not wanted(item.name):
                        continue
                    with suppress(FileNotFoundError):
                        stat = item.stat()
                        version = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                        entries.append(Entry(item.name, version, stat.st_mtime))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.shown_path(folder)}: can't be read: {one_line(error)}") from error
        return sorted(entries)

    def names(self, folder: str, prefix: str = "") -> list[str]:
        try:
            names = os.listdir(self.root / folder)  # noqa: PTH208 (three times as fast as making a path of each)
            return [name for name in names if name.startswith(prefix)] if prefix else names
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        target = self._with_folder(path)
        temporary = _temporary(target)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            _sync_folder(target.parent)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        # A file system makes many files last in hardly more time than one, if it is asked for all of them at once.
        targets = [self._with_folder(path) for path in files]
        temporaries = [_temporary(target) for target in targets]

        def write(temporary: Path, data: bytes) -> None:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        try:
            with ThreadPoolExecutor(min(_MAX_WRITERS, max(1, len(files)))) as pool:
                list(pool.map(write, temporaries, files.values()))
            for temporary, target in zip(temporaries, targets, strict=True):
                temporary.replace(target)
        except BaseException:
            for temporary in temporaries:
                with suppress(OSError):
                    temporary.unlink()
            raise
        for folder in {target.parent for target in targets}:
            _sync_folder(folder)

    def create(self, path: str, data: bytes) -> bool:
        target = self._with_folder(path)
        try:
            descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except BaseException:
            _remove(target)
            raise
        return True

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def modified(self, path: str) -> float:
        return (self.root / path).stat().st_mtime

    def touch(self, path: str) -> None:
        os.utime(self.root / path)

    def remove(self, path: str) -> None:
        _remove(self.root / path)

    def move(self, path: str, to: str) -> None:
        target = self._with_folder(to)
        (self.root / path).replace(target)
        _sync_folder(target.parent)

    def write_folder(self, path: str, write: Callable[[Path], None]) -> None:
        target = self._with_folder(path)
        temporary = _temporary(target)
        try:
            write(temporary)
            _remove(target)
            temporary.replace(target)
        except BaseException:
            _remove(temporary)
            raise
        _sync_folder(target.parent)

    def is_folder(self, path: str) -> bool:
        return (self.root / path).is_dir()

    def local_folder(self, path: str) -> Path:
        return self.root / path

    def make(self) -> None:
        for folder in FOLDERS:
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def is_store(self) -> str | None:
        if not self.root.exists():
            return "no such folder"
        if not self.root.is_dir():
            return "not a folder"
        if not any((self.root / folder).is_dir() for folder in ("trials", "sweeps")):
            return "not a results store (it has no folder trials/)"
        return None

    def check_writable(self) -> None:
        if not self.root.is_dir():
            raise StoreError(f"{self.shown}: not a folder; the results store can't be written")
        for folder in FOLDERS:
            probe = f"{folder}/.probe-{uuid.uuid4().hex[:8]}"
            try:
                self.write(probe, bytes(4096))
                self.remove(probe)
            except OSError as error:
                raise StoreError(
                    f"{self.shown_path(folder)}: the results store can't be written: {one_line(error)}"
                ) from error
        free = shutil.disk_usage(self.root).free
        if free < MIN_FREE_BYTES:
            raise StoreError(f"{self.shown}: only {free} bytes are free on this disk; make room for {MIN_FREE_BYTES}")

    def _with_folder(self, path: str) -> Path:
        """The file's path, its folder made. A store that was deleted or unmounted is not made anew somewhere else."""
        target = self.root / path
        if not target.parent.is_dir():
            if not self.root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the results store is gone", str(self.root))
            target.parent.mkdir(parents=True, exist_ok=True)
        return target


def find_place(path: str | Path) -> Place:
    """The place that a path or URL means.

    Raises:
      StoreError: it is a URL of a kind that can't hold a store.
    """
    if is_url(path):
        from sweeps.store.object_place import ObjectPlace  # pyarrow's filesystems take a while to load

        return ObjectPlace(str(path))
    return LocalPlace(path)


def is_url(path: str | Path) -> bool:
    """Whether a store is named by a URL, such as s3://bucket/results, and not by a path."""
    return _URL.match(str(path)) is not None


def one_line(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes a rename outlive a power cut, where the file system knows how."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
