"""Hostile and absurd files, as weights to load and as parts of a checkpoint: each is refused and runs no code.

    python tests/faults/checkpoint_malicious.py

prints how many are refused, and whether any code ran; with ``-v`` a line for each, with the seconds and the MiB that it took.
Files of ``torch.save`` are read by torch alone, which sets no bounds to either; so what only wastes them is small here.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint_disks import Recorder
from checkpoint_power import models
from loguru import logger

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import layout, safetensors_io
from pipeline.errors import CheckpointError, PipelineError

CANARY = Path(tempfile.gettempdir()) / f"canary-{os.getpid()}"
_CODE = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.mkdir", "pickle.find_class", "ctypes.dlopen")


class Hook:
    """Notes what would be code running, while it is watching."""

    def __init__(self) -> None:
        self.watching = False
        self.ran: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event in _CODE:
            self.ran.append(f"{event} {arguments}")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(CANARY),)


def torch_saved(value: object, **keywords: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **keywords)
    return buffer.getvalue()


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file of these members, and of those without which torch reads no further."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in {"archive/version": b"3\n", "archive/byteorder": b"little", **members}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def pickled(steps: bytes, method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    data = {f"archive/{name}": content for name, content in members.items()}
    return zipped({"archive/data.pkl": b"\x80\x02" + steps + b".", **data}, method)


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def described(*entries: str, data: int = 0) -> bytes:
    return with_header(("{" + ",".join(entries) + "}").encode(), bytes(data))


def entry(name: str, shape: str = "[0]", offsets: str = "[0,0]", dtype: str = "F32") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


TUPLES = b"N\x85q\x00" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(20))


def one_tensor(elements: int, shape: int, stride: int) -> bytes:
    """Steps that make a dict of one tensor, of a storage that says to have so many elements."""
    sizes = [b"\x8a\x06" + number.to_bytes(6, "little") for number in (elements, shape)]
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + sizes[0] + b"tQ"
    )
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + sizes[1] + b"\x85K" + bytes([stride])
    return b"}X\x01\x00\x00\x00a" + rebuilt + b"\x85\x89}tRs"


def two_of_one_name() -> bytes:
    """Of which torch reads the one, and a look by Python's zipfile would see the other."""
    whole = zipped({"archive/data.pkl": b"\x80\x02N.", "archive/data.pkk": pickle.dumps(Evil())})
    return whole.replace(b"data.pkk", b"data.pkl")


def overlapping() -> bytes:
    """1000 members that are all the same 4 MB."""
    whole = pickled(b"N", **{"data/00000": bytes(4 * 2**20)})
    start = int.from_bytes(whole[-6:-2], "little")
    *others, last = whole[start:-22].split(b"PK\x01\x02")[1:]
    members = others + [last.replace(b"00000", b"%05d" % index) for index in range(1000)]
    directory = b"".join(b"PK\x01\x02" + member for member in members)
    counts = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), start, 0)
    return whole[:start] + directory + b"PK\x05\x06" + counts


ZIPS: dict[str, Callable[[], bytes]] = {
    "torch.save of an object": lambda: torch_saved({"a": Evil()}),
    "old torch.save of an object": lambda: torch_saved({"a": Evil()}, _use_new_zipfile_serialization=False),
    "a pickle": lambda: pickle.dumps(Evil()),
    "pickle that names os.system": lambda: pickled(b"cos\nsystem\nX\x02\x00\x00\x00id\x85R"),
    "pickle that names a class of torch": lambda: pickled(b"ctorch.serialization\nload\nX\x01\x00\x00\x00x\x85R"),
    "object in a state": lambda: pickled(b"ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00acos\nsystem\nsb"),
    "compressed 128 MB": lambda: pickled(one_tensor(2**25, 2**25, 1), zipfile.ZIP_DEFLATED, **{"data/0": bytes(2**27)}),
    "2^20 steps": lambda: pickled(b"N" * 2**20),
    "a million marks": lambda: pickled(b"(" * 10**6),
    "tuple of 2^20": lambda: pickled(TUPLES + b"}h\x14Ns"),
    "tensor of stride 0": lambda: pickled(one_tensor(1, 2**40, 0), **{"data/0": bytes(4)}),
    "tensor beyond its storage": lambda: pickled(one_tensor(1, 2**40, 1), **{"data/0": bytes(4)}),
    "storage of 2^40": lambda: pickled(one_tensor(2**40, 2**40, 1), **{"data/0": bytes(4)}),
    "nothing but a number": lambda: torch_saved(3),
    "a list in it": lambda: torch_saved({"a": [1]}),
    "two members of one name": two_of_one_name,
    "300000 members": lambda: pickled(b"N", **{str(index): b"" for index in range(300_000)}),
    "a member used 1000 times": overlapping,
    "cut off": lambda: torch_saved({"a": torch.ones(9)})[:-30],
    "TorchScript": lambda: pickled(b"N", **{"constants.pkl": pickle.dumps(Evil()), "code/a.py": b"import os"}),
    "zip64 of 2^60 members": lambda: b"PK\x03\x04" + b"PK\x06\x06" + bytes(20) + struct.pack("<QQQQ", 2**60, 2**60, 2**60, 0) + b"PK\x06\x07" + struct.pack("<IQI", 0, 4, 1) + b"PK\x05\x06" + bytes(18),
}  # fmt: skip


TENSORS: dict[str, Callable[[], bytes]] = {
    "a pickle": lambda: pickle.dumps(Evil()),
    "torch.save of an object": lambda: torch_saved({"a": Evil()}),
    "header of 2^63": lambda: struct.pack("<Q", 2**63) + bytes(100),
    "header of 2^64-1": lambda: struct.pack("<Q", 2**64 - 1) + bytes(100),
    "header of 99 MB": lambda: with_header(b"{" + b" " * 99_000_000 + b"}"),
    "a million empty tensors": lambda: described(*(entry(f"{index}") for index in range(1_000_000))),
    "200000 empty tensors": lambda: described(*(entry(f"{index}", dtype="U8") for index in range(200_000))),
    "16 MB of brackets": lambda: with_header(b"[" * 2**24),
    "16 MB of lists as a shape": lambda: described(entry("a", "[" + "[],[]," * 2_000_000 + "0]")),
    "16 MB of lists in the metadata": lambda: with_header(b'{"__metadata__":{"a":[' + b"[]," * 5_000_000 + b"0]}}"),
    "one name twice": lambda: described(entry("a"), entry("a")),
    "shape of 2^62 by 0": lambda: described(entry("a", f"[{2**62},0]")),
    "shape of 2^59 by 2^59 by 0": lambda: described(entry("a", f"[{2**59},{2**59},0]")),
    "shape of 2^40": lambda: described(entry("a", f"[{2**40}]", f"[0,{2**42}]")),
    "negative shape": lambda: described(entry("a", "[-1,-1]", "[0,4]"), data=4),
    "overlapping tensors": lambda: described(entry("a", "[1]", "[0,4]"), entry("b", "[1]", "[0,4]"), data=4),
    "a gap": lambda: described(entry("a", "[1]", "[4,8]"), data=8),
    "unknown type": lambda: described(entry("a", dtype="object")),
    "no JSON": lambda: with_header(b"\xff\xfe\x00"),
    "a header without an end": lambda: with_header(b'{"a":{"dtype":"F32'),
    "a number where a name should be": lambda: with_header(b"{1:2}"),
    "a deep structure": lambda: safetensors_io.encode_tensors({}, {"state_format": "1", "state": "[" * 10**6}),
    "a wide structure": lambda: safetensors_io.encode_tensors(
        {}, {"state_format": "1", "state": "[" + "[]," * 5 * 10**6 + "0]"}
    ),
    "a pickle in the structure": lambda: safetensors_io.encode_tensors(
        {}, {"state_format": "1", "state": '{"object": "os.system"}'}
    ),
}


def sparse(path: Path) -> None:
    text = described(entry("a", f"[{10**11}]", f"[0,{10**11}]", "U8"))
    path.write_bytes(text)
    os.truncate(path, len(text) + 10**11)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "100 GB of nothing": lambda path: (path.touch(), os.truncate(path, 10**11)),
    "100 GB that say they are a tensor": sparse,
}


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and what must be refused."""
    for suffixes, contents in (((".pt", ".pth", ".bin"), ZIPS), ((".safetensors",), TENSORS)):
        for name, make in contents.items():
            content = make()
            for suffix in suffixes:
                path = folder / f"file{suffix}"
                path.write_bytes(content)
                yield f"{suffix}: {name}", lambda path=path: load(path)
                path.unlink()
    for suffix in (".pt", ".safetensors"):
        for name, make_file in SPECIAL.items():
            path = folder / f"special{suffix}"
            make_file(path)
            yield f"{suffix}: {name}", lambda path=path: load(path)
            path.unlink()
    yield from checkpoints(folder)


def load(path: Path) -> None:
    Checkpointer(path.parent).load_weights(path, models(0))


def checkpoints(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Checkpoints with one bad file, whose manifest says that it is as it should be."""
    for file, contents in (("main.safetensors", TENSORS), ("training.safetensors", TENSORS), ("state.json", STATES)):
        for name, make in contents.items():
            if file == "main.safetensors" and "structure" in name:
                continue  # weights have none: what is in its place is not looked at
            path = saved(folder / "checkpoints")
            (path / file).write_bytes(make())
            rehash(path, {each: layout.file_entry((path / each).read_bytes()) for each in layout.read_manifest(path)})
            yield f"checkpoint, {file}: {name}", lambda path=path: newest(path)
    for name, change in FOLDERS.items():
        path = saved(folder / "checkpoints")
        change(path)
        yield f"checkpoint: {name}", lambda path=path: newest(path)


STATES: dict[str, Callable[[], bytes]] = {
    "a pickle": lambda: pickle.dumps(Evil()),
    "deep JSON": lambda: b"[" * 10**6,
    "17 MB": lambda: b" " * 17 * 10**6,
    "another step": lambda: b'{"train_state": {"iteration": 2}, "metrics": {}}',
    "no counters": lambda: b'{"metrics": {}}',
}


def listing(path: Path, name: str) -> None:
    rehash(path, {**layout.read_manifest(path), name: layout.file_entry(b"")})


def rehash(path: Path, files: dict[str, layout.FileEntry]) -> None:
    (path / layout.MANIFEST).write_bytes(layout.encode_manifest(files))


def linked(path: Path) -> None:
    target = path.rename(path.parent.parent / f"elsewhere-{path.name}")
    path.symlink_to(target)


def large(path: Path) -> None:
    sparse(path / "main.safetensors")
    size = (path / "main.safetensors").stat().st_size
    rehash(path, {**layout.read_manifest(path), "main.safetensors": layout.FileEntry("0" * 64, size)})


FOLDERS: dict[str, Callable[[Path], object]] = {
    "../ in the manifest": lambda path: listing(path, "../../outside"),
    "an absolute name": lambda path: listing(path, "/etc/hostname"),
    "a FIFO as weights": lambda path: ((path / "main.safetensors").unlink(), os.mkfifo(path / "main.safetensors")),
    "a FIFO as manifest": lambda path: ((path / layout.MANIFEST).unlink(), os.mkfifo(path / layout.MANIFEST)),
    "a link as weights": lambda path: linked(path / "main.safetensors"),
    "a link as manifest": lambda path: linked(path / layout.MANIFEST),
    "100 GB as weights": large,
    "manifest of 100 GB": lambda path: os.truncate(path / layout.MANIFEST, 10**11),
    "manifest that is a pickle": lambda path: (path / layout.MANIFEST).write_bytes(pickle.dumps(Evil())),
}


def saved(folder: Path) -> Path:
    """A checkpoint of its own."""
    folder = Path(tempfile.mkdtemp(dir=folder.parent))
    checkpointer = Checkpointer(folder, disk=Recorder())
    return checkpointer.save(models(1), {"iteration": 1}, {"main": {}}, {"number": 1})


def newest(path: Path) -> None:
    Checkpointer(path.parent, disk=Recorder()).store.newest_valid()


def memory() -> int:
    """The most that the process has used since the last look, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return most


def refused(work: Callable[[], object]) -> str:
    """The message, or what else came of it."""
    try:
        work()
    except CheckpointError as error:
        return f"refused: {str(error)[-150:]}"
    except (PipelineError, Exception) as error:  # the point is to see what comes
        return f"FAILED with {type(error).__name__}: {error}"
    return "LOADED"


def main() -> int:
    logger.remove()
    hook = Hook()
    sys.addaudithook(hook)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        load_anything(Path(folder))
        for name, work in cases(Path(folder)):
            memory()
            before, start = memory(), time.perf_counter()
            hook.watching = True
            said = refused(work)
            hook.watching = False
            seconds, used = time.perf_counter() - start, (memory() - before) / 1024
            results.append({"case": name, "said": said, "seconds": round(seconds, 2), "MiB": round(used, 1)})
            if "-v" in sys.argv or not said.startswith("refused"):
                print(json.dumps(results[-1]))
    summary = {"cases": len(results), "refused": sum(each["said"].startswith("refused") for each in results)}
    summary["code ran"] = len(hook.ran) + CANARY.exists()
    torchs = [each for each in results if each["case"].startswith((".pt", ".pth", ".bin"))]
    for whose, of in (("", [each for each in results if each not in torchs]), (" of torch.save", torchs)):
        for name, unit in (("slowest", "seconds"), ("largest", "MiB")):
            summary[name + whose] = max(of, key=lambda each: each[unit])
    print(json.dumps(summary))
    return int(summary["refused"] < summary["cases"] or bool(hook.ran) or CANARY.exists())


def load_anything(folder: Path) -> None:
    """What is imported at the first load is not to be counted."""
    torch.save(models(0)["main"]["model"].state_dict(), folder / "fine.pt")
    load(folder / "fine.pt")


if __name__ == "__main__":
    sys.exit(main())
