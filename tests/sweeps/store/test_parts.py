"""One file: whatever is changed in it is noticed."""

import pyarrow as pa
import pytest

from sweeps.store import TABLES, parts

ROWS = {
    "trials": {
        "trial_id": ["a"],
        "attempt": [1],
        "status": ["failed"],
        "start_step": [0],
        "error": ["hyla.crc32=00000000"],
    },
    "metrics": {
        "trial_id": ["a", "a"],
        "attempt": [1, 1],
        "step": [1, 2],
        "split": ["train", "train"],
        "metric": ["loss", "loss"],
        "value": [0.5, 0.25],
    },
    "sweeps": {
        "sweep": ["hyla.crc32="],
        "request_id": ["r"],
        "requested_at": [None],
        "tiny": [False],
        "trial_id": ["a"],
    },
}


@pytest.mark.parametrize("replaced", [None, ["a-1.parquet", "a-2.parquet"]])
@pytest.mark.parametrize("table", TABLES)
def test_every_changed_byte_and_every_cut_is_noticed(table, replaced):
    data = parts.encode(table, pa.table(ROWS[table]), replaces=replaced)
    assert parts.is_intact(data)
    assert parts.decode(table, data, "p").num_rows == len(ROWS[table]["trial_id"])
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        assert not parts.is_intact(bytes(changed)), at
        if at % 13 == 0:
            with pytest.raises(parts.Damaged):
                parts.decode(table, bytes(changed), "p")
    for length in range(0, len(data), 37):
        with pytest.raises(parts.Damaged):
            parts.decode(table, data[:length], "p")
