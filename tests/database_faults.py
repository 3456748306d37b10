"""A PostgreSQL server that can be stopped and killed, a pooler before it, and volumes that fill up."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest


def processes_of(server):
    """The ids of a server's processes, its own first."""
    first = server.get_pid()
    return [first, *(int(pid) for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split())]


@contextmanager
def stopped(server):
    """Stop every process of a server, as a machine that swaps or a suspended container does."""
    pids = processes_of(server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended at once
                os.kill(pid, signal.SIGCONT)


def crash(server):
    """Kill every process of a server, so that only what reached the disk is left."""
    pids = processes_of(server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # none has time to write
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(map(_runs, pids)):
        time.sleep(0.02)
    for lock in (Path(server.pgdata) / "postmaster.pid", *Path(server.pgdata).glob(".s.PGSQL.*")):
        lock.unlink()


def _runs(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def locked(url, table):
    """Hold a lock on a table that nobody can read or write beside."""
    with psycopg.connect(url) as connection:
        connection.execute(f"lock table {table} in access exclusive mode")
        yield
        connection.rollback()


def backends(url):
    """The ids of the server processes that serve this database, but for the one that asks."""
    query = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    with psycopg.connect(url, autocommit=True) as connection:
        return {pid for (pid,) in connection.execute(query).fetchall()}


@contextmanager
def pooled(server, url, folder, size=3):
    """The URL of a pgbouncer that hands out a few connections, one transaction at a time."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("no pooler to test behind: apt install pgbouncer")
    place = psycopg.conninfo.conninfo_to_dict(url)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={place['host']} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
        f"unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = {size}\n"
        "max_client_conn = 200\n"
    )
    folder.chmod(0o755)
    as_user = [] if server.system_user is None else ["--user", server.system_user]
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen([program, *as_user, str(config)], stdout=log, stderr=log)
    try:
        yield _reached(f"postgresql://postgres@127.0.0.1:{port}/{place['dbname']}", folder / "pgbouncer.log")
    finally:
        process.terminate()
        process.wait()


def _reached(url, log):
    for _ in range(200):
        with suppress(psycopg.OperationalError):
            psycopg.connect(url, connect_timeout=2).close()
            return url
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@contextmanager
def small_volume(folder, size):
    """A file system of so many bytes at a folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here: no disk to fill")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Fill a volume to the last byte; return the file that does so."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return ballast
