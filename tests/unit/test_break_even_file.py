"""The user's break-even file, read when an engine starts."""

from pathlib import Path

import pytest

from kvpool.client.break_even import drive_model, load_break_even
from kvpool.errors import ConfigError


def test_a_file_of_the_served_model_is_read_under_any_of_its_names(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text('{"model_name": "m", "break_even_ssd_tokens": 7}')
    assert 7 == load_break_even(str(file), ["served", "m"]).ssd_tokens
    with pytest.raises(ConfigError, match="model_name is 'm'"):
        load_break_even(str(file), ["other"])


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "b.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load_break_even(str(file), ["m"])
    assert str(file) == caught.value.context["file"]


def test_the_drive_below_a_directory_has_a_name(tmp_path: Path) -> None:
    assert drive_model(str(tmp_path))
