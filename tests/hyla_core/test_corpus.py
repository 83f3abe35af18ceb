"""Reading text from files of every kind."""

import gzip
import json
import os

import pandas as pd
import pytest

from hyla_core import corpus
from hyla_core.corpus import CorpusError, Reading, content_hash, documents_of, files_of

DOCUMENTS = ["One fish,\ntwo fish.", "Rød fisk, blå fisk."]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))


def test_all_kinds_of_files_give_the_same_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n  \n".join(DOCUMENTS) + "\n\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(DOCUMENTS))
    pd.DataFrame({"text": [DOCUMENTS[0], None, " \n", DOCUMENTS[1]], "id": range(4)}).to_parquet(tmp_path / "c.parquet")
    lines = [json.dumps({"text": document, "url": "x"}) for document in DOCUMENTS]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(tmp_path / "e.json.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    for name in ("a.txt", "b.txt.gz", "c.parquet", "d.jsonl", "e.json.gz"):
        assert list(documents_of(str(tmp_path / name), Reading())) == DOCUMENTS, name


def test_what_a_document_is_in_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n\nc\n")
    found = {unit: list(documents_of(str(tmp_path / "a.txt"), Reading(unit))) for unit in ("file", "line", "paragraph")}
    assert found == {"file": ["a\nb\n\nc"], "line": ["a", "b", "c"], "paragraph": ["a\nb", "c"]}


def test_folders_and_globs_are_taken_in_the_order_of_paths(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "README").write_text("no text of the corpus")
    assert list(documents_of(str(tmp_path), Reading())) == ["a.txt", "b.txt", "sub/c.txt"]
    assert list(documents_of(f"{tmp_path}/*.txt", Reading())) == ["a.txt", "b.txt"]
    assert list(documents_of(f"{tmp_path}/**/c.txt", Reading())) == ["sub/c.txt"]


def test_the_hash_is_of_the_content_and_not_of_names(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "a.txt").write_text("first")
    (tmp_path / "one" / "b.txt").write_text("second")
    (tmp_path / "two" / "x.txt").write_text("first")
    (tmp_path / "two" / "y.txt").write_text("second")
    before = content_hash(str(tmp_path / "one"))
    assert before == content_hash(str(tmp_path / "two"))
    (tmp_path / "two" / "y.txt").write_text("Second")
    assert content_hash(str(tmp_path / "two")) != before
    # Kept by size and time of change: with both as before, the file is not read again.
    file = tmp_path / "one" / "b.txt"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text("SECOND")
    os.utime(file, ns=times)
    assert content_hash(str(tmp_path / "one")) == before
    os.utime(file, ns=(times[0], times[1] + 1))
    assert content_hash(str(tmp_path / "one")) != before


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    expected = content_hash(str(tmp_path / "a.txt"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "file"))
    assert content_hash(str(tmp_path / "a.txt")) == expected


def test_the_builtin_corpus_is_prose_that_python_brings_along():
    documents = list(documents_of(corpus.BUILTIN, Reading()))
    assert sum(map(len, documents)) > 400_000
    assert any("statement" in document for document in documents)
    assert content_hash(corpus.BUILTIN) == content_hash(corpus.BUILTIN)


def test_the_same_bytes_are_another_text_where_they_are_read_in_another_way(tmp_path):
    line = json.dumps({"text": "x", "url": "y"})
    hashes = set()
    for name in ("a.txt", "b.jsonl", "C.TXT"):
        (tmp_path / name).write_text(line)
        hashes.add(content_hash(str(tmp_path / name)))
    assert len(hashes) == 2


def test_folders_are_followed_through_links_and_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "texts" / "A.TXT").write_text("\ufeffone")
    (tmp_path / "elsewhere" / "b.txt").write_text("two")
    (tmp_path / "texts" / "more").symlink_to(tmp_path / "elsewhere")
    assert list(documents_of(str(tmp_path / "texts"), Reading())) == ["one", "two"]
    (tmp_path / "texts" / "z.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"z\.txt: can't be read: No such file"):
        content_hash(str(tmp_path / "texts"))


@pytest.mark.parametrize("text", ["~nobody-of-this-name/x.txt", "/" + 300 * "a" + ".txt"])
def test_paths_that_the_system_refuses_are_one_line(text):
    with pytest.raises(CorpusError, match="can't be read"):
        files_of(text)


def test_a_damaged_kept_hash_is_not_believed(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    expected = content_hash(str(tmp_path / "a.txt"))
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    for damaged in (b"\xff\xfe" * 32, b"g" * 64, b""):
        kept.write_bytes(damaged)
        assert content_hash(str(tmp_path / "a.txt")) == expected


def bad_utf8(path):
    path.with_suffix(".txt").write_bytes(b"fine\n\xff\xfe")
    return path.with_suffix(".txt")


def no_parquet(path):
    path.with_suffix(".parquet").write_bytes(b"PAR1 not really")
    return path.with_suffix(".parquet")


def other_column(path):
    pd.DataFrame({"body": ["x"]}).to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def numbers(path):
    pd.DataFrame({"text": [1, 2]}).to_parquet(path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def bad_json(path):
    path.with_suffix(".jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    return path.with_suffix(".jsonl")


def cut_gzip(path):
    with gzip.open(path.with_suffix(".txt.gz"), "wt") as file:
        file.write("some text " * 1000)
    whole = path.with_suffix(".txt.gz").read_bytes()
    path.with_suffix(".txt.gz").write_bytes(whole[: len(whole) // 2])
    return path.with_suffix(".txt.gz")


def damaged_gzip(path):
    file = cut_gzip(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:20] + bytes(byte ^ 255 for byte in whole[20:30]) + whole[30:])
    return file


def deep_json(path):
    path.with_suffix(".jsonl").write_text("[" * 100_000)
    return path.with_suffix(".jsonl")


def lone_surrogate(path):
    path.with_suffix(".jsonl").write_text(json.dumps({"text": "\ud800"}))
    return path.with_suffix(".jsonl")


def no_gzip(path):
    path.with_suffix(".txt.gz").write_text("plain")
    return path.with_suffix(".txt.gz")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bad_utf8, "not UTF-8 text"),
        (no_parquet, "not a Parquet file"),
        (other_column, "has no column 'text'; choose one of ['body']"),
        (numbers, "column 'text' holds int, not text"),
        (bad_json, ":2: not one JSON object a line with a text 'text'"),
        (cut_gzip, "can't be read"),
        (no_gzip, "can't be read"),
        (damaged_gzip, "can't be read"),
        (deep_json, ":1: not one JSON object"),
        (lone_surrogate, ":1: not one JSON object"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path, make, message):
    file = make(tmp_path / "corpus")
    with pytest.raises(CorpusError) as error:
        list(documents_of(str(file), Reading()))
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_text_and_other_files_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="no text there; it must be a file, folder or glob"):
        files_of(str(tmp_path / "*.txt"))
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(CorpusError, match=r"a\.docx: not a text that can be read"):
        files_of(str(tmp_path / "a.docx"))
