"""A look at the zip file of ``torch.save`` before torch opens it: its sizes, and what its pickle would do."""

from __future__ import annotations

import os
import struct
import zipfile
from io import FileIO

from pipeline.checkpoint import pickle_scan
from pipeline.errors import CheckpointError

MAX_MEMBERS = 100_100
MAX_PICKLE = 16 * 2**20
_MAX_DIRECTORY = 16 * 2**20
_SLACK = 2**20
_RESAVE = "save a state_dict with a current torch.save, or as .safetensors"


def check(file: FileIO, size: int) -> None:
    """Refuse what ``torch.save`` would not write for weights.

    Args:
        file: it is read, and left anywhere.
        size: its bytes.

    Raises:
        CheckpointError: it is another kind of file, says sizes that it has not, or its pickle does more than weights need.
    """
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(
            f"is no zip file of torch.save, perhaps a pickle of an old one, which can run code; {_RESAVE}"
        )
    _check_directory(file, size)
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = _pickle_of(archive.infolist(), size)
            content = archive.read(pickled)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise CheckpointError(f"is a damaged zip file ({error}); use another") from error
    pickle_scan.check(content)


def _pickle_of(members: list[zipfile.ZipInfo], size: int) -> zipfile.ZipInfo:
    """The member that torch unpickles, after a look at the sizes of all."""
    names = [member.filename for member in members]
    for member in members:
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.file_size != member.compress_size
            or member.flag_bits & 1
        ):
            raise CheckpointError(
                f"'{member.filename[:60]}' in it is compressed or encrypted, which torch.save does not; {_RESAVE}"
            )
    if len(set(names)) != len(names):
        raise CheckpointError("has two members of one name; use another")
    total = sum(member.file_size for member in members)
    if total > size * 1.1 + _SLACK:
        raise CheckpointError(f"says that it holds {total} bytes, and has {size}; use another")
    if any("/code/" in name for name in names):
        raise CheckpointError(f"holds TorchScript, which is code; {_RESAVE}")
    pickled = [member for member in members if member.filename.endswith(".pkl")]
    if len(pickled) != 1 or pickled[0].filename.count("/") != 1 or not pickled[0].filename.endswith("/data.pkl"):
        raise CheckpointError(f"holds {len(pickled)} pickles, and not the one of torch.save; {_RESAVE}")
    if pickled[0].file_size > MAX_PICKLE:
        raise CheckpointError(f"has a pickle of {pickled[0].file_size} bytes, more than {MAX_PICKLE}; {_RESAVE}")
    return pickled[0]


def _check_directory(file: FileIO, size: int) -> None:
    """Look at how long the list of members is before anything reads it.

    Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.14 to 4.3.16
    """
    file.seek(max(0, size - 42))
    tail = file.read(42)
    locator, end = tail[-42:-22], tail[-22:]
    if len(end) < 22 or end[:4] != b"PK\x05\x06":
        raise CheckpointError("does not end as a zip file of torch.save does; use another")
    count, length = struct.unpack("<HI", end[10:16])
    if locator[:4] == b"PK\x06\x07":
        file.seek(min(struct.unpack("<Q", locator[8:16])[0], size))
        record = file.read(56)
        if len(record) < 56:
            raise CheckpointError("does not end as a zip file of torch.save does; use another")
        count, length = struct.unpack("<QQ", record[32:48])
    if count > MAX_MEMBERS or length > _MAX_DIRECTORY:
        raise CheckpointError(f"lists {count} members in {length} bytes, too many; {_RESAVE}")
    file.seek(0, os.SEEK_SET)
