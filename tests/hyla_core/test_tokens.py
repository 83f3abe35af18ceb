"""Tokenizer, token arrays and their cache."""

import json
import multiprocessing

import numpy as np
import pytest
import tokenizers

from hyla_core import tokens
from hyla_core.config import LanguageConfig
from hyla_core.corpus import content_hash

TEXT = ["the cat sat on the mat", "the dog sat on the log", "æ ∀ 猫", "the end"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    return tmp_path


def config(folder, **fields) -> LanguageConfig:
    text = str(folder / "text.txt")
    fields = {"documents": "line", "vocab_size": 280, "seq_len": 8} | fields
    return LanguageConfig(name="language", text=text, text_sha256=content_hash(text), **fields)


def decoded(found: tokens.Tokens) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(found.tokenizer))
    pieces = [found.ids[start:end] for start, end in zip(found.bounds[:-1], found.bounds[1:], strict=True)]
    assert all(piece[-1] == tokens.END for piece in pieces)
    return [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]


def test_tokens_are_the_documents_again(folder):
    found = tokens.load(config(folder))
    assert decoded(found) == TEXT
    assert found.ids.dtype == np.uint16
    assert found.bounds[0] == 0
    assert found.bounds[-1] == len(found.ids)
    assert found.ids.max() < 280
    # "the " and "sat on" are frequent enough for merges: a byte each would be 76 tokens and 4 ends.
    assert len(found.ids) < sum(len(document.encode()) for document in TEXT) + len(TEXT)


def test_making_them_anew_gives_the_same_bytes(folder, monkeypatch):
    first = tokens.load(config(folder))
    monkeypatch.setenv("HYLA_CACHE", str(folder / "other"))
    second = tokens.load(config(folder))
    assert first.tokenizer != second.tokenizer
    assert first.tokenizer.read_bytes() == second.tokenizer.read_bytes()
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.bounds, second.bounds)


def test_the_key_holds_what_matters_and_nothing_else(folder, monkeypatch):
    made = []
    original = tokens._made
    monkeypatch.setattr(tokens, "_made", lambda *args: made.append(original(*args)) or made[-1])

    def folders(**fields) -> tuple:
        made.clear()
        tokens.load(config(folder, **fields))
        return tuple(made)

    first = folders()
    assert folders(seq_len=4, sequences="per_document", valid_fraction=0.5) == first
    for fields in ({"vocab_size": 270}, {"documents": "file"}):
        assert not set(folders(**fields)) & set(first), fields
    monkeypatch.setattr(tokenizers, "__version__", "0.0.1")
    assert folders()[0] != first[0]
    monkeypatch.undo()
    (folder / "text.txt").write_text("other text")
    monkeypatch.setenv("HYLA_CACHE", str(folder / "cache"))
    assert decoded(tokens.load(config(folder))) == ["other text"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no_manifest", "bad_manifest"])
def test_a_damaged_cache_is_made_anew(folder, damage):
    expected = np.array(tokens.load(config(folder)).ids)
    ids = next((folder / "cache").rglob("ids"))
    whole = ids.read_bytes()
    manifest = ids.with_name("manifest.json")
    match damage:
        case "truncate":
            ids.write_bytes(whole[:-2])
        case "flip":
            ids.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        case "delete":
            ids.unlink()
        case "no_manifest":
            manifest.unlink()
        case "bad_manifest":
            manifest.write_text(manifest.read_text()[:10])
    np.testing.assert_array_equal(tokens.load(config(folder)).ids, expected)
    assert ids.read_bytes() == whole
    assert json.loads(manifest.read_text())["files"]["ids"]["bytes"] == len(whole)
    assert not [path for path in ids.parent.parent.iterdir() if path.name.count(".") and path.suffix != ".lock"]


def load_and_sum(text: str, queue) -> None:
    found = tokens.load(
        LanguageConfig(name="language", text=text, text_sha256=content_hash(text), documents="line", vocab_size=280)
    )
    queue.put(int(np.sum(found.ids)))


def test_processes_that_want_the_same_at_once_all_get_it(folder):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=load_and_sum, args=(str(folder / "text.txt"), queue)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sums == {int(np.sum(tokens.load(config(folder)).ids))}


def test_a_text_that_changed_since_is_refused(folder):
    before = config(folder)
    (folder / "text.txt").write_text("something else")
    with pytest.raises(ValueError, match=r"text\.txt: the text has changed"):
        tokens.load(before)


def test_a_text_for_validation_has_the_tokenizer_of_the_training_text(folder):
    (folder / "valid.txt").write_text("the mat")
    valid = str(folder / "valid.txt")
    both = config(folder, valid_text=valid, valid_sha256=content_hash(valid))
    assert decoded(tokens.load(both, "valid")) == ["the mat"]
    assert tokens.load(both, "valid").tokenizer == tokens.load(both).tokenizer
    with pytest.raises(ValueError, match=r"task\.valid_text is not set"):
        tokens.load(config(folder), "valid")
