"""A real S3 server on this machine's loopback for tests, which counts requests and can be told to fail."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs as pafs
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

BUCKET = "bkt"

Answer = tuple[str, bytes]


class S3Server:
    """moto's S3 server behind a look at every request.

    Attributes:
      url: its endpoint.
      requests: `METHOD /path?query` of all requests since they were cleared.
      fault: for a request's line and headers, what to answer instead; None to leave it alone.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.requests: list[str] = []
        self.fault: Callable[[str, dict[str, Any]], Answer | None] | None = None
        self._answer = self._server._server.app
        self._server._server.app = self
        with aws_environment(self.url):
            self.client = pafs.S3FileSystem(endpoint_override=self.url, region="us-east-1", allow_bucket_creation=True)
            self.client.create_dir(BUCKET)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}".removesuffix("?")
        self.requests.append(line)
        if self.fault is not None and (answer := self.fault(line, environ)) is not None:
            if length := int(environ.get("CONTENT_LENGTH") or 0):
                environ["wsgi.input"].read(length)
            status, body = answer
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        return self._answer(environ, start_response)

    def objects(self, prefix: str = "") -> list[str]:
        """Keys of a part of the bucket, empty objects that stand for folders left out."""
        infos = self.client.get_file_info(pafs.FileSelector(f"{BUCKET}/{prefix}", allow_not_found=True, recursive=True))
        return sorted(info.path.removeprefix(f"{BUCKET}/") for info in infos if info.type == pafs.FileType.File)

    def fill(self, keys: Iterable[str], data: bytes = b"") -> None:
        """Puts many objects there at once, past the network."""
        for key in keys:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(BUCKET, key, data)

    def methods(self) -> Counter[str]:
        """How many requests there were of each method."""
        return Counter(line.split()[0] for line in self.requests)

    def stop(self) -> None:
        """Ends it."""
        self._server.stop()


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
"""What a process needs to speak to the server, beside its address."""

UNSET = ("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE")


@contextmanager
def aws_environment(url: str) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a user of this server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": url}.items():
            patch.setenv(name, value)
        for name in (*UNSET, "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
            patch.delenv(name, raising=False)
        yield patch


def answer(status: str, code: str, match: str) -> Callable[[str, dict[str, Any]], Answer | None]:
    """A fault: S3's error to every request whose line matches."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return lambda line, environ: (status, body) if re.search(match, line) else None
