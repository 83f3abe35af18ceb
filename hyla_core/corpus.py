"""Text on disk: which files a corpus has, what documents they hold, and a hash of their content.

A corpus is a file, a folder or a glob of `.txt`, `.jsonl`, `.json` (one object a line) or `.parquet` files, the first
three also compressed (`.gz`); files are taken in the order of their paths. `builtin` is a small corpus that Python
brings along: the language reference, as its own `help` prints it. Imports neither jax nor pyarrow before it is needed.
"""

import glob
import gzip
import hashlib
import importlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from hyla_core.durable import sha256_of

BUILTIN = "builtin"
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
_READ_BYTES = 2**20
_READ_ROWS = 1024


class CorpusError(ValueError):
    """A corpus that cannot be read; the message is one line with path, value and what is allowed."""


class Reading(NamedTuple):
    """How files fall into documents.

    Attributes:
      documents: `file`, `line` or `paragraph` (lines up to an empty one): what a document is in text files. A row of
        Parquet and a line of JSON is always one.
      column: name of the column, or of the field of a JSON object, that holds the text.
    """

    documents: str = "paragraph"
    column: str = "text"


def files_of(text: str) -> list[Path]:
    """The files of a corpus, by path.

    Args:
      text: a file, a folder or a glob; not `builtin`.

    Raises:
      CorpusError: there are none, or there is one of another kind.
    """
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            path.iterdir()
            # Through links to folders too, as a glob goes; a link to nothing is found, and refused when it is read.
            every = (Path(name) for name in glob.iglob(f"{glob.escape(str(path))}/**/*", recursive=True))  # noqa: PTH207
            found = sorted(file for file in every if not file.is_dir() and _kind(file) in SUFFIXES)
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.iglob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name that is too long, a folder that is closed, a user that is not there
        raise CorpusError(f"{_short(text)}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    allowed = f"a file, folder or glob of {', '.join(SUFFIXES)} files (.gz too), or {BUILTIN!r}"
    if not found:
        raise CorpusError(f"{text}: no text there; it must be {allowed}")
    for file in found:
        if _kind(file) not in SUFFIXES:
            raise CorpusError(f"{file}: not a text that can be read; it must be {allowed}")
    return found


def _kind(file: Path) -> str:
    """The suffix that says how a file is read; Parquet has a compression of its own."""
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower()
    return inner if suffix == ".gz" and inner != ".parquet" else suffix


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def content_hash(text: str) -> str:
    """SHA-256 of what a corpus holds, 64 hex digits: of its files' kinds and bytes in order, whatever they are called.

    Hashes of files are kept in the cache folder by path, size and time of change, so that a corpus is read once.

    Raises:
      CorpusError: there is no such corpus, or a file cannot be read.
    """
    if text == BUILTIN:
        digest = hashlib.sha256()
        for document in _builtin_documents():
            digest.update(document.encode() + b"\0")
        return digest.hexdigest()
    # The same bytes are another text as `.txt` than as `.jsonl`.
    parts = [f"{_kind(file)} {file.suffix == '.gz'} {_file_hash(file)}" for file in files_of(text)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_hash(file: Path) -> str:
    try:
        facts = file.stat()
        key = f"{file.absolute()}\0{facts.st_size}\0{facts.st_mtime_ns}"
        kept = cache_folder() / "hashes" / hashlib.sha256(key.encode()).hexdigest()
        if kept.is_file() and re.fullmatch(r"[0-9a-f]{64}", known := kept.read_bytes().decode("ascii", "replace")):
            return known
        digest = sha256_of(file)
    except OSError as error:
        raise CorpusError(f"{file}: can't be read: {error.strerror}") from None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(kept)
    except OSError:
        pass  # the next one reads the file again
    return digest


def cache_folder() -> Path:
    """Where what follows from a corpus is kept: HYLA_CACHE, else `hyla` in the user's cache folder."""
    if chosen := os.environ.get("HYLA_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise CorpusError(f"HYLA_CACHE={chosen}: {error}") from None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyla"


def documents_of(text: str, reading: Reading) -> Iterator[str]:
    """The documents of a corpus, in order; empty ones are left out. Reads as it goes: nothing needs to fit in memory.

    Raises:
      CorpusError: a file cannot be read, is no UTF-8 or no Parquet, or lacks the column.
    """
    if text == BUILTIN:
        yield from _builtin_documents()
        return
    for file in files_of(text):
        try:
            for document in _documents_of_file(file, reading):
                if stripped := document.strip():
                    yield stripped
        except UnicodeDecodeError as error:
            raise CorpusError(f"{file}: not UTF-8 text: {error.reason}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise CorpusError(f"{file}: can't be read: {getattr(error, 'strerror', None) or error}") from None


def _documents_of_file(file: Path, reading: Reading) -> Iterator[str]:
    kind = _kind(file)
    if kind == ".parquet":
        yield from _parquet_rows(file, reading.column)
        return
    with _opened(file) as stream:
        if kind in (".jsonl", ".json"):
            for number, line in enumerate(stream, start=1):
                yield _json_text(file, number, line, reading.column)
        elif reading.documents == "file":
            yield stream.read()
        elif reading.documents == "line":
            yield from stream
        else:
            lines: list[str] = []
            for line in stream:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines)
                    lines = []
            yield "".join(lines)


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig", buffering=_READ_BYTES)  # without the mark that some editors put first


def _parquet_rows(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if column not in table.schema_arrow.names:
                raise CorpusError(f"{file}: has no column {column!r}; choose one of {table.schema_arrow.names}")
            for batch in table.iter_batches(_READ_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    if value is not None and not isinstance(value, str):
                        raise CorpusError(f"{file}: column {column!r} holds {type(value).__name__}, not text")
                    yield value or ""
    except pyarrow.ArrowInvalid as error:
        raise CorpusError(f"{file}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _json_text(file: Path, number: int, line: str, column: str) -> str:
    if not line.strip():
        return ""
    try:
        text = json.loads(line)[column]
        text.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise CorpusError(f"{file}:{number}: not one JSON object a line with a text {column!r}")
    return text


def _builtin_documents() -> list[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise CorpusError(f"{BUILTIN}: this Python comes without pydoc_data, the text of its help") from None
    return [topics[name].strip() for name in sorted(topics)]
