"""The way in: every form of address, every kind of server, what is said when nothing answers."""

import asyncio
import json
import socket
import textwrap
import time
from urllib.parse import urlsplit

import httpx
import pytest
import websockets
from conftest import eventually
from e2b import Sandbox

SERVER = textwrap.dedent(
    """
    import base64, hashlib, http.server, json, socket, socketserver, struct, sys, threading, time

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.headers.get("Upgrade", "").lower() == "websocket":
                return self.websocket()
            if self.path.startswith("/events"):
                return self.events()
            self.answer({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}})

        def do_POST(self):
            digest, size = hashlib.sha256(), 0
            for piece in self.pieces():
                digest.update(piece)
                size += len(piece)
            self.answer({"size": size, "sha256": digest.hexdigest()})

        def pieces(self):
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                while True:
                    size = int(self.rfile.readline(), 16)
                    if size:
                        yield self.rfile.read(size)
                    self.rfile.readline()
                    if not size:
                        return
            left = int(self.headers.get("Content-Length", 0))
            while left:
                piece = self.rfile.read(min(left, 65536))
                left -= len(piece)
                yield piece

        def answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Set-Cookie", "a=1")
            self.send_header("Set-Cookie", "b=2")
            self.end_headers()
            self.wfile.write(body)

        def events(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for n in range(3):
                text = f"data: {n}\\n\\n".encode()
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(text), text))
                self.wfile.flush()
                time.sleep(0.4)
            self.wfile.write(b"0\\r\\n\\r\\n")

        def websocket(self):
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", accept)
            self.end_headers()
            self.close_connection = True
            while True:
                first, second = self.rfile.read(2)
                size = second & 127
                if size == 126:
                    size = struct.unpack(">H", self.rfile.read(2))[0]
                elif size == 127:
                    size = struct.unpack(">Q", self.rfile.read(8))[0]
                mask = self.rfile.read(4)
                data = self.rfile.read(size)
                data = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")).to_bytes(size, "big")
                head = bytes([first]) + (
                    bytes([size]) if size < 126 else b"\\x7e" + struct.pack(">H", size) if size < 65536 else b"\\x7f" + struct.pack(">Q", size)
                )
                self.wfile.write(head + data)
                self.wfile.flush()
                if first & 15 == 8:
                    return

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True
        request_queue_size = 64

    class Server6(Server):
        address_family = socket.AF_INET6

        def server_bind(self):
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            super().server_bind()

    def serve(kind, host, port):
        threading.Thread(target=kind((host, port), Handler).serve_forever).start()

    serve(Server, "127.0.0.1", 8081)
    serve(Server, "0.0.0.0", 8082)
    serve(Server6, "::1", 8083)
    serve(Server6, "::", 8084)
    print("ready", flush=True)
    """
)
PORTS = {8081: "127.0.0.1", 8082: "0.0.0.0", 8083: "::1", 8084: "::"}


@pytest.fixture(scope="module")
def web(sbx):
    sbx.files.write("/tmp/server.py", SERVER)
    handle = sbx.commands.run("exec python3 /tmp/server.py", background=True, timeout=0)
    for out, _, _ in handle:
        if "ready" in (out or ""):
            break
    yield sbx
    handle.kill()


def by_headers(sandbox, port):
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


@pytest.mark.parametrize("port", PORTS, ids=PORTS.values())
def test_b116_every_bind_address(web, origin, port):
    answer = httpx.get(origin + "/x?y=1", headers=by_headers(web, port))
    assert answer.status_code == 200 and answer.json()["path"] == "/x?y=1"


def test_by_path(web, origin):
    answer = httpx.get(f"{origin}/sandbox/{web.sandbox_id}/8081/some/path?q=a%20b")
    assert answer.status_code == 200 and answer.json()["path"] == "/some/path?q=a%20b"
    answer = httpx.get(f"{origin}/sandbox/{web.sandbox_id}/8081/")
    assert answer.json()["path"] == "/"


def test_by_host(web, origin):
    port = urlsplit(origin).port
    for host in (f"8081-{web.sandbox_id}.localhost:{port}", f"8081-{web.sandbox_id}.localhost", f"8081-{web.sandbox_id}-00000000.localhost:{port}"):
        answer = httpx.get(origin + "/h", headers={"Host": host})
        assert answer.status_code == 200 and answer.json()["path"] == "/h"
        assert answer.json()["headers"]["host"] == host
    assert web.get_host(8081).startswith(f"8081-{web.sandbox_id}.")


def test_b113_headers_with_any_host(web, origin):
    port = urlsplit(origin).port
    for host in (f"127.0.0.1:{port}", "10.1.2.3", f"localhost:{port}", "sandbox.example.test"):
        agent = {**by_headers(web, 49983), "Host": host, "X-Access-Token": web._envd_access_token}
        assert httpx.get(origin + "/health", headers=agent).status_code == 204
        answer = httpx.get(origin + "/files", params={"path": "/etc/hostname"}, headers=agent)
        assert answer.status_code == 200, (host, answer.text)
        answer = httpx.post(origin + "/process.Process/List", json={}, headers=agent)
        assert answer.status_code == 200 and "processes" in answer.json() or answer.json() == {}
    conflict = {**by_headers(web, 8082), "Host": f"8081-{web.sandbox_id}.localhost"}
    assert httpx.get(origin, headers=conflict).status_code == 400
    for half in ({"E2b-Sandbox-Id": web.sandbox_id}, {"E2b-Sandbox-Port": "8081"}):
        assert httpx.get(origin, headers=half).status_code == 400


def test_all_headers_arrive(web, origin):
    answer = httpx.get(origin, headers={**by_headers(web, 8081), "X-Own": "1", "Cookie": "c=1; d=2"})
    seen = answer.json()["headers"]
    assert seen["x-own"] == "1" and seen["cookie"] == "c=1; d=2"
    assert seen["x-forwarded-for"].endswith("127.0.0.1")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]


def test_large_bodies(web, origin):
    import hashlib

    data = bytes(range(256)) * 4096 * 8
    digest = hashlib.sha256(data).hexdigest()
    answer = httpx.post(origin, content=data, headers=by_headers(web, 8082), timeout=60)
    assert answer.json() == {"size": len(data), "sha256": digest}
    pieces = (data[at : at + 70_000] for at in range(0, len(data), 70_000))
    answer = httpx.post(origin, content=pieces, headers=by_headers(web, 8082), timeout=60)
    assert answer.json() == {"size": len(data), "sha256": digest}


def test_events_arrive_one_by_one(web, origin):
    times = []
    with httpx.stream("GET", origin + "/events", headers=by_headers(web, 8081)) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        for line in answer.iter_lines():
            if line.startswith("data:"):
                times.append(time.monotonic())
    assert len(times) == 3
    assert all(0.25 < later - earlier < 1.2 for earlier, later in zip(times, times[1:])), times


@pytest.mark.parametrize("form", ["headers", "path", "host"])
async def test_websocket(web, origin, form):
    place = urlsplit(origin)
    url, headers = f"ws://{place.netloc}/", {}
    if form == "headers":
        headers = by_headers(web, 8081)
    elif form == "path":
        url = f"ws://{place.netloc}/sandbox/{web.sandbox_id}/8083/"
    options = {}
    if form == "host":
        url = f"ws://8082-{web.sandbox_id}.localhost:{place.port}/"
        options = {"sock": socket.create_connection((place.hostname, place.port))}
    async with websockets.connect(url, additional_headers=headers, **options) as ws:
        for message in ("hello", "ü" * 1000, b"\x00\xff" * 50_000):
            await ws.send(message)
            assert await asyncio.wait_for(ws.recv(), 10) == message


def test_a_closed_port(sbx, origin):
    answer = httpx.get(origin, headers=by_headers(sbx, 4567))
    assert answer.status_code == 502
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json() == {
        "sandboxId": sbx.sandbox_id,
        "message": "The sandbox is running but port is not open",
        "port": 4567,
        "code": 502,
    }


def test_a_dead_sandbox(create, origin):
    sandbox = create()
    sandbox.kill()
    for gone in (sandbox.sandbox_id, "inosuchsandbox0000000"):
        for port in ("8081", "49983"):
            answer = httpx.get(origin, headers={"E2b-Sandbox-Id": gone, "E2b-Sandbox-Port": port})
            assert answer.status_code == 502
            assert answer.json() == {"sandboxId": gone, "message": "The sandbox was not found", "code": 502}
    answer = httpx.get(f"{origin}/sandbox/{sandbox.sandbox_id}/8081/")
    assert answer.status_code == 502 and "was not found" in answer.json()["message"]


def test_b115_html_only_when_asked_for(sbx, origin):
    closed = by_headers(sbx, 4567)
    for accept in ("application/json", "*/*", None, "text/html;q=0.1, application/json"):
        headers = {**closed, "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/140.0 Safari/537.36"}
        with httpx.Client() as client:
            del client.headers["accept"]
            answer = client.get(origin, headers={**headers, **({"Accept": accept} if accept else {})})
        assert answer.status_code == 502 and json.loads(answer.text)["code"] == 502, accept
    answer = httpx.get(origin, headers={**closed, "Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.status_code == 502 and answer.headers["content-type"].startswith("text/html")
    assert "<html" in answer.text.lower() and sbx.sandbox_id in answer.text


def test_routes_of_the_agent_that_are_not_public(sbx, origin):
    for path in ("/init", "//init", "/%69nit", "/x/../init", "/freeze", "/upgrade"):
        answer = httpx.request("POST", origin + path, headers={**by_headers(sbx, 49983), "X-Access-Token": sbx._envd_access_token}, json={})
        assert answer.status_code == 404, path
    assert sbx.commands.run("echo fine").stdout == "fine\n"


def test_the_agent_wants_its_token(sbx, origin):
    agent = by_headers(sbx, 49983)
    assert httpx.get(origin + "/health", headers=agent).status_code == 204
    for method, path in (("POST", "/process.Process/List"), ("GET", "/files?path=/etc/hostname"), ("GET", "/envs"), ("GET", "/metrics")):
        answer = httpx.request(method, origin + path, headers=agent)
        assert answer.status_code == 401 and answer.json()["code"] == 401, path


def test_a_server_is_reached_as_soon_as_it_listens(sbx, origin):
    handle = sbx.commands.run(
        "exec python3 -uc 'import http.server; s = http.server.HTTPServer((\"127.0.0.1\", 8090), http.server.SimpleHTTPRequestHandler); print(\"up\"); s.serve_forever()'",
        background=True,
        timeout=0,
    )
    next(iter(handle))
    assert httpx.get(origin, headers=by_headers(sbx, 8090)).status_code == 200
    handle.kill()
    assert eventually(lambda: httpx.get(origin, headers=by_headers(sbx, 8090)).status_code == 502)


def test_a_client_that_leaves_is_noticed(sbx, origin):
    """The server in the sandbox sees the end of the connection, so that it can stop its work."""
    script = textwrap.dedent(
        """
        import socket
        s = socket.create_server(("127.0.0.1", 8091))
        print("up", flush=True)
        c, _ = s.accept()
        c.recv(65536)
        c.sendall(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n1\\r\\nx\\r\\n")
        print("gone" if c.recv(1) == b"" else "more", flush=True)
        """
    )
    sbx.files.write("/tmp/leave.py", script)
    handle = sbx.commands.run("exec python3 /tmp/leave.py", background=True, timeout=30)
    output = iter(handle)
    next(output)
    with httpx.stream("GET", origin, headers=by_headers(sbx, 8091)) as answer:
        assert next(answer.iter_raw()) == b"x"
    assert next(output)[0] == "gone\n"


def test_two_sandboxes_do_not_mix(create, origin):
    one, two = create(), create()
    for sandbox in (one, two):
        sandbox.files.write("/home/user/index.html", sandbox.sandbox_id)
        handle = sandbox.commands.run("exec python3 -m http.server 8000 --bind 127.0.0.1", background=True, timeout=0)
        handle.disconnect()

    def page(sandbox: Sandbox):
        answer = httpx.get(origin, headers=by_headers(sandbox, 8000))
        return answer.text if answer.status_code == 200 else None

    for sandbox in (one, two, one):
        assert eventually(lambda: page(sandbox)) == sandbox.sandbox_id
