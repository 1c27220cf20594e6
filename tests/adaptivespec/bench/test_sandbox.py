"""The sandbox against programs that try to break out. None of them may pass."""

import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adaptivespec.bench import sandbox

pytestmark = pytest.mark.usefixtures("_sandbox")


def test_a_program_that_runs_to_its_end_passes() -> None:
    assert sandbox.run("assert sum(range(5)) == 10\nprint('anything')", 60) == "passed"


def test_standard_modules_are_there() -> None:
    modules = (
        "collections, datetime, decimal, functools, hashlib, heapq, itertools, math, random, re"
    )
    assert sandbox.run(f"import {modules}\nhashlib.md5(b'x').hexdigest()", 60) == "passed"


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "def f(:",
        "raise SystemExit(0)",
        "exit(0)",
        "import os; os._exit(0)",
        "import sys; sys.stdout.write('passed'); sys.exit()",
        "import signal; signal.raise_signal(signal.SIGKILL)",
    ],
)
def test_a_program_that_ends_early_fails(program: str) -> None:
    assert sandbox.run(program, 60) == "failed"


def works_outside(program: str) -> bool:
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')",
        "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
    ],
)
def test_no_network(program: str) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        program = program.replace("PORT", str(server.server_port))
        assert works_outside(program)
        assert sandbox.run(program, 60) == "failed"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import os; assert os.system(':') == 0",
        "import subprocess; subprocess.run(['/bin/sh', '-c', ':'])",
        "import os; os.execv('/bin/sh', ['sh', '-c', ':'])",
        "import threading; threading.Thread(target=print).start()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import ctypes; assert ctypes.CDLL(None).fork() >= 0",
    ],
)
def test_no_process_and_no_thread(program: str) -> None:
    assert works_outside(program)
    assert sandbox.run(program, 60) == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "open(FILE, 'w').write('changed')",
        "open(FILE, 'a').write('changed')",
        "open(FILE, 'r+').write('changed')",
        "open(NEW, 'x')",
        "import os; os.remove(FILE)",
        "import os; os.truncate(FILE, 0)",
        "import os; os.rename(FILE, NEW)",
        "import os; os.link(FILE, NEW)",
        "import os; os.symlink('/', NEW)",
        "import os; os.mkdir(NEW)",
        "import os; os.chmod(FILE, 0)",
        "import os; os.utime(FILE, (0, 0))",
        "import tempfile; tempfile.TemporaryFile()",
        "open('/proc/self/mem', 'r+b')",
    ],
)
def test_no_file_is_written_changed_or_removed(tmp_path: Path, program: str) -> None:
    file = tmp_path / "file"
    file.write_text("as it was")
    before = file.stat()
    program = program.replace("FILE", repr(str(file))).replace("NEW", repr(str(tmp_path / "new")))
    assert sandbox.run(program, 60) == "failed"
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "as it was"
    assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert works_outside(program)


def test_the_file_of_the_verdict_cannot_grow() -> None:
    """It is the only one that is open for writing. The program passes if it cannot fill the disk,
    and leaves the file as it found it."""
    flood = """
import os, stat
def regular(fd):
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False
fd = next(fd for fd in range(64) if regular(fd))
os.lseek(fd, 1000, os.SEEK_SET)
assert os.write(fd, bytes(2**20)) <= 4096
os.lseek(fd, 0, os.SEEK_SET)
"""
    assert sandbox.run(flood, 60) == "passed"


def test_memory_is_limited() -> None:
    assert sandbox.run("x = bytearray(2**20)", 60, memory_bytes=2**28) == "passed"
    assert sandbox.run("x = bytearray(2**29)", 60, memory_bytes=2**28) == "failed"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_limited(program: str) -> None:
    assert sandbox.run(program, 1.0) == "timed out"


@pytest.mark.parametrize(
    "program",
    [
        "import resource as r; r.setrlimit(r.RLIMIT_AS, r.getrlimit(r.RLIMIT_AS))",
        "import resource as r; r.setrlimit(r.RLIMIT_CPU, r.getrlimit(r.RLIMIT_CPU))",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.setuid(os.getuid())",
        "import os; os.nice(0)",
    ],
)
def test_no_limit_is_touched_and_no_other_process_reached(program: str) -> None:
    assert works_outside(program)
    assert sandbox.run(program, 60) == "failed"


def test_the_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    assert sandbox.run("import os; assert 'HF_TOKEN' not in os.environ", 60) == "passed"


def test_nothing_of_it_is_left_in_this_process() -> None:
    sandbox.check()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
