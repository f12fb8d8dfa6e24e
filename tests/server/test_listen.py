"""Unix sockets and TLS."""

import contextlib
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys

import httpx
import pytest

from penstock.errors import InvalidArgument, PenstockError
from penstock.server.guard import Access
from penstock.server.listen import bind_unix, removed_at_end, tls_context
from penstock.server.run import background
from penstock.server.service import Options, Service
from tests.cli.common import call
from tests.server.common import CHAT, PROMPT, wait_for

SHORT = {"messages": PROMPT, "max_tokens": 3}


@pytest.fixture
def service(llm):
    made = Service(Options())
    made.load(lambda _: (llm, {}))
    return made


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key, the key of another, one with a password, and both in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("pems")
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost".split()
    for name in ("right", "wrong"):
        files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
        subprocess.run([*new, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True)
    locked = ["-in", f"{folder}/right.key", "-out", f"{folder}/locked.key", "-aes256", "-passout", "pass:abcd"]
    subprocess.run(["openssl", "ec", *locked], check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "right.pem").read_text() + (folder / "right.key").read_text())
    (folder / "text.key").write_text("no key")
    return folder


def test_a_unix_socket_answers_and_is_for_its_owner_alone(service, tmp_path):
    path = tmp_path / "server.sock"
    bound = bind_unix(str(path), 0o600)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    transport = httpx.HTTPTransport(uds=str(path))
    with background(service, Access(hosts=None), bound=bound) as url:
        with httpx.Client(transport=transport, base_url=url, timeout=60) as client:
            assert client.post(CHAT, json=SHORT).json()["usage"]["completion_tokens"] == 3
            with client.stream("POST", CHAT, json=SHORT | {"stream": True}) as response:
                assert "data: [DONE]" in list(response.iter_lines())
        with pytest.raises(PenstockError, match="is in use"):
            bind_unix(str(path), 0o600)


def test_the_program_listens_on_a_unix_socket_and_removes_it(tmp_path):
    path = tmp_path / "server.sock"
    command = [sys.executable, "-m", "penstock", "serve", "--uds", str(path), "--uds-mode", "660"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert f"listens on unix:{path} and loads demo" in process.stderr.readline()
        assert stat.S_IMODE(path.lstat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
            assert client.get("/health").json()["status"] in ("loading", "ok")
            wait_for(lambda: client.get("/health").status_code == 200, 240)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and "demo is ready" in rest and not path.exists()
    finally:
        process.kill()
        process.wait()


def test_a_stale_socket_is_replaced_and_other_files_are_not(tmp_path):
    path = tmp_path / "server.sock"
    with bind_unix(str(path), 0o600):
        pass
    assert path.exists()  # nothing answers there any more
    with bind_unix(str(path), 0o660) as bound, removed_at_end(bound):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(PenstockError, match="is no socket"):
        bind_unix(str(path), 0o600)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(PenstockError, match="is no socket"):
        bind_unix(str(link), 0o600)
    with pytest.raises(PenstockError, match="too long"):
        bind_unix(str(tmp_path / ("x" * 120)), 0o600)
    with pytest.raises(PenstockError, match="No such file"):
        bind_unix(str(tmp_path / "none" / "x"), 0o600)


def test_the_socket_of_another_server_is_left(tmp_path):
    path = tmp_path / "server.sock"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(bind_unix(str(path), 0o600))
        with removed_at_end(first):
            path.unlink()
            stack.enter_context(bind_unix(str(path), 0o600))
        assert path.exists()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")  # an old client is what is tried
@pytest.mark.parametrize("names", [("right.pem", "right.key"), ("both.pem", None)], ids=["two files", "one file"])
def test_tls_answers_from_1_2_on(service, pems, names):
    certificate, key = (str(pems / name) if name is not None else None for name in names)
    assert certificate is not None
    assert tls_context(certificate, key).minimum_version == ssl.TLSVersion.TLSv1_2
    trusted = ssl.create_default_context(cafile=str(pems / "right.pem"))
    with background(service, Access(), tls=tls_context(certificate, key)) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=trusted, base_url=url, timeout=60) as client:
            assert client.post(CHAT, json=SHORT).json()["usage"]["completion_tokens"] == 3
            with client.stream("POST", CHAT, json=SHORT | {"stream": True}) as response:
                assert "data: [DONE]" in list(response.iter_lines())
        host, port = url.removeprefix("https://").split(":")
        for version, works in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(pems / "right.pem")
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = version
            context.set_ciphers("ALL:@SECLEVEL=0")
            with socket.create_connection((host, int(port)), timeout=20) as made:
                try:
                    with context.wrap_socket(made, server_hostname=host) as spoken:
                        assert works and spoken.version() == "TLSv1.2"
                except (ssl.SSLError, ConnectionResetError):
                    assert not works


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("wrong.key", "is the key of another certificate"),
        ("text.key", "no key that fits the certificate"),
        ("locked.key", "the key is encrypted"),
        ("none.key", "No such file or directory"),
        (".", "Is a directory"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_anything_is_loaded(capsys, monkeypatch, pems, key, message):
    monkeypatch.setattr("penstock.server.run.bind", lambda *_: pytest.fail("it went on"))
    certificate = str(pems / "right.pem")
    with pytest.raises(InvalidArgument, match=message):
        tls_context(certificate, str(pems / key))
    shown = call(capsys, "serve", "--ssl-certfile", certificate, "--ssl-keyfile", str(pems / key))
    assert shown.status == 1 and message in shown.err and shown.err.count("\n") == 1


def test_a_certificate_without_a_key_is_refused(pems):
    with pytest.raises(InvalidArgument, match="--ssl-certfile"):
        tls_context(str(pems / "right.pem"), None)
    with pytest.raises(InvalidArgument, match="--ssl-certfile: .*: No such file"):
        tls_context(str(pems / "none.pem"), str(pems / "right.key"))
