"""Row 26: one rank's or one group's file was missing: a hang or silent garbage."""

from pathlib import Path

from kvpool.errors import Code
from kvpool.wire.messages import STORED
from tests.field.conftest import StartWorker
from tests.process.pool_harness import namespace
from tests.process.worker_harness import OBJECT_BYTES, key_of


def test_row_26_a_key_of_which_one_ranks_file_is_missing_is_no_hit(device: Path, start: StartWorker) -> None:
    spec = namespace(rank_count=2, object_bytes=(OBJECT_BYTES,))
    first = start(device, spec=spec, slots=64)
    assert list(range(6)) == first.store(range(6))
    first.file_of(2, rank=1).unlink()
    assert {2: Code.MISSING} == first.load([2], rank=1)
    first.until(lambda: first.flags[key_of(2)] == 0)
    first.file_of(4, rank=0).unlink()
    first.close()

    second = start(device, spec=spec, slots=64)
    second.listen()
    told = {number: second.flags.get(key_of(number), 0) for number in range(6)}
    assert {0: STORED, 1: STORED, 2: 0, 3: STORED, 4: 0, 5: STORED} == told
    assert [2, 4] == second.store([2, 4])
    for rank in range(2):
        assert dict.fromkeys(range(6), True) == second.load(range(6), rank=rank)
