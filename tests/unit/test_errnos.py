"""What errnos mean, per operation."""

import errno

import pytest

from kvpool.errors import InvariantError
from kvpool.io import errnos
from kvpool.io.errnos import Meaning


@pytest.mark.parametrize(
    ("operation", "number", "meaning"),
    [
        ("open", errno.ENOENT, Meaning.MISSING),
        ("open", errno.EMFILE, Meaning.DEVICE),
        ("read", errno.EIO, Meaning.DEVICE),
        ("read", errno.EINTR, Meaning.RETRY),
        ("write", errno.ENOSPC, Meaning.FULL),
        ("link", errno.EEXIST, Meaning.EXISTS),
        ("create", errno.EDQUOT, Meaning.FULL),
        ("mkdir", errno.EROFS, Meaning.FULL),
    ],
)
def test_an_errno_has_its_meaning(operation, number, meaning):
    assert meaning is errnos.meaning(operation, number)


@pytest.mark.parametrize(
    ("operation", "number"), [("read", errno.EBADF), ("read", errno.EFAULT), ("open", errno.ENAMETOOLONG)]
)
def test_an_errno_that_only_we_can_cause_is_our_mistake(operation, number):
    with pytest.raises(InvariantError, match=errno.errorcode[number]):
        errnos.meaning(operation, number)


def test_a_failure_is_told_in_words():
    assert "read: Input/output error (EIO)" == errnos.text("read", errno.EIO)
