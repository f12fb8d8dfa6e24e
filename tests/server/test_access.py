"""Who may come in: keys, origins, hosts; and what goes out with every answer."""

import contextlib
import json
import logging
import re
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from starlette.datastructures import Headers

import penstock
from penstock.cli._model import note
from penstock.server.guard import Access, client_of, host_name, hosts_of, is_loopback
from penstock.server.logs import JsonLines, LogStream, TextLines
from penstock.server.static import FILES
from tests.server.common import CHAT, PROMPT, error_of, serving, wait_for

KEYS = ("first-key", "zweiter Schlüssel 🔑")


@pytest.fixture(scope="module")
def locked(llm):
    access = Access(keys=KEYS, origins=("https://good.example",))
    with serving(llm, access=access) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}".encode().decode("latin-1")}


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/props", "/openapi.json", "/nope"])
def test_nothing_is_told_without_a_key(locked, path):
    for headers in (
        {},
        bearer("wrong"),
        bearer("first-ke"),
        bearer("first-key-and-more"),
        {"authorization": "Bearer"},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"x-api-key": "no"},
        {"cookie": "key=first-key"},
    ):
        response = locked.client.get(path, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    for query in ("key=first-key", "api_key=first-key", "access_token=first-key"):
        assert locked.client.get(f"{path}?{query}").status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(locked, key):
    headers = {name: value.encode("latin-1") for name, value in bearer(key).items()}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.get("/v1/models", headers={"x-api-key": key.encode()}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/health", "/style.css", "/app.js", "/icon.svg"])
def test_the_page_and_health_are_public(locked, path):
    assert locked.client.get(path).status_code == 200


def test_keys_are_not_shown():
    assert "hush" not in f"{Access(keys=('hush',))}"


def test_a_client_is_a_key_else_an_address():
    assert client_of(1, ("10.0.0.1", 5)) == client_of(1, ("10.0.0.2", 6)) != client_of(0, ("10.0.0.1", 5))
    assert client_of(None, ("10.0.0.1", 5)) == client_of(None, ("::ffff:10.0.0.1", 6)) == "10.0.0.1"
    assert client_of(None, ("2001:db8::1", 5)) == client_of(None, ("2001:db8::2:1:1:1", 5)) == "2001:db8::/64"
    assert client_of(None, ("2001:db8::1", 5)) != client_of(None, ("2001:db8:0:1::1", 5))
    assert client_of(None, None) == "unknown"
    assert Access(keys=("a", "b")).check_key(Headers({"x-api-key": "b"})) == 1
    assert Access().check_key(Headers({"x-api-key": "b"})) is None  # a key that is not looked at tells nobody apart


def test_keys_are_compared_whole_and_all_of_them(monkeypatch):
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    Access(keys=("a", "b" * 100, "c")).check_key(Headers({"authorization": "Bearer a"}))
    assert compared == [(32, 32)] * 3


def test_pages_of_other_sites_are_turned_away(locked):
    headers = bearer("first-key") | {"origin": "https://evil.example"}
    for response in (
        locked.client.get("/v1/models", headers=headers),
        locked.client.get("/health", headers={"origin": "https://evil.example"}),
        locked.client.get("/health", headers={"origin": "null"}),
        locked.client.options(CHAT, headers=headers | {"access-control-request-method": "POST"}),
    ):
        assert response.status_code == 403 and error_of(response)["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


def test_allowed_sites_and_the_page_itself_come_in(locked):
    asked = {"origin": "https://good.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type, x-stainless-os, x-evil"
    preflight = locked.client.options(CHAT, headers=asked)  # a browser sends no key with it
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    allowed = preflight.headers["access-control-allow-headers"]
    assert "authorization" in allowed and "x-stainless-os" in allowed and "evil" not in allowed
    response = locked.client.get("/v1/models", headers=bearer("first-key") | {"origin": "https://good.example"})
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    assert response.headers["vary"] == "Origin"
    own = locked.client.get("/health", headers={"origin": locked.url})
    assert own.status_code == 200


def test_a_star_lets_every_site_in(llm):
    with serving(llm, access=Access(origins=("*",))) as place:
        response = place.client.get("/health", headers={"origin": "https://any.example"})
        assert response.headers["access-control-allow-origin"] == "*"


OTHER_NAMES = r"""
evil.example 127.0.0.1.evil.example localhost.evil 169.254.1.1 [::2] [localhost]evil.com [localhost] [::1]evil.com [::1
::1] [::1]:x [::1]80 [127.0.0.1] [] localhost:80:80 localhost:abc localhost:-1 user@localhost evil.com/localhost
localhost/evil.com evil.com#.localhost evil.com?.localhost a@b.localhost evil.com:80.localhost .localhost localhost.
localhost,evil.com localhost\evil.com %6cocalhost
""".split()


@pytest.mark.parametrize("host", [*OTHER_NAMES, "", "local host", "evil.com\t.localhost"])
def test_other_names_for_this_machine_are_turned_away(place, host):
    response = place.client.get("/health", headers={"host": host})
    assert response.status_code == 403 and error_of(response)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:99", "localhost:", "127.0.0.1:8080", "[::1]:8080", "[::1]", "[0:0::1]", "chat.localhost"],
)
def test_names_of_this_machine_come_in(place, host):
    assert place.client.get("/health", headers={"host": host}).status_code == 200


def test_hosts_follow_from_where_the_server_listens():
    assert hosts_of("0.0.0.0") is None and hosts_of("127.0.0.1", ["*"]) is None
    assert hosts_of("127.0.0.1", ["Chat.Example"]) >= {"localhost", "::1", "chat.example"}
    assert hosts_of("0.0.0.0", ["chat.example"]) >= {"localhost", "chat.example"}
    assert [is_loopback(h) for h in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")] == [True] * 5
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
    assert host_name("[::1]:80") == "::1" and host_name("a.B:80") == "a.b" and host_name("::1") == "::1"
    assert host_name("[localhost]evil.com") is None


def test_the_page_carries_a_strict_policy(place):
    response = place.client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "frame-ancestors 'none'" in policy and response.headers["x-frame-options"] == "DENY"
    for path in ("/", "/app.js", "/style.css", "/health", "/nope"):
        headers = place.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["x-request-id"].startswith("req_") and "server" not in headers
    for path in (path for path in FILES if "/vendor/" not in path):
        text = place.client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in text and "//cdn" not in text and 'src="http' not in text and "url(http" not in text


def test_the_pages_files_are_whole_and_sent_once(place):
    kinds = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "woff2": "font/woff2"}
    for path, file in FILES.items():
        response = place.client.get(path)
        assert response.content == file.read_bytes() and "content-security-policy" in response.headers
        assert response.headers["content-type"] == kinds.get(file.suffix[1:], response.headers["content-type"])
        again = place.client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert again.headers["content-security-policy"] == response.headers["content-security-policy"]
    assert place.client.get("/vendor/katex/LICENSE").status_code == 404
    counted = place.client.get("/metrics").text
    assert 'path="/",status="304"' in counted and "vendor" not in counted and "app.js" not in counted
    assert sum(file.stat().st_size for file in FILES.values()) < 1_000_000


def test_vendored_libraries_come_with_their_licences():
    folder = Path(penstock.__file__).parent / "server/page/vendor"
    notice = Path(__file__).parents[2] / "NOTICE"
    for library in (*folder.iterdir(), folder / "katex/fonts"):
        assert "Copyright" in (library / "LICENSE").read_text()
        assert f"src/penstock/server/page/vendor/{library.relative_to(folder)}" in notice.read_text()


def test_the_log_has_no_prompts_and_no_keys(locked, caplog):
    with caplog.at_level(logging.DEBUG):
        headers = bearer("first-key")
        secret = [{"role": "user", "content": "my secret prompt"}]
        locked.client.post(CHAT, json={"messages": secret, "max_tokens": 2}, headers=headers)
        locked.client.post(CHAT, json={"messages": secret, "max_tokens": -2}, headers=headers)
        locked.client.post(CHAT, content=b'{"my secret prompt"', headers=headers)
        locked.client.get("/v1/models?api_key=first-key")
        locked.client.get("/v1/models", headers=bearer("wrong-secret"))
        locked.client.post("/tokenize", json={"content": "my secret prompt"}, headers=headers)
    lines = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("penstock", "uvicorn"))
    )
    assert f"POST {CHAT} 200" in lines and "GET /v1/models 401" in lines and "tokens in" in lines
    assert "secret" not in lines and "first-key" not in lines


def server_records(caplog):
    """Written when an answer is complete, which its reader may know a little earlier."""
    return [record for record in caplog.records if record.name == "penstock.server"]


@pytest.mark.parametrize("given", ["a", "Run-7_b.2", "x" * 64])
def test_a_request_id_of_the_client_is_kept_in_answer_and_log(locked, caplog, given):
    with caplog.at_level(logging.INFO):
        headers = {"x-request-id": given}
        response = locked.client.post(
            CHAT, json={"messages": PROMPT, "max_tokens": 2}, headers=bearer(KEYS[0]) | headers
        )
        assert response.headers["x-request-id"] == given
        assert locked.client.get("/v1/models", headers=headers).headers["x-request-id"] == given
        wait_for(lambda: len(server_records(caplog)) == 2)
    answered, refused = server_records(caplog)
    assert answered.getMessage().startswith(f"{given} key 0 POST {CHAT} 200 ")
    assert refused.getMessage().startswith(f"{given} 127.0.0.1 GET /v1/models 401 ")
    fields = json.loads(JsonLines().format(answered))
    wanted = {"request_id": given, "client": "key 0", "method": "POST", "path": CHAT, "status": 200, "level": "info"}
    assert wanted.items() <= fields.items() and fields["completion_tokens"] == 2 and fields["prompt_tokens"] > 2
    assert abs(datetime.fromisoformat(fields["time"]).timestamp() - time.time()) < 60
    assert TextLines().format(answered) == f"{fields['time']} {answered.getMessage()}"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", "a/b", "é".encode(), 'a"b'])
def test_other_request_ids_are_replaced(place, caplog, given):
    with caplog.at_level(logging.INFO):
        found = place.client.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"]
        wait_for(lambda: server_records(caplog))
    assert re.fullmatch(r"req_[0-9a-f]{24}", found) and found in caplog.text


def test_whatever_is_printed_becomes_lines_of_a_json_log(caplog):
    with caplog.at_level(logging.INFO), contextlib.redirect_stderr(LogStream()):
        print("one\n\n  two", file=sys.stderr)
        print("thr", end="", file=sys.stderr)
        print("ee", file=sys.stderr)
        note("a remark " * 30)
    assert [record.getMessage() for record in caplog.records] == ["one", "two", "three", ("a remark " * 30).strip()]


def test_what_fails_unexpectedly_is_in_the_log_and_not_in_the_answer(place, caplog, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"a secret: {PROMPT}")

    monkeypatch.setattr(place.service, "chat", broken)
    response = place.chat()
    assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text and "fox" not in caplog.text
    assert "RuntimeError" in caplog.text and "in broken" in caplog.text
    monkeypatch.undo()
    assert place.chat().status_code == 200
