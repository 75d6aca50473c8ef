"""A device's directory: whose folder is whose, the quarantine, and what a filesystem can do."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvpool.core import layout
from kvpool.errors import DeviceError
from kvpool.io import files
from kvpool.io.files import DeviceFiles, Naming
from kvpool.wire.messages import GroupSpec, NamespaceSpec


def spec(fingerprint: str = "ab" * 32, **changes: object) -> NamespaceSpec:
    values = {
        "fingerprint": fingerprint,
        "model_name": "org/model",
        "block_size": 16,
        "blocks_per_file": 16,
        "tp": 2,
        "pp": 1,
        "pcp": 1,
        "dtype": "bfloat16",
        "rank_count": 2,
        "groups": [GroupSpec(group=0, object_bytes=100)],
        "identity": {"rope": "yarn"},
    }
    return NamespaceSpec(**(values | changes))


@pytest.fixture
def device(tmp_path: Path) -> DeviceFiles:
    return DeviceFiles(str(tmp_path / "device"), name="nvme0")


def test_folders_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        directories = DeviceFiles(str(tmp_path / "device")).open_namespace(spec())
    finally:
        os.umask(before)
    below = [tmp_path / "device", *(tmp_path / "device").rglob("*")]
    assert {0o700} == {stat.S_IMODE(path.stat().st_mode) for path in below if path.is_dir()}
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in below if path.is_file()}
    assert 2 == len(directories)


def test_whose_plain_folder_it_is_is_known_to_who_gets_another(device):
    device.open_namespace(spec())
    device.open_namespace(spec("cd" * 32, identity={"rope": "linear"}))
    assert {"cd" * 32: spec()} == device.others


def test_the_first_fingerprint_gets_the_plain_path_and_others_their_own(device):
    first = device.open_namespace(spec())
    second = device.open_namespace(spec("cd" * 32))
    assert first[0].startswith(f"{device.root}/org_model/")
    assert second[0].startswith(f"{device.root}/org_model+cdcdcdcd/")
    assert first == device.open_namespace(spec())
    assert second == device.open_namespace(spec("cd" * 32))


def test_every_rank_has_a_folder_with_the_readable_identity(device):
    for rank, directory in enumerate(device.open_namespace(spec())):
        assert f"rank_{rank}" in directory
        manifest = json.loads(Path(directory, "manifest.json").read_text())
        assert {"rope": "yarn"} == manifest["spec"]["identity"]
        assert "ab" * 32 == manifest["spec"]["fingerprint"]


def test_another_parallel_shape_or_dtype_takes_no_folder_away(device):
    device.open_namespace(spec())
    assert "/org_model/" in device.open_namespace(spec("cd" * 32, tp=4))[0]
    assert "/org_model/" in device.open_namespace(spec("ef" * 32, dtype="fp8"))[0]


@pytest.mark.parametrize("naming", list(Naming))
def test_a_manifest_is_claimed_whatever_the_filesystem_can_do(device, naming):
    device.features = dataclasses.replace(device.features, naming=naming)
    first = device.open_namespace(spec())
    assert first != device.open_namespace(spec("cd" * 32))
    assert first == device.open_namespace(spec())


def test_two_processes_that_claim_at_once_get_different_folders(tmp_path):
    code = (
        "import sys, msgspec; from kvpool.io.files import DeviceFiles; from kvpool.wire.messages import NamespaceSpec;"
        "spec = msgspec.json.decode(sys.stdin.read(), type=NamespaceSpec); "
        "print(DeviceFiles(sys.argv[1]).open_namespace(spec)[0])"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for number, child in enumerate(children):
        child.stdin.write(msgspec.json.encode(spec(f"{number:x}" * 64)).decode())
        child.stdin.close()
    found = [child.stdout.read().strip() for child in children]
    for child in children:
        child.stdout.close()
        assert 0 == child.wait()
    assert 3 == len(set(found))
    assert 1 == sum("/org_model/" in path for path in found)


def test_a_manifest_that_cannot_be_read_is_set_aside_and_made_anew(device):
    directory = device.open_namespace(spec())[0]
    Path(directory, "manifest.json").write_text("{")
    assert directory == device.open_namespace(spec())[0]
    assert json.loads(Path(directory, "manifest.json").read_text())
    assert 1 == len(device.quarantined())


def test_a_folder_of_ones_own_that_holds_another_fingerprint_is_refused(device):
    device.open_namespace(spec())
    device.open_namespace(spec("cd" * 32))
    with pytest.raises(DeviceError, match="belongs to another namespace"):
        device.open_namespace(spec("cd" * 4 + "00" * 28))


def test_model_names_cannot_leave_the_device(device):
    for name in ("..", "../../etc", "/etc", ".kvpool", "a/../../b", "\0"):
        (directory, _) = device.open_namespace(spec(model_name=name))
        assert Path(directory).resolve().is_relative_to(device.root)
        assert layout.PRIVATE_NAME not in Path(directory).parts


def test_the_quarantine_keeps_the_latest_files_only(device, monkeypatch):
    monkeypatch.setattr(files, "QUARANTINE_FILES_MAX", 3)
    for number in range(5):
        path = Path(device.root, f"file{number}")
        path.write_text(str(number))
        device.set_aside(str(path))
        assert not path.exists()
    assert ["2", "3", "4"] == sorted(Path(path).read_text() for path in device.quarantined())


def test_setting_aside_what_is_gone_is_no_error(device):
    device.set_aside(f"{device.root}/never-there")
    assert [] == device.quarantined()


def test_a_file_is_out_of_the_way_also_when_there_is_no_quarantine(device):
    Path(device.root, ".kvpool/quarantine").rmdir()
    path = Path(device.root, "bad")
    path.write_text("bad")
    device.set_aside(str(path))
    assert not path.exists()


def test_leftovers_of_a_killed_trial_are_removed_at_the_next_start(device):
    left, at_work = (Path(device.root, ".kvpool", layout.temporary_name("1", number)) for number in (1, 2))
    for path in (left, at_work):
        path.write_text("part")
    os.utime(left, (time.time() - files.LEFTOVER_AGE_S - 1,) * 2)
    DeviceFiles(device.root)
    assert (False, True) == (left.exists(), at_work.exists())


def test_trying_out_leaves_nothing(device):
    assert ["quarantine"] == os.listdir(f"{device.root}/.kvpool")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="nvme9") as caught:
        DeviceFiles(str(tmp_path / "file"), name="nvme9")
    assert "EEXIST" in str(caught.value)


def test_missing_features_are_found_out(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(files, "rename_noreplace", refuse)
    features = DeviceFiles(str(tmp_path)).features
    assert (False, Naming.RENAME) == (features.unnamed, features.naming)
