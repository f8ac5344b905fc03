"""The harness itself: certificates that hold, processes that are found and ended."""

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
from loopback.superlink import free_port, listens, pairs

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SLEEPER = "import subprocess, sys, time; {start}; time.sleep(600)"
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


def test_private_keys_belong_to_their_owner(tmp_path):
    made = loopback_certificates(tmp_path)
    node = supernode_key(tmp_path / "node.key")
    assert {path.stat().st_mode & 0o777 for path in (made.key, node)} == {0o600}
    assert (tmp_path / "node.key.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_killed_process_takes_its_detached_children_along(tmp_path, mark):
    process = start(["python", "-c", SLEEPER.format(start=CHILD)], mark, tmp_path / "log", {})
    wait_for("two processes", lambda: len(marked(mark)) == 2, alive=lambda: None)
    pids = marked(mark)
    assert sorted(kill(mark)) == sorted(pids)
    assert process.wait(HANG) == -signal.SIGKILL
    assert not any(is_alive(pid) for pid in pids)


def test_orphans_are_found(tmp_path, mark):
    process = start(["python", "-c", f"import subprocess, sys; {CHILD}"], mark, tmp_path / "log", {})
    assert process.wait(HANG) == 0
    (orphan,) = marked(mark)
    assert kill(mark) == [orphan]


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


def test_a_program_that_is_not_there_is_named(tmp_path, mark):
    with pytest.raises(FedmeritError, match=r"flower-nothing does not exist: is flwr installed"):
        start(["flower-nothing"], mark, tmp_path / "log", {})


def test_waiting_ends_and_says_for_what():
    with pytest.raises(FedmeritError, match="rain: did not happen within 0 s"):
        wait_for("rain", lambda: False, deadline=0.2, alive=lambda: None)


def test_ports_and_settings():
    port = free_port()
    assert not listens(port)
    with socket.create_server(("127.0.0.1", port)):
        assert listens(port)
    with pytest.raises(FedmeritError, match="name: no quote"):
        pairs({"name": 'the "best"'})
