"""Files under one root: a local folder, NFS, or an object store, by one code path (pyarrow.fs).

What is written here appears whole or not at all: locally under a temporary name and then a
rename, on an object store as one upload. S3 finds its endpoint, region and keys where every client
of it looks: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or a machine's role.
"""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pyarrow import ArrowException, Buffer, fs

Result = TypeVar("Result")

PATIENCE_SECONDS = 60.0  # how long a remote storage may be away before what needs it fails


class StorageError(OSError):
    """The storage can't be used; says which one and why."""


class Storage:
    """A root under which names are relative paths such as 'run/trial/trace/000000001.parquet'."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        text = os.fspath(uri)
        self.is_local = not urlsplit(text).scheme or text.startswith("file:")
        try:
            if self.is_local:
                self.root = str(Path(text.removeprefix("file://")).expanduser().absolute())
                self.uri, self.fs = self.root, fs.LocalFileSystem()
            else:
                self.uri = text if text.endswith("//") else text.rstrip("/")
                self.fs, root = fs.FileSystem.from_uri(_address(self.uri))
                self.root = root.rstrip("/")
        except (ArrowException, ValueError, OSError) as error:
            raise StorageError(f"storage '{_shown(text)}' can't be opened: {error}") from error

    def path(self, name: str) -> str:
        """The file system's own path of `name`."""
        return f"{self.root}/{name}"

    def check_writable(self) -> None:
        """Write and delete a probe; StorageError with the reason if that fails."""
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            self._write(probe, b"")
            self.delete(probe)
        except (OSError, ArrowException) as error:
            raise StorageError(f"storage '{self.uri}' can't be written: {self._reason(error)}") from error

    def write(self, name: str, content: bytes | Buffer) -> None:
        """Write `name` whole; a reader sees the old content or the new, never a part."""
        self._patiently(lambda: self._write(name, content))

    def _write(self, name: str, content: bytes | Buffer) -> None:
        path = self.path(name)
        if not self.is_local:
            with self.fs.open_output_stream(path) as stream:
                stream.write(content)
            return
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self._write_local(temporary, content)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _write_local(self, path: str, content: bytes | Buffer) -> None:
        try:
            with open(path, "wb") as file:
                file.write(content)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)

    def _patiently(self, work: Callable[[], Result]) -> Result:
        """`work`, again while a remote storage is away, for about a minute: a blip costs no trial."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = 0.5
        while True:
            try:
                return work()
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as error:
                if self.is_local or "NO_SUCH_" in str(error) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 8.0)

    def read(self, name: str) -> Buffer:
        """The whole content of `name`; FileNotFoundError if there is none."""
        with self.fs.open_input_file(self.path(name)) as file:
            return file.read_buffer()

    def names(self, folder: str) -> list[str]:
        """Sorted base names of the files in `folder`, by one listing; empty if it is not there."""
        return sorted(info.base_name for info in self._list(folder) if info.type == fs.FileType.File)

    def size(self, folder: str) -> int:
        """Bytes under `folder`, its subfolders included."""
        return sum(info.size or 0 for info in self._list(folder, recursive=True))

    def _list(self, folder: str, recursive: bool = False) -> Iterator[fs.FileInfo]:
        selector = fs.FileSelector(self.path(folder), recursive=recursive, allow_not_found=True)
        yield from self.fs.get_file_info(selector)

    def exists(self, name: str) -> bool:
        """Whether a file or folder of that name is there; StorageError if that can't be known."""
        try:
            return self.fs.get_file_info(self.path(name)).type != fs.FileType.NotFound
        except OSError as error:
            raise StorageError(f"storage '{self.uri}' can't be read: {self._reason(error)}") from error

    def delete(self, name: str) -> None:
        """Delete one file; fine if it is gone already."""
        try:
            self.fs.delete_file(self.path(name))
        except FileNotFoundError:
            return

    def delete_folder(self, name: str) -> None:
        """Delete a folder with all that it holds; fine if it is gone already."""
        if self.exists(name):
            self.fs.delete_dir(self.path(name))

    def _reason(self, error: Exception) -> str:
        """What is wrong, without where in the client it was noticed."""
        text = " ".join(str(error).split())
        if "NO_SUCH_BUCKET" in text:
            return f"there is no bucket '{self.root.split('/')[0]}'"
        found = re.search(r"AWS Error (\w+) during (\w+) operation: (.*)", text)
        return f"{found[3]} ({found[1]} during {found[2]})" if found else text


def _address(uri: str) -> str:
    """A remote URI as pyarrow takes it; ValueError if it holds keys, which the catalogue would show."""
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        return uri
    if not parts.netloc:
        raise ValueError("it names no bucket; known: s3://BUCKET/PREFIX")
    if "@" in parts.netloc:
        raise ValueError(
            "keys don't belong in it; known: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (environment)"
        )
    # A small file is then one PUT; by default each is an upload of three requests.
    return f"{uri}{'&' if parts.query else '?'}allow_delayed_open=true"


def _shown(uri: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", uri)
