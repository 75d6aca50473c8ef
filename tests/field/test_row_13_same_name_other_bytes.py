"""Row 13: new weights, rotary embedding, layout or maximum length under the same name, and old KV was served."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpool.errors import Code
from tests.field.conftest import StartWorker
from tests.process.pool_harness import namespace
from tests.process.worker_harness import OBJECT_BYTES, key_of

OLD = namespace("a", rank_count=1, object_bytes=(OBJECT_BYTES,))


@pytest.mark.parametrize("field", ["weights", "rope", "kv_layout", "max_model_len"])
def test_row_13_what_another_identity_stored_is_a_miss_that_names_the_field(
    device: Path, start: StartWorker, field: str
) -> None:
    spec = msgspec.structs.replace(OLD, identity={field: "old"})
    worker = start(device, spec=spec)
    assert [0, 1] == worker.store(range(2))
    worker.close()
    changed: dict[str, Any] = {"fingerprint": "b" * 64, "identity": {field: "new"}}
    worker = start(device, spec=msgspec.structs.replace(spec, **changed))
    assert {0: Code.MISSING, 1: Code.MISSING} == worker.load(range(2))
    assert f"{field}: old -> new" in worker.log()


def test_row_13_a_file_that_was_moved_to_the_new_folder_is_refused(device: Path, start: StartWorker) -> None:
    worker = start(device, spec=OLD)
    assert [0] == worker.store(range(1))
    worker.close()
    worker = start(device, spec=msgspec.structs.replace(OLD, fingerprint="b" * 64))
    worker.close()
    (old,) = device.glob("tiny/**/*.bin")
    new_root = device / "tiny+bbbbbbbb"
    target = new_root / old.relative_to(device / "tiny")
    target.parent.mkdir(parents=True)
    shutil.copy(old, target)
    worker = start(device, spec=msgspec.structs.replace(OLD, fingerprint="b" * 64))
    assert {0: Code.CORRUPT} == worker.load(range(1))
    assert old.name.startswith(key_of(0)[:8].hex())
