"""Stores in a bucket: `s3://bucket/prefix` and `gs://bucket/prefix`, through pyarrow's filesystems.

A bucket has no rename. What it has: an object appears whole or not at all, whoever reads after a write sees it, and
objects are listed by folder. The store needs no more, apart from exclusive creation, which pyarrow does not offer:
see `ObjectPlace.create` for what takes its place.

Endpoint, region and credentials come from where every tool for such stores looks for them, never from the store:

    s3://   AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role; AWS_REGION or
            AWS_DEFAULT_REGION; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
    gs://   GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the machine's account;
            STORAGE_EMULATOR_HOST
"""

from __future__ import annotations

import configparser
import errno
import hashlib
import os
import queue
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from sweeps.store.places import FOLDERS, Entry, Place
from sweeps.store.schema import StoreError

CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 5.0  # a transfer in which nothing moves for so long is given up
MAX_ATTEMPTS = 3  # of one request: with the timeouts, an endpoint that hangs costs about half a minute
DEADLINE_S = 40.0  # of one operation at gs://, whose client has no timeout that can be set
SLOWEST_BYTES_PER_S = 2**20  # by which larger transfers get more time than that
AWAY_FOR_S = 10.0  # after no answer, nothing is sent for so long: what waits to be written fails at once meanwhile
GIVE_UP_AFTER_S = 100.0  # a result is tried to be written for about so long
REMEMBERED_FOR_S = 30.0  # a listing of a table is used again for so long where only names of one trial are asked for
SINGLE_UPLOAD_BYTES = 5 * 2**20  # up to this size pyarrow sends an object in one request
MIN_CLAIM_WAIT_S = 0.3

_SCHEMES = ("s3", "gs")
_OPTIONS = {"s3": ("endpoint_override", "region", "scheme"), "gs": ("endpoint_override", "scheme")}
_CREDENTIALS = re.compile(r"key|secret|token|password|credential|signature", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TABLES = tuple(folder for folder in FOLDERS if folder != "checkpoints")
_MANIFEST = "manifest.json"

T = TypeVar("T")


class ObjectStoreError(StoreError, OSError):
    """Why a bucket could not be used, in one line that names the URL. `strerror` is the reason alone.

    Attributes:
      is_away: whether nobody answered.
      may_pass: whether the same may work later, without anybody mending something.
    """

    def __init__(self, shown: str, reason: str, *, is_away: bool = False, may_pass: bool = False):
        super().__init__(f"{shown}: {reason}")
        self.strerror: str = reason
        self.is_away = is_away
        self.may_pass = is_away or may_pass
        self._text = f"{shown}: {reason}"

    def __str__(self) -> str:
        return self._text


class Address(NamedTuple):
    """What a URL says."""

    scheme: str  # s3 or gs
    bucket: str
    prefix: str  # without slashes at its ends; "" for the whole bucket
    options: dict[str, str]
    shown: str  # the URL without a slash at its end

    @classmethod
    def of(cls, url: str) -> Address:
        """Reads a URL.

        Raises:
          StoreError: it is none of a store in a bucket, or holds credentials. They are not repeated.
        """
        parts = urlsplit(url)
        allowed = "give a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
        if "@" in parts.netloc:
            raise StoreError(
                f"{parts.scheme}://…@{parts.netloc.rpartition('@')[2]}{parts.path}: a URL with credentials would be "
                f"shown and recorded; {_where_credentials_belong(parts.scheme)}"
            )
        bare = f"{parts.scheme}://{parts.netloc}{parts.path}"
        if parts.scheme not in _SCHEMES:
            raise StoreError(f"{bare}: a store can't be at {parts.scheme}://; {allowed}")
        if not _BUCKET.fullmatch(parts.netloc):
            raise StoreError(f"{bare}: {parts.netloc!r} is not the name of a bucket; {allowed}")
        if parts.fragment:
            raise StoreError(f"{bare}: a store's URL has no part that begins with #; {allowed}")
        prefix = parts.path.strip("/")
        if prefix and any(name in ("", ".", "..") for name in prefix.split("/")):
            raise StoreError(f"{bare}: every folder needs a name other than . and ..; {allowed}")
        options: dict[str, str] = {}
        known = _OPTIONS[parts.scheme]
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in known and _CREDENTIALS.search(name):
                raise StoreError(
                    f"{bare}: {name} in a URL would be shown and recorded; {_where_credentials_belong(parts.scheme)}"
                )
            if name not in known or not value:
                what = f"?{name}= needs a value" if name in known else f"?{name}= is unknown"
                raise StoreError(f"{bare}: {what}; allowed are {', '.join(known)}")
            options[name] = value
        if options.get("scheme", "http") not in ("http", "https"):
            raise StoreError(f"{bare}: ?scheme={options['scheme']}; choose http or https")
        shown = bare.rstrip("/") + (f"?{parts.query}" if options else "")
        address = cls(parts.scheme, parts.netloc, prefix, options, shown)
        _endpoint(address)
        return address


class _Endpoint(NamedTuple):
    """Where requests go to, if not to the cloud's own servers."""

    scheme: str | None
    host: str  # with port and path

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" if self.scheme else self.host


def _endpoint(address: Address) -> _Endpoint | None:
    """The endpoint that the URL or the environment names.

    Raises:
      StoreError: it holds credentials, or is none.
    """
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if address.scheme == "s3" else ("STORAGE_EMULATOR_HOST",)
    found = [("?endpoint_override=", address.options.get("endpoint_override", ""))]
    found += [(name, os.environ.get(name, "")) for name in variables]
    source, text = next(((source, text) for source, text in found if text), ("", ""))
    if not text:
        return None
    scheme, _, host = text.rpartition("://")
    if "@" in host:
        raise StoreError(
            f"{address.scheme}://{address.bucket}/{address.prefix}: the endpoint in {source} holds credentials; "
            f"{_where_credentials_belong(address.scheme)}"
        )
    if scheme not in ("", "http", "https") or not host.strip("/"):
        raise StoreError(f"{address.shown}: the endpoint in {source} is {text!r}; give one such as https://HOST:PORT")
    if not scheme and source == "STORAGE_EMULATOR_HOST":
        scheme = "http"
    return _Endpoint(address.options.get("scheme") or scheme or None, host.rstrip("/"))


def _where_credentials_belong(scheme: str) -> str:
    if scheme == "gs":
        return "set GOOGLE_APPLICATION_CREDENTIALS, or use `gcloud auth application-default login`"
    return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


class ObjectPlace(Place):
    """A prefix of a bucket. Safe to use from several threads; a forked child connects anew.

    Every operation is one to four requests over the network. An operation that gets no answer fails within about half
    a minute, and those of the next seconds at once, so that a training that can't write goes on.

    `names` of a table may miss what other processes made in the last half minute: a store of 10,000 trials would
    otherwise be listed for each trial that is begun. What this process itself made, found or removed is in it.

    Removing an object leaves an empty one named after its folder, such as `claims/`: pyarrow's way to keep a folder.
    No reader sees it, and there are never more of them than folders.
    """

    is_remote = True
    heartbeat_every_s = 15.0
    flush_every_s = 15.0
    num_readers = 24  # the client keeps 25 connections
    # Times of change have whole seconds there; and the clock of this machine may differ from theirs.
    settles_after_s = 60.0

    def __init__(self, url: str):
        self._address = Address.of(url)
        self.shown = self._address.shown
        self._base = "/".join(filter(None, (self._address.bucket, self._address.prefix)))
        self._lock = threading.RLock()
        self._connection: tuple[int, pafs.FileSystem] | None = None
        self._bucket_seen = False
        self._away_until, self._away_reason = 0.0, ""
        self._failing_since: float | None = None
        self._remembered: dict[str, tuple[float, set[str]]] = {}
        self._unfinished: dict[str, queue.SimpleQueue[Any]] = {}
        self._downloads: tempfile.TemporaryDirectory[str] | None = None

    def __reduce__(self) -> tuple[type[ObjectPlace], tuple[str]]:
        return ObjectPlace, (self.shown,)

    def shown_path(self, path: str) -> str:
        """How messages name an object."""
        return f"{self._address.scheme}://{self._base}/{path}"

    # ------------------------------------------------------------------------------------------------------- reading

    def entries(self, folder: str, suffix: str = "", wanted: Callable[[str], bool] = lambda name: True) -> list[Entry]:
        """The finished objects of a folder: a request for each thousand, wanted or not."""
        found = [info for info in self._list(folder) if info.type == pafs.FileType.File]
        return sorted(
            Entry(info.base_name, (info.size, info.mtime_ns), info.mtime_ns / 1e9)
            for info in found
            if not info.base_name.startswith((".", "_")) and info.base_name.endswith(suffix) and wanted(info.base_name)
        )

    def names(self, folder: str, prefix: str = "") -> list[str]:
        """Names in a folder; of a table's, as of half a minute ago at most."""
        with self._lock:
            asked, known = self._remembered.get(folder, (0.0, set()))
            if asked and time.monotonic() - asked < REMEMBERED_FOR_S:
                return [name for name in known if name.startswith(prefix)]
        return [info.base_name for info in self._list(folder) if info.base_name.startswith(prefix)]

    def read(self, path: str) -> bytes:
        """An object's content, of one moment even where it is replaced meanwhile."""
        for _ in range(MAX_ATTEMPTS):
            data = self._run(path, lambda: self._read_once(path))
            if data is not None:
                return data
        raise ObjectStoreError(self.shown_path(path), "was replaced again and again while it was read; try again")

    def exists(self, path: str) -> bool:
        """Whether there is such an object; False for a folder."""
        try:
            self._run(path, lambda: self._filesystem.open_input_file(self._key(path)).close())
        except FileNotFoundError:
            self._note(path, there=False)
            return False
        self._note(path, there=True)
        return True

    def modified(self, path: str) -> float:
        """When an object was written, in seconds since the epoch, to the second."""
        info = self._run(path, lambda: self._filesystem.get_file_info(self._key(path)))
        if info.type != pafs.FileType.File:
            raise self._not_found(path)
        return info.mtime_ns / 1e9

    def is_folder(self, path: str) -> bool:
        """Whether anything is below this path."""
        return self._run(path, lambda: self._filesystem.get_file_info(self._key(path))).type == pafs.FileType.Directory

    def local_folder(self, path: str) -> Path:
        """Downloads a folder, anew each time, into a temporary one that goes with this object or the process."""
        with self._lock:
            if self._downloads is None:
                self._downloads = tempfile.TemporaryDirectory(prefix="hyla-", ignore_cleanup_errors=True)
            folder = Path(self._downloads.name) / uuid.uuid4().hex
        selector = pafs.FileSelector(self._key(path), recursive=True)
        infos = self._run(path, lambda: self._filesystem.get_file_info(selector))
        files = [info.path for info in infos if info.type == pafs.FileType.File]
        folder.mkdir()

        def download(key: str) -> None:
            relative = key.removeprefix(f"{self._key(path)}/")
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.read(f"{path}/{relative}"))

        with ThreadPoolExecutor(min(8, self.num_readers)) as pool:  # whole files are held in memory
            for _ in pool.map(download, files):
                pass
        return folder

    def is_store(self) -> str | None:
        """None, or why there is no store here."""
        infos = self._list("")
        if any(info.base_name in ("trials", "sweeps") for info in infos):
            return None
        return "not a results store (it has no trials/)" if infos else "nothing is there"

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replaces an object whole; it always lasts."""
        self._upload(path, data)
        self._note(path, there=True)

    def create(self, path: str, data: bytes) -> bool:
        """Creates an object unless somebody else did; False where somebody was faster.

        The object is written with a token of its own, and read back after a moment: who is in it then has it. Of rivals
        whose writes overlap, all but the last find another's token and step back. Two can win only where one of them
        took longer from looking whether the object is there to having written it than three times as long as the
        other's write, and at least `MIN_CLAIM_WAIT_S`: a machine that was suspended in between, say. Both then train
        the same trial to the same result, which costs time and harms nothing.
        """
        if self.exists(path):
            return False
        token = uuid.uuid4().hex
        start = time.monotonic()
        # Of what pyarrow sends along with an object, the type alone can carry a token at s3:// and gs:// alike.
        self._upload(path, data, kind=f"application/octet-stream; hyla-claim={token}")
        self._note(path, there=True)
        time.sleep(max(MIN_CLAIM_WAIT_S, 3 * (time.monotonic() - start)))
        try:
            metadata = self._run(path, lambda: self._metadata(path))
        except FileNotFoundError:
            self._note(path, there=False)
            return False
        return token.encode() in b" ".join(bytes(value) for value in metadata.values())

    def touch(self, path: str) -> None:
        """Writes an object once more."""
        self.write(path, self.read(path))

    def remove(self, path: str) -> None:
        """Removes an object, or all below a path."""
        filesystem = self._filesystem
        try:
            self._run(path, lambda: filesystem.delete_file(self._key(path)), is_change=True)
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                self._run(path, lambda: filesystem.delete_dir(self._key(path)), is_change=True)
        self._note(path, there=False)

    def move(self, path: str, to: str) -> None:
        """Copies an object, then removes it."""
        self._run(to, lambda: self._filesystem.copy_file(self._key(path), self._key(to)), is_change=True)
        self._note(to, there=True)
        self.remove(path)

    def write_folder(self, path: str, write: Callable[[Path], None]) -> None:
        """Uploads a folder, its manifest.json last: what has none is not whole.

        Args:
          path: of the folder.
          write: fills a folder of this machine that does not exist yet.
        """
        with tempfile.TemporaryDirectory(prefix="hyla-", ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary) / "folder"
            write(folder)
            self.remove(path)
            files = sorted(item for item in folder.rglob("*") if item.is_file())
            with ThreadPoolExecutor(min(8, self.num_readers)) as pool:
                for _ in pool.map(
                    lambda file: self._upload_file(f"{path}/{file.relative_to(folder).as_posix()}", file),
                    [file for file in files if file != folder / _MANIFEST],
                ):
                    pass
            if (folder / _MANIFEST) in files:
                self._upload_file(f"{path}/{_MANIFEST}", folder / _MANIFEST)

    def make(self) -> None:
        """Looks whether the bucket is there and may be listed; nothing else has to be made."""
        self._list("")
        self._check_bucket()

    def check_writable(self) -> None:
        """Writes an object and removes it."""
        probe = f"claims/.probe-{uuid.uuid4().hex[:8]}"
        try:
            self._upload(probe, bytes(4096))
            self.remove(probe)
        except OSError as error:
            raise StoreError(f"{self.shown}: the results store can't be written: {error.strerror or error}") from error

    def wait_to_retry(self) -> bool:
        """Waits until another try may help; False where it would not, or where nothing has worked for too long."""
        with self._lock:
            now, since = time.monotonic(), self._failing_since
            if since is None or now - since > GIVE_UP_AFTER_S:
                return False
            wait_s = max(AWAY_FOR_S / 2, self._away_until - now)
        time.sleep(wait_s)
        return True

    # ------------------------------------------------------------------------------------------------------ requests

    def _key(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    @property
    def _filesystem(self) -> pafs.FileSystem:
        with self._lock:
            if self._connection is None or self._connection[0] != os.getpid():
                self._connection = os.getpid(), _connect(self._address)
            return self._connection[1]

    def _list(self, folder: str) -> list[pafs.FileInfo]:
        asked = time.monotonic()
        selector = pafs.FileSelector(self._key(folder), allow_not_found=True)
        infos = self._run(folder, lambda: self._filesystem.get_file_info(selector))
        if not infos:
            self._check_bucket()  # a bucket that does not exist lists as an empty folder
        if folder in _TABLES:
            with self._lock:
                self._remembered[folder] = asked, {info.base_name for info in infos}
        return infos

    def _note(self, path: str, *, there: bool) -> None:
        """Keeps what is remembered of a listing up to date with what this process does and finds."""
        folder, _, name = path.rpartition("/")
        with self._lock:
            if folder in self._remembered:
                names = self._remembered[folder][1]
                names.add(name) if there else names.discard(name)

    def _check_bucket(self) -> None:
        if self._bucket_seen:
            return
        bucket = self._address.bucket
        try:
            info = self._run("", lambda: self._filesystem.get_file_info(bucket))
        except ObjectStoreError as error:
            if error.is_away or "denied" not in error.strerror:
                raise
            return  # who may use a prefix alone is not told of the bucket
        if info.type == pafs.FileType.NotFound:
            raise ObjectStoreError(self.shown, _no_bucket(bucket))
        self._bucket_seen = True

    def _read_once(self, path: str) -> bytes | None:
        """An object's content; None where it was replaced meanwhile."""
        with self._filesystem.open_input_file(self._key(path)) as file:
            before = _tag(file.metadata())
            data = file.read()
        # The size is asked for first and the bytes after that, so they may be the start of a newer, longer object.
        # Mostly the tag is the content's MD5; where it is not, a second look must find the same tag.
        if (
            before
            and before != hashlib.md5(data, usedforsecurity=False).hexdigest()
            and before != _tag(self._metadata(path))
        ):
            return None
        return data

    def _metadata(self, path: str) -> dict[Any, Any]:
        with self._filesystem.open_input_file(self._key(path)) as file:
            return dict(file.metadata())

    def _upload_file(self, path: str, file: Path) -> None:
        with pa.memory_map(str(file)) as source:
            self._upload(path, source.read_buffer())

    def _upload(self, path: str, data: bytes | pa.Buffer, kind: str = "application/octet-stream") -> None:
        """Writes an object whole or not at all.

        A large one is sent in several parts, which pyarrow puts together even where one of them failed and nobody asked
        for it: so these come together under another name, and are copied once they are whole.
        """
        num_bytes = len(data) if isinstance(data, bytes) else data.size
        key = self._key(path)

        if num_bytes <= SINGLE_UPLOAD_BYTES:
            self._run(path, lambda: self._put(key, data, kind), is_change=True)
            return
        folder, _, name = path.rpartition("/")
        staged = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self._run(path, lambda: self._put(self._key(staged), data, kind), is_change=True, num_bytes=num_bytes)
            self._run(
                path,
                lambda: self._filesystem.copy_file(self._key(staged), key),
                is_change=True,
                num_bytes=num_bytes,
            )
        finally:
            with suppress(OSError):
                self.remove(staged)

    def _put(self, key: str, data: bytes | pa.Buffer, kind: str) -> None:
        # Leaving the block also ends an upload of which a part has failed: that must not wait until the stream is
        # collected, when all threads would wait for it.
        with self._filesystem.open_output_stream(key, metadata={"Content-Type": kind}) as stream:
            stream.write(data)

    def _run(self, path: str, do: Callable[[], T], *, is_change: bool = False, num_bytes: int = 0) -> T:
        """Does what needs the network; its errors come out in one line.

        Changes run in a thread of their own: a signal that interrupts this one would otherwise leave a stream that is
        not written yet, and pyarrow closes such streams, which makes an empty object. At gs:// every operation does,
        since there it is this method that ends the waiting.
        """
        start = time.monotonic()
        with self._lock:
            if start < self._away_until:
                raise ObjectStoreError(self.shown_path(path), self._away_reason, is_away=True)
        try:
            has_deadline = self._address.scheme == "gs"
            deadline = DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S if has_deadline else None
            result = self._run_aside(path if is_change else None, do, deadline) if is_change or has_deadline else do()
        except FileNotFoundError as error:
            self._failing_since = None
            raise self._not_found(path) from error
        except (OSError, pa.ArrowException) as error:
            failure = error if isinstance(error, ObjectStoreError) else self._describe(path, error)
            self._note_failure(failure, start)
            if failure is error:
                raise
            raise failure from error
        self._failing_since = None
        return result

    def _note_failure(self, failure: ObjectStoreError, start: float) -> None:
        with self._lock:
            now = time.monotonic()
            if not failure.may_pass:
                self._failing_since = None
            elif self._failing_since is None:
                self._failing_since = start
            if failure.is_away:
                # Who had to wait long for no answer is not to wait most of the time.
                self._away_until, self._away_reason = now + max(AWAY_FOR_S, 3 * (now - start)), failure.strerror

    def _run_aside(self, changed: str | None, do: Callable[[], T], deadline: float | None) -> T:
        """Runs something in another thread, which is left alone after `deadline` seconds.

        A change that was left alone may still happen, so the next one of the same path waits until it did.
        """
        if changed is not None and (before := self._unfinished.pop(changed, None)) is not None:
            try:
                before.get(timeout=deadline)
            except queue.Empty:
                self._unfinished[changed] = before
                raise self._no_answer(changed, deadline) from None
        results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((True, do()))
            except BaseException as error:
                results.put((False, error))

        threading.Thread(target=run, name="hyla-store-request", daemon=True).start()
        try:
            succeeded, result = results.get(timeout=deadline)
        except queue.Empty:
            if changed is not None:
                self._unfinished[changed] = results
            raise self._no_answer(changed or "", deadline) from None
        if not succeeded:
            raise result
        return result

    # -------------------------------------------------------------------------------------------------------- errors

    def _not_found(self, path: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.shown_path(path))

    def _no_answer(self, path: str, after_s: float | None) -> ObjectStoreError:
        reason = f"no answer from {self._shown_endpoint()} in {after_s:g} s"
        return ObjectStoreError(self.shown_path(path), reason, is_away=True)

    def _shown_endpoint(self) -> str:
        return str(_endpoint(self._address) or {"s3": "Amazon S3", "gs": "Google Cloud Storage"}[self._address.scheme])

    def _describe(self, path: str, error: BaseException) -> ObjectStoreError:
        """What pyarrow says, in the words of somebody who can mend it."""
        shown = self.shown_path(path) if path else self.shown
        reason, kind = _reason(str(error), self._address, self._shown_endpoint())
        return ObjectStoreError(shown, reason, is_away=kind == _AWAY, may_pass=kind == _PASSING)


_AWAY, _PASSING, _LASTING = "away", "passing", "lasting"


def _reason(text: str, address: Address, endpoint: str) -> tuple[str, str]:
    """Why a request failed; and whether nobody answered, it may pass, or somebody has to mend something."""
    line = next(iter(text.strip().splitlines()), "unknown error")
    if curl := re.search(r"(?:curlCode: |CURL error \[)(\d+)(?:, |\]=)([^;(]*)", line):
        if curl[1] == "28":
            return f"no answer from {endpoint}", _AWAY
        what = re.sub(r"\s*error_info=.*", "", curl[2]).strip()
        return f"{endpoint} can't be reached: {what}", _AWAY
    code = re.search(r"AWS Error (\w+)|google::cloud::Status\((\w+)", line)
    kind = (code[1] or code[2]) if code else ""
    if "OAuth2 access token" in line or kind == "UNAUTHENTICATED":
        return f"no valid credentials; {_where_credentials_belong(address.scheme)}", _LASTING
    if kind in ("NO_SUCH_BUCKET",) or "specified bucket does not exist" in line:
        return _no_bucket(address.bucket), _LASTING
    if kind == "EXPIRED_TOKEN" or "ExpiredToken" in line:
        return f"the credentials have expired; renew them, or {_where_credentials_belong(address.scheme)}", _LASTING
    denied = ("ACCESS_DENIED", "PERMISSION_DENIED", "INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN_ID")
    if kind in (*denied, "SIGNATURE_DOES_NOT_MATCH", "MISSING_AUTHENTICATION_TOKEN") or "HTTP status 403" in line:
        if address.scheme == "s3" and not _has_credentials():
            return f"access denied: no credentials were found; {_where_credentials_belong('s3')}", _LASTING
        return (
            f"access denied; the credentials of the environment must be allowed to list, read, write and delete here: "
            f"{_where_credentials_belong(address.scheme)}",
            _LASTING,
        )
    if "HTTP status 301" in line or kind == "PERMANENT_REDIRECT":
        return f"the bucket {address.bucket!r} is in another region; set AWS_REGION to it", _LASTING
    line = re.sub(r"\s*\(?Request ID:.*|\s*error_info=.*", "", line)
    what = _AWAY if kind in ("NETWORK_CONNECTION", "UNAVAILABLE", "DEADLINE_EXCEEDED") else _PASSING
    return (line if len(line) <= 240 else line[:237] + "..."), what


def _no_bucket(bucket: str) -> str:
    return f"there is no bucket {bucket!r}; make it first, or mend the URL"


def _has_credentials() -> bool:
    """Whether there are credentials where the client looks, the machine's role aside."""
    if any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        return True
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser().is_file()


def _tag(metadata: Any) -> str:
    """An object's ETag without its quotes; "" where it has none."""
    values = {_text(name).lower(): _text(value) for name, value in dict(metadata or {}).items()}
    return values.get("etag", "").strip('"')


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _connect(address: Address) -> pafs.FileSystem:
    """The filesystem of a URL. Nothing is sent, unless an S3 bucket's region has to be asked for."""
    endpoint = _endpoint(address)
    options: dict[str, Any] = {}
    if endpoint is not None:
        options["endpoint_override"] = endpoint.host
        if endpoint.scheme:
            options["scheme"] = endpoint.scheme
    elif "scheme" in address.options:
        options["scheme"] = address.options["scheme"]
    if address.scheme == "gs":
        if os.environ.get("STORAGE_EMULATOR_HOST") and endpoint is not None:
            options["anonymous"] = True
        return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=15), **options)
    return pafs.S3FileSystem(
        region=_region(address, endpoint),
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=STALL_TIMEOUT_S,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        background_writes=False,
        allow_delayed_open=True,
        **options,
    )


def _region(address: Address, endpoint: _Endpoint | None) -> str:
    named: Iterable[str | None] = (
        address.options.get("region"),
        os.environ.get("AWS_REGION"),
        os.environ.get("AWS_DEFAULT_REGION"),
        _region_of_profile(),
    )
    if region := next(filter(None, named), None):
        return region
    if endpoint is not None:
        return "us-east-1"  # what servers other than Amazon's mostly expect
    try:
        return pafs.resolve_s3_region(address.bucket)
    except (OSError, pa.ArrowException) as error:
        if "not found" in str(error).lower():
            raise ObjectStoreError(address.shown, _no_bucket(address.bucket)) from error
        reason, kind = _reason(str(error), address, "Amazon S3")
        raise ObjectStoreError(
            address.shown,
            f"its region can't be found out ({reason}); set AWS_REGION, or AWS_ENDPOINT_URL for another server",
            is_away=kind == _AWAY,
        ) from error


def _region_of_profile() -> str | None:
    """The region that the AWS configuration file gives the chosen profile."""
    file = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    profile = os.environ.get("AWS_PROFILE") or "default"
    config = configparser.ConfigParser(interpolation=None, strict=False)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        config.read_string(file.read_text())
    return config.get(profile if profile == "default" else f"profile {profile}", "region", fallback=None)
