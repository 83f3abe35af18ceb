"""Stores in a bucket: the same contract as in a folder, against a real S3 server on this machine's loopback."""

import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server, answer

from sweeps.store import Store, StoreError, compact, equal_tables, object_place, repair
from sweeps.store.object_place import ObjectPlace
from sweeps.store.places import LocalPlace, Place, find_place

_numbers = count()


@pytest.fixture
def url(server: S3Server) -> str:
    """Of a store of this test's own."""
    return f"s3://{BUCKET}/runs/{next(_numbers)}"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is near: what waits for a slow network need not."""
    monkeypatch.setattr(object_place, "MIN_CLAIM_WAIT_S", 0.01)
    monkeypatch.setattr(object_place, "AWAY_FOR_S", 0.2)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    place = find_place(tmp_path / "store" if request.param == "local" else request.getfixturevalue("url"))
    place.make()
    return place


def in_bucket(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/")


# --------------------------------------------------------------------------------------------- the contract of a place


def test_what_is_written_is_read(place: Place) -> None:
    place.write("trials/a-1.parquet", b"one")
    assert place.read("trials/a-1.parquet") == b"one"
    place.write("trials/a-1.parquet", b"longer than one", durable=False)
    assert place.read("trials/a-1.parquet") == b"longer than one"
    place.write("trials/b-1.parquet", b"")
    assert place.read("trials/b-1.parquet") == b""
    with pytest.raises(FileNotFoundError):
        place.read("trials/c-1.parquet")


def test_finished_files_are_listed_by_name(place: Place) -> None:
    assert place.entries("trials", ".parquet") == []
    for name in ("b-1.parquet", "a-2.parquet", ".a-1.parquet.ab.tmp", "_x.parquet", "note.txt"):
        place.write(f"trials/{name}", b"12345")
    place.write("checkpoints/t/7.ckpt", b"state")
    now = time.time()
    entries = place.entries("trials", ".parquet")
    assert [entry.name for entry in entries] == ["a-2.parquet", "b-1.parquet"]
    assert all(entry.version[0] == 5 and abs(entry.modified - now) < 60 for entry in entries)
    assert len(place.entries("trials")) == 3
    assert sorted(place.names("trials", ".a")) == [".a-1.parquet.ab.tmp"]
    assert place.names("checkpoints") == ["t"]
    assert place.names("checkpoints/t") == ["7.ckpt"]
    assert place.names("checkpoints/u") == []


def test_an_existing_file_is_not_created_again(place: Place) -> None:
    assert not place.exists("claims/a-1.json")
    assert place.create("claims/a-1.json", b"mine")
    assert not place.create("claims/a-1.json", b"mine")
    assert place.exists("claims/a-1.json")
    assert place.read("claims/a-1.json") == b"mine"
    place.remove("claims/a-1.json")
    assert place.create("claims/a-1.json", b"theirs")


def test_names_follow_what_this_process_does(place: Place) -> None:
    assert place.names("claims") == []
    place.create("claims/a-1.json", b"{}")
    place.write("claims/b-1.json", b"{}")
    assert sorted(place.names("claims")) == ["a-1.json", "b-1.json"]
    place.move("claims/a-1.json", "claims/c-1.json")
    place.remove("claims/b-1.json")
    assert place.names("claims") == ["c-1.json"]
    assert place.read("claims/c-1.json") == b"{}"


def test_removing_takes_files_and_folders_and_minds_nothing_absent(place: Place) -> None:
    place.write("checkpoints/t/1.ckpt", b"x")
    place.write("checkpoints/t/2.ckpt", b"x")
    place.write("checkpoints/tt/1.ckpt", b"x")
    place.remove("checkpoints/t/1.ckpt")
    assert place.names("checkpoints/t") == ["2.ckpt"]
    assert place.is_folder("checkpoints/t")
    assert not place.is_folder("checkpoints/t/2.ckpt")
    place.remove("checkpoints/t")
    place.remove("checkpoints/t")
    place.remove("claims/none.json")
    assert not place.is_folder("checkpoints/t")
    assert place.names("checkpoints") == ["tt"]


def test_a_touched_file_is_younger_and_the_same(place: Place) -> None:
    place.write("claims/a-1.json", b"12")
    before = place.modified("claims/a-1.json")
    time.sleep(1.1 if place.is_remote else 0.02)  # times of change have whole seconds there
    place.touch("claims/a-1.json")
    assert place.modified("claims/a-1.json") > before
    assert place.read("claims/a-1.json") == b"12"
    for missing in (place.modified, place.read, place.touch):
        with pytest.raises(FileNotFoundError):
            missing("claims/none.json")


def test_a_folder_comes_back_whole(place: Place, tmp_path: Path) -> None:
    def write(contents: dict[str, bytes]):
        def fill(folder: Path) -> None:
            for name, data in contents.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)

        return fill

    path = "checkpoints/t/5.ckpt"
    place.write_folder(path, write({"state/d/0": b"old", "state/gone": b"x", "manifest.json": b"{}"}))
    contents = {"state/d/0": b"abc", "state/empty": b"", "manifest.json": b"[]"}
    place.write_folder(path, write(contents))
    assert place.is_folder(path)
    folder = place.local_folder(path)
    found = {item.relative_to(folder).as_posix(): item for item in folder.rglob("*") if item.is_file()}
    assert {name: item.read_bytes() for name, item in found.items()} == contents

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        place.write_folder("checkpoints/t/6.ckpt", fail)
    assert place.names("checkpoints/t") == ["5.ckpt"]


def test_a_place_knows_whether_it_holds_a_store(place: Place) -> None:
    place.check_writable()
    assert place.names("claims") == []
    place.write("trials/a-1.parquet", b"x")
    assert place.is_store() is None


def test_the_tables_of_a_trials_life_are_the_same_everywhere(tmp_path: Path, url: str, server: S3Server) -> None:
    stores = [Store.create(where) for where in (tmp_path / "store", url)]
    for store in stores:
        first = store.begin("t1", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {"num_params": 3})
        assert first is not None
        first.add([(step, "train", "loss", 1 / step) for step in range(1, 7)])
        first.heartbeat(step=6, num_steps=10, loss=0.5)
        assert first.flush()
        store.save_checkpoint("t1", 5, b"five")
        assert [(claim.trial_id, claim.alive, claim.begun) for claim in store.claims()] == [("t1", True, True)]
        assert store.begin("t1", {"model.emb_dim": 8}, {"run_id": "q"}, 0, 10, {}) is None  # claimed
        assert store.statuses()["t1"].status == "running"
        first.seal("interrupted")
        assert store.statuses()["t1"].status == "interrupted"
        (checkpoint,) = store.load_checkpoints("t1")
        assert checkpoint == (5, b"five")
        second = store.begin("t1", {"model.emb_dim": 8}, {"run_id": "r"}, 5, 10, {"num_params": 3})
        assert second is not None
        assert second.attempt == 2
        second.add([(step, "train", "loss", 2 / step) for step in range(6, 11)])
        second.seal("finished")
        store.clear_checkpoints("t1")
        assert list(store.load_checkpoints("t1")) == []
        assert store.claims() == []
    local, remote = stores
    assert equal_tables(local, Store.open(url)) == []
    assert Store.open(url).finished() == {"t1": "finished"}
    # By hand: steps 1 to 5 of the first attempt, 6 to 10 of the second.
    assert remote.metrics()["value"].tolist() == [1 / s for s in range(1, 6)] + [2 / s for s in range(6, 11)]
    assert server.objects(in_bucket(url)) == [
        f"{in_bucket(url)}/{table}/t1-{attempt}.parquet" for table in ("metrics", "trials") for attempt in (1, 2)
    ]
    with pytest.raises(StoreError, match="not a folder of this machine"):
        remote.path  # noqa: B018


# ------------------------------------------------------------------------------------------------------ whole or not


BIG = 25 * 2**20  # pyarrow sends it in three parts


def test_a_small_object_is_one_request(server: S3Server, url: str) -> None:
    place = find_place(url)
    server.requests.clear()
    place.write("trials/a-1.parquet", bytes(object_place.SINGLE_UPLOAD_BYTES))
    assert server.methods() == {"PUT": 1}


def test_a_large_object_whose_part_fails_never_appears(server: S3Server, url: str) -> None:
    place = find_place(url)
    place.write("checkpoints/t/1.ckpt", bytes(BIG))
    assert place.read("checkpoints/t/1.ckpt") == bytes(BIG)
    assert place.names("checkpoints/t") == ["1.ckpt"]
    server.fault = answer("403 Forbidden", "AccessDenied", "partNumber=2")
    for _ in range(2):
        with pytest.raises(StoreError, match="access denied"):
            place.write("checkpoints/t/2.ckpt", b"x" * BIG)
    with pytest.raises(StoreError, match="access denied"):
        place.write("checkpoints/t/1.ckpt", b"x" * BIG)  # the old one stays
    server.fault = None
    gc.collect()  # what a traceback keeps alive may still write when it goes
    assert place.names("checkpoints/t") == ["1.ckpt"]
    assert place.read("checkpoints/t/1.ckpt") == bytes(BIG)


def test_a_write_that_failed_does_not_come_back(server: S3Server, url: str) -> None:
    place = find_place(url)
    server.fault = answer("403 Forbidden", "AccessDenied", "PUT")
    with pytest.raises(StoreError) as failure:
        place.write("trials/a-1.parquet", b"old")
    server.fault = None
    place.write("trials/a-1.parquet", b"new")
    del failure
    gc.collect()
    assert place.read("trials/a-1.parquet") == b"new"


_WRITE_FOR_EVER = """
import sys
from sweeps.store.places import find_place
place = find_place(sys.argv[1])
print("ready", flush=True)
while True:
    place.write("checkpoints/t/1.ckpt", b"x" * int(sys.argv[2]))
"""


def test_a_writer_that_is_killed_in_mid_upload_leaves_nothing(server: S3Server, url: str) -> None:
    # Its second part is let through only once the writer is dead.
    arrived, dead = threading.Event(), threading.Event()

    def hold(line: str, environ: object) -> None:
        if "partNumber=2" in line:
            arrived.set()
            dead.wait(30)

    server.fault = hold
    writer = subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, url, str(BIG)], stdout=subprocess.PIPE)
    try:
        assert arrived.wait(60)
    finally:
        writer.kill()
        writer.communicate()
        dead.set()
    time.sleep(0.3)
    assert server.objects(in_bucket(url)) == []
    assert Store(url).place.names("checkpoints/t") == []


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(server: S3Server, url: str) -> None:
    place, other = find_place(url), find_place(url)
    place.write("trials/a-1.parquet", b"old")
    other.exists("trials/a-1.parquet")  # pyarrow makes no connection while a request is in flight
    replaced = []

    def replace(line: str, environ: object) -> None:
        if line.startswith("GET") and not replaced:
            replaced.append(line)
            other.write("trials/a-1.parquet", b"new and longer")

    server.fault = replace
    assert place.read("trials/a-1.parquet") == b"new and longer"
    assert replaced


# ------------------------------------------------------------------------------------------------------------- claims

_CLAIM = """
import sys, time
from sweeps.store import object_place
from sweeps.store.places import find_place
place = find_place(sys.argv[1])
place.exists("claims/warm.json")
print("ready", flush=True)
sys.stdin.readline()
print(sum(place.create(f"claims/{n}-1.json", b"same") and 1 << n for n in range(5)), flush=True)
"""


def test_of_two_processes_one_gets_a_claim(url: str) -> None:
    rivals = [
        subprocess.Popen([sys.executable, "-c", _CLAIM, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for rival in rivals:
            assert rival.stdout is not None
            assert rival.stdout.readline() == "ready\n"
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write("go\n")
            rival.stdin.flush()
        taken = [int(rival.communicate(timeout=60)[0]) for rival in rivals]
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert taken[0] & taken[1] == 0
    assert taken[0] | taken[1] == 0b11111


def test_a_claim_that_a_rival_overwrote_is_not_ours(url: str, server: S3Server) -> None:
    place, rival = find_place(url), find_place(url)
    rival.exists("claims/a-1.json")  # pyarrow makes no connection while a request is in flight
    pausing = threading.Event()

    def overwrite(line: str, environ: object) -> None:
        # The rival has looked before our claim was there, and writes after it.
        if line.startswith("HEAD") and pausing.is_set():
            pausing.clear()
            rival.write("claims/a-1.json", b"same")
        elif line.startswith("PUT"):
            pausing.set()

    server.fault = overwrite
    assert not place.create("claims/a-1.json", b"same")


def test_a_part_that_appeared_since_the_last_listing_is_never_replaced(url: str) -> None:
    here, there = Store.create(url), Store(url)
    assert here.place.names("trials") == here.place.names("claims") == here.place.names("metrics") == []
    other = there.begin("t1", {"model.emb_dim": 8}, {"run_id": "there"}, 0, 10, {})
    assert other is not None
    other.seal("finished")
    mine = here.begin("t1", {"model.emb_dim": 8}, {"run_id": "here"}, 0, 10, {})
    assert mine is not None
    assert mine.attempt == 2
    assert mine.flush()
    assert there.trials(raw=True)["run_id"].tolist() == ["there", "here"]


# ------------------------------------------------------------------------------------------------------ few requests


def test_an_attempt_takes_few_requests_in_a_large_store(url: str, server: S3Server) -> None:
    store = Store.create(url)
    for table in ("trials", "metrics"):  # two pages of a listing each
        server.fill(f"{in_bucket(url)}/{table}/x{number}-1.parquet" for number in range(1200))
    server.requests.clear()
    writers = [store.begin(name, {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {}) for name in ("t1", "t2", "t3", "t4")]
    listings = [line for line in server.requests if line.startswith(f"GET /{BUCKET}?")]
    assert len(listings) <= 2 + 2 + 1  # once for all four: trials and metrics of two pages, claims of one
    # The claim: looked at, written, looked at again. Is there a part? The claim once more, to say that there was none.
    assert len(server.requests) - len(listings) == 4 * (3 + 1 + 1), server.requests

    server.requests.clear()
    writer = writers[0]
    assert writer is not None
    writer.add([(1, "train", "loss", 0.5)])
    writer.seal("finished")
    # Metrics, the row, and the claim: looked at, removed, its folder kept.
    assert server.methods() == {"PUT": 3, "HEAD": 1, "DELETE": 1}


def test_what_did_not_change_is_not_read_again(url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(url)
    for name in ("t1", "t2"):
        writer = store.begin(name, {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
        assert writer is not None
        writer.seal("finished")
    assert len(store.finished()) == 2
    # A part that may still be replaced within the clock's resolution is read again, an old one is not.
    for settles_after_s, num_reads in ((60.0, 2), (-60.0, 2), (-60.0, 0)):
        monkeypatch.setattr(ObjectPlace, "settles_after_s", settles_after_s)
        server.requests.clear()
        assert len(store.finished()) == 2
        assert sum(".parquet" in line for line in server.requests if line.startswith("GET")) == num_reads


# ------------------------------------------------------------------------------------------------------------- errors


def one_line_error(do) -> str:
    with pytest.raises(StoreError) as caught:
        do()
    assert "\n" not in str(caught.value)
    assert "test-secret" not in str(caught.value)
    return str(caught.value)


BAD_URLS = {
    "s3://key:hunter2@bucket/x": ("s3://…@bucket/x: a URL with credentials", "AWS_ACCESS_KEY_ID"),
    "gs://key:hunter2@bucket/x": ("gs://…@bucket/x: a URL with credentials", "GOOGLE_APPLICATION_CREDENTIALS"),
    "s3://bucket/x?secret_key=hunter2": ("s3://bucket/x: secret_key in a URL", "AWS_SECRET_ACCESS_KEY"),
    "s3://bucket/x?endpoint_override=http://me:hunter2@host": ("s3://bucket/x: the endpoint in", "credentials"),
    "s3://bucket/x?colour=red": ("s3://bucket/x: ?colour= is unknown", "endpoint_override, region, scheme"),
    "gs://bucket/x?region=eu": ("gs://bucket/x: ?region= is unknown", "endpoint_override, scheme"),
    "s3://bucket/x?region=": ("s3://bucket/x: ?region= needs a value", "region"),
    "s3://bucket/x?scheme=ftp": ("s3://bucket/x: ?scheme=ftp", "http or https"),
    "s3://bucket/x?endpoint_override=ftp://host": ("s3://bucket/x?", "https://HOST:PORT"),
    "file:///tmp/results": ("file:///tmp/results: a store can't be at file://", "s3://BUCKET/PREFIX"),
    "https://host/results": ("https://host/results: a store can't be at https://", "gs://BUCKET/PREFIX"),
    "s3:///x": ("s3:///x: '' is not the name of a bucket", "s3://BUCKET/PREFIX"),
    "s3:/bucket/x": ("s3:///bucket/x: '' is not the name of a bucket", "s3://BUCKET/PREFIX"),
    "s3://bucket:9000/x": ("s3://bucket:9000/x: 'bucket:9000' is not the name", "s3://BUCKET/PREFIX"),
    "s3://bucket/a//b": ("s3://bucket/a//b: every folder needs a name", "s3://BUCKET/PREFIX"),
    "s3://bucket/../b": ("s3://bucket/../b: every folder needs a name", "s3://BUCKET/PREFIX"),
    "s3://bucket/a#b": ("s3://bucket/a: a store's URL has no part that begins with #", "s3://BUCKET/PREFIX"),
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_refused_in_one_line(url: str) -> None:
    start, allowed = BAD_URLS[url]
    text = one_line_error(lambda: Store(url))
    assert text.startswith(start)
    assert allowed in text
    assert "hunter2" not in text


def test_a_url_is_shown_as_it_was_given(server: S3Server) -> None:
    with_options = f"s3://{BUCKET}/a/b/?region=eu-west-1&endpoint_override={server.url}"
    place = find_place(with_options)
    assert place.shown == f"s3://{BUCKET}/a/b?region=eu-west-1&endpoint_override={server.url}"
    assert place.shown_path("trials/x") == f"s3://{BUCKET}/a/b/trials/x"
    os.environ["AWS_ENDPOINT_URL_S3"] = "http://127.0.0.1:9"
    place.write("trials/x", b"1")  # the URL's endpoint, not the environment's
    assert find_place(place.shown).read("trials/x") == pickle.loads(pickle.dumps(place)).read("trials/x") == b"1"
    assert find_place(f"s3://{BUCKET}").shown_path("trials/x") == f"s3://{BUCKET}/trials/x"


@pytest.mark.parametrize("url", [f"s3://{BUCKET}", f"s3://{BUCKET}/"], ids=["without a slash", "with one"])
def test_a_whole_bucket_can_be_a_store(url: str, server: S3Server) -> None:
    store = Store.create(url)
    store.place.write("sweeps/x.parquet", b"")
    assert Store.open(url).place.names("sweeps") == ["x.parquet"]
    store.place.remove("sweeps/x.parquet")


def test_nothing_of_the_environment_is_written(url: str, server: S3Server) -> None:
    writer = Store.create(url).begin("t1", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
    assert writer is not None
    writer.flush()
    for path in server.objects(in_bucket(url)):
        data = server.client.open_input_file(f"{BUCKET}/{path}").read()
        assert not any(secret in data for secret in (b"test-secret", b"test-key-id", server.url.encode()))


def test_a_missing_store_or_bucket_is_named(server: S3Server, url: str) -> None:
    assert one_line_error(lambda: Store.open(url)) == f"{url}: nothing is there; give the folder of a results store"
    find_place(url).write("notes/x.txt", b"x")
    assert "not a results store (it has no trials/)" in one_line_error(lambda: Store.open(url))
    nowhere = "s3://no-such-bucket/x"
    for do in (
        lambda: Store.create(nowhere),
        lambda: Store.open(nowhere),
        lambda: Store(nowhere).finished(),
        lambda: Store(nowhere).place.write("trials/x", b"1"),
        lambda: Store(nowhere).check_writable(),
    ):
        text = one_line_error(do)
        assert text.startswith(nowhere)
        assert "there is no bucket 'no-such-bucket'; make it first, or mend the URL" in text


def test_missing_credentials_are_named(server: S3Server, url: str) -> None:
    def closed(line: str, environ: dict) -> tuple[str, bytes] | None:
        if "HTTP_AUTHORIZATION" in environ:
            return None
        return "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

    server.fault = closed
    Store.create(url).check_writable()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del os.environ[name]
    for do in (lambda: Store.create(url), lambda: Store.open(url), lambda: Store(url).check_writable()):
        text = one_line_error(do)
        assert text.startswith(url)
        assert "access denied: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text


def test_denied_access_is_named_and_no_part_is_called_damaged(server: S3Server, url: str) -> None:
    store = Store.create(url)
    store.place.write("trials/a-1.parquet", b"x")
    server.fault = answer("403 Forbidden", "AccessDenied", "HEAD|GET .*parquet")
    text = one_line_error(store.finished)
    assert text.startswith(
        f"{url}/trials/a-1.parquet: access denied; the credentials of the environment must be allowed"
    )
    server.fault = answer("403 Forbidden", "AccessDenied", "PUT")
    assert one_line_error(store.check_writable).startswith(f"{url}: the results store can't be written: access denied")


def test_a_region_that_nobody_names_is_asked_for(server: S3Server, monkeypatch, tmp_path: Path) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
    asked = []

    def resolve(bucket: str) -> str:
        asked.append(bucket)
        raise OSError(
            "When resolving region for bucket 'bkt': AWS Error NETWORK_CONNECTION during HeadBucket operation: "
            "curlCode: 6, Could not resolve hostname; Details: Could not resolve host: x"
        )

    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", resolve)
    text = one_line_error(lambda: Store.create(f"s3://{BUCKET}/x"))
    assert text.startswith(f"s3://{BUCKET}/x: ")
    assert "its region can't be found out (Amazon S3 can't be reached: Could not resolve hostname)" in text
    assert "set AWS_REGION" in text
    assert asked == [BUCKET]
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-north-1\n[default]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for profile, region in ((None, "eu-west-3"), ("lab", "eu-north-1")):
        if profile:
            monkeypatch.setenv("AWS_PROFILE", profile)
        assert find_place(f"s3://{BUCKET}/x")._filesystem.region == region
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert find_place(f"s3://{BUCKET}/x")._filesystem.region == "us-west-2"
    assert find_place(f"s3://{BUCKET}/x?region=ap-east-1")._filesystem.region == "ap-east-1"
    assert asked == [BUCKET]


def test_a_refused_connection_is_one_line_and_then_costs_nothing(server: S3Server, url: str, monkeypatch) -> None:
    monkeypatch.setattr(object_place, "AWAY_FOR_S", 60.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    place = find_place(url)
    text = one_line_error(lambda: place.write("trials/x", b"1"))
    assert text == f"{url}/trials/x: {address} can't be reached: Could not connect to server"
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(OSError, match="can't be reached"):
            place.write("trials/x", b"1")
    assert time.monotonic() - start < 0.2


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_an_endpoint_that_hangs_is_one_line(server: S3Server, url: str, silent: str, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", silent)
    monkeypatch.setattr(object_place, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(object_place, "MAX_ATTEMPTS", 1)
    assert one_line_error(lambda: Store.open(url)) == f"{url}: can't be read: no answer from {silent}"


@pytest.mark.slow
def test_an_endpoint_that_hangs_costs_half_a_minute(server: S3Server, url: str, silent: str, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", silent)
    start = time.monotonic()
    assert one_line_error(lambda: find_place(url).write("trials/x", b"1")).endswith(f"no answer from {silent}")
    assert time.monotonic() - start < 45


def test_rows_are_held_back_and_a_finished_training_is_written_later(server: S3Server, url: str, monkeypatch) -> None:
    monkeypatch.setattr(object_place, "MAX_ATTEMPTS", 1)
    store = Store.create(url)
    writer = store.begin("t1", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
    assert writer is not None
    server.fault = answer("500 Internal Server Error", "InternalError", "PUT")
    writer.add([(1, "train", "loss", 0.5)])
    assert not writer.flush()
    assert writer.held_back is not None
    assert "InternalError" in writer.held_back
    threading.Timer(0.5, lambda: setattr(server, "fault", None)).start()
    writer.seal("finished")
    assert store.finished() == {"t1": "finished"}
    assert store.metrics()["value"].tolist() == [0.5]


def test_a_training_whose_end_can_not_be_written_is_given_up(server: S3Server, url: str, monkeypatch) -> None:
    monkeypatch.setattr(object_place, "AWAY_FOR_S", 1.0)
    monkeypatch.setattr(object_place, "GIVE_UP_AFTER_S", 0.3)
    monkeypatch.setattr(object_place, "MAX_ATTEMPTS", 1)
    writer = Store.create(url).begin("t1", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
    assert writer is not None
    server.fault = answer("403 Forbidden", "AccessDenied", "PUT")
    start = time.monotonic()
    assert "access denied" in one_line_error(lambda: writer.seal("finished"))
    assert time.monotonic() - start < 0.3 < object_place.AWAY_FOR_S / 2  # that does not mend itself
    monkeypatch.setattr(object_place, "AWAY_FOR_S", 0.2)
    server.fault = answer("500 Internal Server Error", "InternalError", "PUT")
    text = one_line_error(lambda: writer.seal("finished"))
    assert text.startswith(f"{url}: the results of trial t1 can't be written: ")
    server.fault = None
    writer.seal("finished")


def test_an_older_checkpoint_is_not_taken_because_the_newest_could_not_be_read(server: S3Server, url: str) -> None:
    store = Store.create(url)
    store.save_checkpoint("t1", 1, b"one")
    store.save_checkpoint("t1", 2, b"two")
    server.fault = answer("403 Forbidden", "AccessDenied", "(HEAD|GET) .*/2.ckpt")
    with pytest.raises(StoreError):
        list(store.load_checkpoints("t1"))


# ---------------------------------------------------------------------------------------------------------------- gs


def test_at_gs_an_endpoint_that_hangs_is_one_line(silent: str, monkeypatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", silent.removeprefix("http://"))
    monkeypatch.setattr(object_place, "DEADLINE_S", 0.25)
    place = find_place("gs://bucket/x")
    start = time.monotonic()
    assert one_line_error(lambda: place.write("trials/a", b"1")) == (
        f"gs://bucket/x/trials/a: no answer from {silent} in 0.25 s"
    )
    assert time.monotonic() - start < 10
    time.sleep(max(0.0, place._away_until - time.monotonic()))
    # The first write may still arrive: the second waits for it, and is not sent before.
    assert "no answer" in one_line_error(lambda: place.write("trials/a", b"2"))
    assert sum(thread.name == "hyla-store-request" for thread in threading.enumerate()) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of Could not create a "
            "OAuth2 access token to authenticate the request. The request was not sent",
            "no valid credentials; set GOOGLE_APPLICATION_CREDENTIALS",
        ),
        (
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork() - CURL "
            "error [7]=Could not connect to server error_info={reason=, domain=, metadata={}})",
            "Google Cloud Storage can't be reached: Could not connect to server",
        ),
        ("google::cloud::Status(PERMISSION_DENIED: nobody may)", "access denied; the credentials"),
        ("google::cloud::Status(NOT_FOUND: The specified bucket does not exist.)", "there is no bucket 'bucket'"),
    ],
)
def test_what_goes_wrong_at_gs_is_one_line(text: str, reason: str, server: S3Server) -> None:
    assert str(find_place("gs://bucket/x")._describe("a", OSError(text))).startswith(f"gs://bucket/x/a: {reason}")


def test_a_path_is_a_folder(tmp_path: Path) -> None:
    assert isinstance(find_place(tmp_path), LocalPlace)
    assert isinstance(find_place("results"), LocalPlace)


def test_a_store_in_a_bucket_is_compacted_and_repaired(url: str, server: S3Server) -> None:
    store = Store.create(url)
    for number in range(4):
        writer = store.begin(f"t{number}", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
        assert writer is not None
        writer.add([(step, "train", "loss", number + step / 8) for step in (1, 2)])
        writer.seal("finished")
    before = [store.trials(raw=True).to_csv(), store.metrics(raw=True).to_csv()]
    compact(store, grace_s=0)
    compact(store, grace_s=0)  # deletes what the first one replaced
    assert [path for path in server.objects(in_bucket(url)) if "/t0-" in path] == []
    again = Store.open(url)
    assert [again.trials(raw=True).to_csv(), again.metrics(raw=True).to_csv()] == before
    mine = again.begin("t0", {"model.emb_dim": 8}, {"run_id": "r"}, 0, 10, {})
    assert mine is not None
    assert mine.attempt == 2
    mine.seal("failed", "no luck")
    again.place.write("trials/t9-1.parquet", b"cut short")
    assert any("t9" in item.what for item in repair(again))
    assert f"{in_bucket(url)}/damaged/trials/t9-1.parquet" in server.objects(in_bucket(url))
    assert "t9-1.parquet" not in again.place.names("trials")
    assert Store.open(url).damaged == []
