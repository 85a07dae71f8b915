"""Files of JSON lines that grow while a run goes on: several plugins may append to one."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

from pipeline.checkpoint.storage import no_link, refusal, storing
from pipeline.context import Context


def open_lines(path: Path, context: Context) -> FileIO:
    """Open a file to append to it, to be closed with the run.

    Raises:
        StorageError: the storage refuses.
    """
    # Without a buffer, so that what a killed run had measured is there.
    with storing(path):
        file = FileIO(path, "a", opener=no_link)
    context.peek("resources").callback(file.close)
    return file


def append(file: FileIO, text: str) -> None:
    """Append to it; a line that is written at once is never mixed with that of another plugin.

    Raises:
        StorageError: the storage refuses.
    """
    rest = memoryview(text.encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise refusal(str(file.name), error) from error
