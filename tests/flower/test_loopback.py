"""The tool that runs a federation on one machine: certificates hold, processes are found and ended."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedmerit.errors import FedmeritError
from loopback.certificates import loopback_certificates, supernode_key
from loopback.processes import HANG, kill, marked, start, wait_for
from loopback.superlink import pairs

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"


@pytest.fixture
def mark():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield mark
    kill(mark)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def handshake(port, authority):
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection(("127.0.0.1", port), timeout=HANG) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return secured.version()


@pytest.fixture
def tls_server(tmp_path):
    made = loopback_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server, made.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            try:
                context.wrap_socket(peer, server_side=True).close()
            except (ssl.SSLError, OSError):
                peer.close()

    thread = threading.Thread(target=answer)
    thread.start()
    yield made, listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_the_certificate_is_good_for_loopback_and_only_under_its_own_authority(tls_server, tmp_path):
    made, port = tls_server
    assert handshake(port, made.authority) == "TLSv1.3"
    (tmp_path / "other").mkdir()
    other = loopback_certificates(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(port, other.authority)
    node = supernode_key(tmp_path / "node.key")
    assert {path.stat().st_mode & 0o777 for path in (made.key, node)} == {0o600}


@pytest.mark.parametrize("waits", [True, False], ids=["with its starter", "orphaned"])
def test_detached_children_are_found_and_killed(tmp_path, mark, waits):
    code = f"import subprocess, sys, time; {CHILD}" + ("; time.sleep(600)" if waits else "")
    process = start(["python", "-c", code], mark, tmp_path / "log", {})
    if waits:
        wait_for("two processes", lambda: len(marked(mark)) == 2, alive=lambda: None)
    else:
        assert process.wait(HANG) == 0
    pids = marked(mark)
    assert sorted(kill(mark)) == sorted(pids)
    assert len(pids) == 1 + waits
    assert process.wait(HANG) == (-signal.SIGKILL if waits else 0)
    assert not any(is_alive(pid) for pid in pids)


def test_nothing_survives_a_starter_that_is_killed(tmp_path, mark):
    code = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(TOOLS)!r}); from loopback.processes import start\n"
        "start(['python', '-c', 'import time; time.sleep(600)'], sys.argv[1], Path(sys.argv[2]), {})\n"
        "time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, mark, str(tmp_path / "log")])
    try:
        wait_for("a process", lambda: bool(marked(mark)), alive=lambda: None)
    finally:
        starter.kill()
        starter.wait()
    wait_for("its end", lambda: not marked(mark), alive=lambda: None)


def test_what_cannot_be_started_or_does_not_come_is_named(tmp_path, mark):
    with pytest.raises(FedmeritError, match="flower-nothing does not exist"):
        start(["flower-nothing"], mark, tmp_path / "log", {})
    with pytest.raises(FedmeritError, match="rain: did not happen"):
        wait_for("rain", lambda: False, deadline=0.2, alive=lambda: None)
    with pytest.raises(FedmeritError, match="name: no quote"):
        pairs({"name": 'the "best"'})
