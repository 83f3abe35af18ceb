"""Fixtures of several folders."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def _s3_server():
    from s3_server import S3Server  # takes a second to import, and few tests need it

    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def server(_s3_server) -> Iterator:
    """An S3 server, and the environment of its user."""
    from s3_server import aws_environment

    with aws_environment(_s3_server.url):
        yield _s3_server
    _s3_server.fault = None
