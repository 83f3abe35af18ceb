"""The sweeps' benchmark at a small size: what it measures and prints."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sweeps

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "sweeps.py"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_script_measures_and_writes_what_it_found(tmp_path):
    out = tmp_path / "new" / "sweeps.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--out", str(out)]
    printed = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout
    told = json.loads(out.read_text())
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line.get("measurement") for line in lines] == ["mini", "alone", "steps", None]
    assert [told[name]["trials"] for name in ("mini", "alone", "steps")] == [4, 4, 60]
    # One shape: whoever was first compiled it, and a second worker that began at the same time did so too.
    assert 1 <= told["mini"]["compiled"] <= told["mini"]["workers"]
    assert told["mini"]["compiled"] == sum(told["mini"]["compiled_per_worker"])
    assert told["mini"]["compiled"] + told["mini"]["loaded"] <= told["mini"]["packs"]
    assert told["mini"]["wall_s"] > told["mini"]["start_s"] > 0
    assert told["alone"]["ran"] == 2
    assert told["times_faster"] == lines[-1]["times_faster"] > 0
    assert told["steps"]["whole_trial_ms"] >= told["steps"]["trial_ms"] > 0
    assert told["steps"]["packs"] == 15
    text = out.read_text()
    assert socket.gethostname() not in text
    assert str(ROOT) not in text
    assert str(tmp_path) not in text


def test_a_run_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match=r"exit status 3$"):
        sweeps.follow([sys.executable, "-c", "raise SystemExit(3)"], {})


def test_a_run_is_followed_line_by_line():
    code = """if True:
        import json, time
        print(json.dumps({"event": "start"}), flush=True)
        held = bytearray(64 * 2**20)
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        print(json.dumps({"event": "pack_ended"}), flush=True)
        time.sleep(1)  # the reader looks at this process meanwhile
    """
    start, pack, end = sweeps.follow([sys.executable, "-c", code], {})
    assert [start.event["event"], pack.event["event"], end.event["event"]] == ["start", "pack_ended", "end"]
    assert pack.cpu_s >= start.cpu_s + 0.08  # the system counts in hundredths
    assert pack.memory_bytes >= start.memory_bytes + 60 * 2**20
    assert end.at_s >= pack.at_s >= start.at_s
