"""Documents as token ids: a byte-level BPE tokenizer, trained on the corpus, and its output as arrays on disk.

Both are made once and kept in the cache folder under a key of all that they depend on; arrays are mapped, not loaded,
so a corpus may be larger than memory. Token 0 fills up sequences and stands before their first token, token 1 ends
each document. Imports neither jax nor, before there is something to make, tokenizers.

Reference: Sennrich et al., arXiv 1508.07909 (BPE); Radford et al., 2019 (its byte-level form).
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyla_core.config import LanguageConfig
from hyla_core.corpus import Reading, cache_folder, content_hash, documents_of
from hyla_core.durable import sha256_of, sync

PAD, END = 0, 1
SPECIAL_TOKENS = ("<pad>", "<end>")
TRAIN_CHARACTERS = 2**29
"""How much of a corpus the tokenizer is trained on, from its beginning: more hardly changes the merges."""
_FORMAT = 2
_HASHED_BYTES = 2**27
_BATCH = 1024  # documents encoded at once


class Tokens(NamedTuple):
    """A corpus as token ids.

    Attributes:
      ids: [num_tokens] uint16 or uint32, the documents one after another, each with END; mapped from disk.
      bounds: [num_documents + 1] int64, where documents begin and end in `ids`, from 0 on; mapped from disk.
      tokenizer: file of the tokenizer, in the format of the library `tokenizers`.
    """

    ids: np.ndarray
    bounds: np.ndarray
    tokenizer: Path


def load(config: LanguageConfig, split: str = "train") -> Tokens:
    """The tokens of a corpus; makes them where they are not in the cache, or damaged there.

    Args:
      config: the task.
      split: `train`, or `valid` for the text of `valid_text`. The tokenizer is that of the training text.

    Raises:
      CorpusError: the text cannot be read.
      ValueError: the text is another one than the config says.
      ModuleNotFoundError: the library `tokenizers` is missing; the message says how to install it.
    """
    tokenizer = _tokenizer(config)
    text, wanted = (config.text, config.text_sha256) if split == "train" else (config.valid_text, config.valid_sha256)
    if text is None or wanted is None:
        raise ValueError("task.valid_text is not set: this task has no text of its own for validation")
    dtype = np.dtype(np.uint16 if config.vocab_size <= 2**16 else np.uint32)
    recipe = {"tokenizer": sha256_of(tokenizer), "text": wanted, **_reading(config)._asdict(), "dtype": dtype.name}
    folder = _made("tokens", recipe, functools.partial(_write_tokens, config, text, wanted, tokenizer, dtype))
    return Tokens(
        np.memmap(folder / "ids", dtype, "r") if (folder / "ids").stat().st_size else np.zeros(0, dtype),
        np.memmap(folder / "bounds", np.int64, "r"),
        tokenizer,
    )


def _tokenizer(config: LanguageConfig) -> Path:
    recipe = {
        "text": config.text_sha256,
        **_reading(config)._asdict(),
        "vocab_size": config.vocab_size,
        "special_tokens": SPECIAL_TOKENS,
        "characters": TRAIN_CHARACTERS,
        # Another version may learn other merges.
        "tokenizers": _library().__version__,
    }
    return _made("tokenizer", recipe, functools.partial(_train_tokenizer, config)) / "tokenizer.json"


def _train_tokenizer(config: LanguageConfig, folder: Path) -> None:
    library = _library()
    _check_content(config.text, config.text_sha256)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents_of(config.text, _reading(config))), trainer)
    # Not by the library's own way of saving, whose errors name no file.
    (folder / "tokenizer.json").write_text(tokenizer.to_str())


def _first_characters(documents: Iterable[str]) -> Iterator[str]:
    left = TRAIN_CHARACTERS
    for document in documents:
        yield document
        left -= len(document)
        if left <= 0:
            return


def _write_tokens(
    config: LanguageConfig, text: str, wanted: str, tokenizer: Path, dtype: np.dtype[Any], folder: Path
) -> None:
    _check_content(text, wanted)
    encoder = _library().Tokenizer.from_file(str(tokenizer))
    # What looks like a special token in a text is text.
    encoder.encode_special_tokens = True
    documents = documents_of(text, _reading(config))
    end = 0
    with (folder / "ids").open("wb") as ids, (folder / "bounds").open("wb") as bounds:
        bounds.write(np.zeros(1, np.int64).tobytes())
        while batch := list(itertools.islice(documents, _BATCH)):
            encoded = [np.array([*encoding.ids, END], dtype) for encoding in encoder.encode_batch(batch)]
            ids.write(np.concatenate(encoded).tobytes())
            lengths = np.cumsum([len(document) for document in encoded], dtype=np.int64)
            bounds.write((end + lengths).tobytes())
            end += int(lengths[-1])


def _check_content(text: str, wanted: str) -> None:
    if (found := content_hash(text)) != wanted:
        raise ValueError(f"{text}: the text has changed; its SHA-256 is {found}, but its trials were made for {wanted}")


def _reading(config: LanguageConfig) -> Reading:
    return Reading(config.documents, config.text_column)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ModuleNotFoundError(
            "language modelling needs the library tokenizers: pip install 'hyla[text]', or `-e .[text]` in a clone"
        ) from None
    return tokenizers


def _made(kind: str, recipe: dict[str, Any], make: Any) -> Path:
    """The folder of the cache that a recipe has made; made now if it is not there whole.

    It is made under another name, synced and renamed. Of processes that want the same at once, one makes it.
    """
    text = json.dumps({"format": _FORMAT, "kind": kind, **recipe}, sort_keys=True)
    root = cache_folder() / kind
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:32]
    if _is_whole(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if _is_whole(folder):
            return folder
        for left in root.glob(f"{folder.name}.tmp*"):  # by one that was killed: whoever lives holds the lock
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=root))
        try:
            make(temporary)
            manifest = {"recipe": json.loads(text), "files": {file.name: _facts(file) for file in temporary.iterdir()}}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for file in temporary.iterdir():
                sync(file)
            if folder.is_dir():
                shutil.rmtree(folder)  # what was damaged
            else:
                folder.unlink(missing_ok=True)
            temporary.rename(folder)
            sync(root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether every file is there as it was made."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        return bool(files) and all(_facts(folder / name) == facts for name, facts in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _facts(file: Path) -> dict[str, Any]:
    """Size of a file and, unless reading it would take seconds, a hash of its bytes."""
    size = file.stat().st_size
    return {"bytes": size, "sha256": sha256_of(file) if size <= _HASHED_BYTES else None}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back, and so does a crash
