"""Throw-away servers for tests, real ones: PostgreSQL from this machine's binaries, S3 by moto.

Both listen on a free port of the loopback interface and leave nothing behind. Where PostgreSQL isn't
installed its tests are skipped, saying so; on a build server (CI is set) they fail instead.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

PASSWORD = "throw:away/p@ss"  # with the characters that a URL must escape
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def unprivileged() -> dict[str, Any]:
    """How subprocess must start a program that refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    return {}


def postgresql_programs() -> Path | None:
    """The folder with `initdb` and `postgres`: on the path, else Debian's newest."""
    found = shutil.which("initdb")
    if found and Path(found).resolve().with_name("postgres").exists():
        return Path(found).resolve().parent
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(installed, key=lambda path: float(path.parent.name), default=None)


class PostgreSQL:
    """A PostgreSQL of its own folder and port; `stop` and `start` keep what is in it."""

    def __init__(self, programs: Path) -> None:
        self.programs, self.port = programs, free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="gradnorm-postgresql-"))
        self.user = unprivileged()
        if self.user:
            os.chown(self.folder, self.user["user"], self.user["group"])
        self.process: subprocess.Popen[bytes] | None = None
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = [programs / "initdb", "-D", self.folder / "data", "-U", "gradnorm", "-A", "scram-sha-256"]
        command += [f"--pwfile={password}", "-E", "UTF8", "--no-sync", "--locale=C.UTF-8"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, **self.user)

    def url(self, database: str) -> str:
        password = "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in PASSWORD)
        return f"postgresql://gradnorm:{password}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> Any:
        """A connection of its own, in autocommit: what a person at psql would have."""
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True)

    def start(self) -> None:
        import psycopg

        command = [self.programs / "postgres", "-D", self.folder / "data", "-p", str(self.port)]
        for setting in ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"):
            command += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **self.user)
        for _ in range(300):
            with contextlib.suppress(psycopg.OperationalError):
                self.connect().close()
                return
            time.sleep(0.1)
        raise RuntimeError((self.folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """At once and without a word, as a crash would; what was committed stays."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(30)
            self.process = None

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            connection.execute(f"create database {name}")
        return self.url(name)


@contextlib.contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    """A started server; skips (fails on a build server) where PostgreSQL isn't installed."""
    programs = postgresql_programs()
    if programs is None:
        missing = "PostgreSQL isn't installed; run: apt-get install postgresql"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    server = PostgreSQL(programs)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


class ObjectStore:
    """moto's S3 over HTTP; `requests` has every request that came, as 'GET /bucket/key?query'."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        application = DomainDispatcherApplication(create_backend_app)
        self.requests: list[str] = []

        class Quiet(MotoRequestHandler):  # type: ignore[misc]
            def log_request(self, code: Any = "-", size: Any = "-") -> None:
                """What came is in `requests`."""

        def recorded(environ: dict[str, Any], start_response: Any) -> Any:
            target = unquote(environ.get("REQUEST_URI", environ["PATH_INFO"]))
            self.requests.append(f"{environ['REQUEST_METHOD']} {target}")
            return application(environ, start_response)

        self.port = free_port()
        self._make = lambda: make_server(
            "127.0.0.1", self.port, recorded, threaded=True, request_handler=Quiet
        )
        self.start()

    def start(self) -> None:
        self._server = self._make()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No longer listen; what is in the buckets stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """The usual variables that lead here."""
        return KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def new_bucket(self) -> str:
        """The name of an empty bucket."""
        from pyarrow import fs

        name = f"bucket-{uuid.uuid4().hex[:12]}"
        maker = fs.S3FileSystem(
            access_key="testing",
            secret_key="testing",
            region="us-east-1",
            endpoint_override=f"http://127.0.0.1:{self.port}",
            allow_bucket_creation=True,
        )
        maker.create_dir(name)
        return name
