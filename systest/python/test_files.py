"""Files: every form of reading and writing, listings, links, metadata, sizes."""

import concurrent.futures
import gzip
import hashlib
import io
import os
import random
import time
import uuid
from datetime import datetime, timezone

import httpx
import pytest
from e2b import (
    AuthenticationException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    SandboxException,
)


def sha256_in_guest(sandbox, path):
    return sandbox.commands.run(f"sha256sum < '{path}'", timeout=100).stdout.split()[0]


def stat(sandbox, path, form="%s %U %G %a"):
    return sandbox.commands.run(f"stat -c '{form}' '{path}'", user="root").stdout.strip()


def test_write_and_read_in_every_form(sbx, place):
    text = "line\nünïcödé € 😀\n"
    info = sbx.files.write(f"{place}/t", text)
    assert (info.name, info.path, info.type, info.metadata) == ("t", f"{place}/t", FileType.FILE, None)
    assert sbx.files.read(f"{place}/t") == text
    assert sbx.files.read(f"{place}/t", format="bytes") == text.encode()
    assert b"".join(sbx.files.read(f"{place}/t", format="stream")) == text.encode()
    assert stat(sbx, f"{place}/t") == f"{len(text.encode())} user user 644"

    every = bytes(range(256)) * 10
    for name, data in {"bytes": every, "io": io.BytesIO(every), "iterable": (every[i : i + 100] for i in range(0, 2560, 100))}.items():
        sbx.files.write(f"{place}/{name}", data)
        assert sbx.files.read(f"{place}/{name}", format="bytes") == every
    sbx.files.write(f"{place}/octet", every, use_octet_stream=True)
    assert sbx.files.read(f"{place}/octet", format="bytes") == every


def test_overwrite_is_whole_and_keeps_the_mode(sbx, place):
    path = f"{place}/f"
    sbx.files.write(path, "a long first content")
    sbx.commands.run(f"chmod 755 {path}")
    sbx.files.write(path, "short")
    assert sbx.files.read(path) == "short"
    assert stat(sbx, path, "%a") == "755"


def test_relative_home_and_root_paths(sbx):
    name = uuid.uuid4().hex
    assert sbx.files.write(f"{name}/a", "1").path == f"/home/user/{name}/a"
    assert sbx.files.read(f"/home/user/{name}/a") == "1"
    assert sbx.files.read(f"~/{name}/a") == "1"
    assert sbx.files.write(f"{name}.txt", "2", user="root").path == f"/root/{name}.txt"
    assert stat(sbx, f"/root/{name}.txt", "%U:%G") == "root:root"
    assert stat(sbx, f"/home/user/{name}", "%U:%G:%a") == "user:user:755"
    assert sbx.files.get_info(name).path == f"/home/user/{name}"


def test_write_files(sbx, place):
    files = [{"path": f"{place}/d{n}/f{n}", "data": f"text {n}" if n % 2 else b"bytes %d" % n} for n in range(5)]
    infos = sbx.files.write_files(files)
    assert [i.path for i in infos] == [f["path"] for f in files]
    assert [i.name for i in infos] == [f"f{n}" for n in range(5)]
    for n, file in enumerate(files):
        assert sbx.files.read(file["path"]) == f"{'text' if n % 2 else 'bytes'} {n}"
    assert sbx.files.write_files([]) == []


def test_odd_names(sbx, place):
    for name in ("with space", "ünï€", "a+b&c=d%20?#", "quote\"'", "-dash", "semi;colon", "back\\slash"):
        sbx.files.write(f"{place}/{name}", name)
        assert sbx.files.read(f"{place}/{name}") == name
        assert sbx.files.get_info(f"{place}/{name}").name == name
    assert len(sbx.files.list(place)) == 7


def test_b43_gzip_is_stored_uncompressed(sbx, place, raw):
    text = "compress me " * 10_000
    sbx.files.write(f"{place}/g", text, gzip=True)
    assert stat(sbx, f"{place}/g", "%s") == str(len(text))
    assert sbx.files.read(f"{place}/g") == text
    assert sbx.files.read(f"{place}/g", gzip=True) == text
    answer = raw.get("/files", params={"path": f"{place}/g"}, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip" and answer.text == text
    packed = gzip.compress(text.encode())
    answer = raw.post(
        "/files",
        params={"path": f"{place}/h"},
        content=packed,
        headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
    )
    assert answer.status_code == 200
    assert stat(sbx, f"{place}/h", "%s") == str(len(text))
    for encoding in ("br", "zstd", "nonsense"):
        answer = raw.post(
            "/files",
            params={"path": f"{place}/i"},
            content=packed,
            headers={"Content-Type": "application/octet-stream", "Content-Encoding": encoding},
        )
        assert 400 <= answer.status_code < 500, encoding
    answer = raw.post(
        "/files",
        params={"path": f"{place}/j"},
        content=b"this is not gzip",
        headers={"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
    )
    assert 400 <= answer.status_code < 500, answer.text


def test_b44_empty_files(sbx, place):
    sbx.files.write(f"{place}/empty", "")
    sbx.files.write(f"{place}/none", b"", use_octet_stream=True)
    for name in ("empty", "none"):
        assert sbx.files.read(f"{place}/{name}") == ""
        assert sbx.files.read(f"{place}/{name}", format="bytes") == bytearray()
        assert b"".join(sbx.files.read(f"{place}/{name}", format="stream")) == b""
        assert sbx.files.get_info(f"{place}/{name}").size == 0


def test_b35_sizes_around_every_limit(sbx, place):
    for size in (0, 1, 4095, 4096, 17 << 10, 18 << 10, 19 << 10, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1 << 20):
        data = random.randbytes(size)
        sbx.files.write(f"{place}/{size}", data)
        assert sbx.files.get_info(f"{place}/{size}").size == size
        assert sbx.files.read(f"{place}/{size}", format="bytes") == data
    sums = dict(reversed(line.split("  ")) for line in sbx.commands.run("sha256sum *", cwd=place).stdout.splitlines())
    for size, digest in sums.items():
        assert digest == hashlib.sha256(sbx.files.read(f"{place}/{size}", format="bytes")).hexdigest()


def resident(sandbox):
    return int(sandbox.commands.run("awk '/VmRSS/ {print $2}' /proc/1/status", user="root").stdout) << 10


def test_b37_a_large_file_streams_up_and_down(sbx, place):
    """64 MiB with the same digest at both ends, through an agent that stays small."""
    block = random.randbytes(1 << 20)
    digest = hashlib.sha256()

    def blocks():
        for n in range(64):
            piece = n.to_bytes(4, "big") + block[4:]
            digest.update(piece)
            yield piece

    sbx.files.write(f"{place}/large", blocks(), request_timeout=100)
    assert resident(sbx) < 64 << 20
    assert sbx.files.get_info(f"{place}/large").size == 64 << 20
    assert sha256_in_guest(sbx, f"{place}/large") == digest.hexdigest()
    down = hashlib.sha256()
    for piece in sbx.files.read(f"{place}/large", format="stream"):
        down.update(piece)
    assert down.hexdigest() == digest.hexdigest()
    assert resident(sbx) < 64 << 20
    sbx.files.remove(f"{place}/large")


def test_b40_parallel_writes_into_one_new_directory(sbx, place):
    def one(n):
        return sbx.files.write(f"{place}/a/b/c/d/f{n}", str(n)).path

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(one, range(32)))
    assert len(set(paths)) == 32
    assert len(sbx.files.list(f"{place}/a/b/c/d")) == 32


def test_b41_only_new_directories_change_hands(sbx):
    name = uuid.uuid4().hex[:8]
    before = [stat(sbx, path, "%U:%a") for path in ("/", "/home", "/home/user", "/srv")]
    sbx.files.write(f"/home/user/{name}/y/z", "1")
    sbx.files.write(f"/srv/{name}/m", "1", user="root")
    assert [stat(sbx, path, "%U:%a") for path in ("/", "/home", "/home/user", "/srv")] == before
    assert stat(sbx, f"/home/user/{name}", "%U") == stat(sbx, f"/home/user/{name}/y", "%U") == "user"
    assert stat(sbx, f"/srv/{name}", "%U") == "root"
    # root writes below a directory of the user's: it stays the user's.
    sbx.files.write(f"/home/user/{name}/r/s", "1", user="root")
    assert stat(sbx, f"/home/user/{name}", "%U") == "user"
    assert stat(sbx, f"/home/user/{name}/r", "%U") == "root"


def test_what_cannot_be_read_or_written(sbx, place):
    with pytest.raises(FileNotFoundException):
        sbx.files.read(f"{place}/nothing")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        sbx.files.read(place)
    with pytest.raises(SandboxException):
        sbx.files.write(place, "x")
    with pytest.raises(SandboxException):
        sbx.files.write("/etc/not-yours", "x")
    assert not sbx.files.exists("/etc/not-yours")
    with pytest.raises(SandboxException):
        sbx.files.read("/etc/shadow")
    assert sbx.files.read("/etc/shadow", user="root")
    sbx.files.write(f"{place}/file", "x")
    with pytest.raises(SandboxException):
        sbx.files.write(f"{place}/file/below", "x")
    with pytest.raises(AuthenticationException):
        sbx.files.read(f"{place}/file", user="nobody-here")


def test_files_of_the_kernel(sbx):
    boot = sbx.files.read("/proc/sys/kernel/random/boot_id")
    assert len(boot.strip()) == 36
    assert sbx.files.read("/proc/sys/kernel/random/boot_id", format="bytes").decode() == boot
    assert "MemTotal" in sbx.files.read("/proc/meminfo")


def test_ranges(sbx, place, raw):
    sbx.files.write(f"{place}/r", "0123456789")
    path = {"path": f"{place}/r"}
    answer = raw.get("/files", params=path, headers={"Range": "bytes=2-4", "Accept-Encoding": "gzip"})
    assert (answer.status_code, answer.content, answer.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    answer = raw.get("/files", params=path, headers={"Range": "bytes=-3"})
    assert (answer.status_code, answer.content) == (206, b"789")
    answer = raw.get("/files", params=path, headers={"Range": "bytes=20-"})
    assert answer.status_code == 416
    answer = raw.get("/files", params=path)
    assert answer.headers["content-disposition"].startswith("inline")
    later = raw.get("/files", params=path, headers={"If-Modified-Since": answer.headers["last-modified"]})
    assert later.status_code == 304


def test_get_info(sbx, place):
    sbx.files.write(f"{place}/f", "12345")
    info = sbx.files.get_info(f"{place}/f")
    assert (info.name, info.path, info.type, info.size) == ("f", f"{place}/f", FileType.FILE, 5)
    assert (info.mode, info.permissions, info.owner, info.group) == (0o644, "-rw-r--r--", "user", "user")
    assert info.symlink_target is None and info.metadata is None
    assert abs((datetime.now(timezone.utc) - info.modified_time).total_seconds()) < 10
    info = sbx.files.get_info(place)
    assert (info.type, info.mode, info.permissions) == (FileType.DIR, 0o755, "drwxr-xr-x")
    assert sbx.files.get_info("/tmp").permissions == "dtrwxrwxrwx"
    with pytest.raises(FileNotFoundException):
        sbx.files.get_info(f"{place}/none")


def test_links(sbx, place):
    sbx.commands.run("mkdir d; echo hi > d/f; ln -s d/f l; ln -s d ld; ln -s nowhere broken; ln -s loop loop", cwd=place)
    info = sbx.files.get_info(f"{place}/l")
    # The SDK tells a link from what it leads to; the mode is the target's.
    assert (info.type, info.mode, info.symlink_target) == (FileType.SYMLINK, 0o644, f"{place}/d/f")
    assert info.permissions == "Lrwxrwxrwx"
    info = sbx.files.get_info(f"{place}/ld")
    assert (info.type, info.symlink_target) == (FileType.SYMLINK, f"{place}/d")
    assert sbx.files.read(f"{place}/l") == "hi\n"
    assert [e.path for e in sbx.files.list(f"{place}/ld")] == [f"{place}/ld/f"]
    assert sbx.files.exists(f"{place}/broken")
    with pytest.raises(FileNotFoundException):
        sbx.files.read(f"{place}/broken")
    names = [e.name for e in sbx.files.list(place, depth=3)]
    assert "l" in names and "ld" in names


def test_b56_paths_that_are_links_or_no_files(sbx, place):
    sbx.commands.run(
        "mkdir dir; echo t > target; ln -s target link; ln -s dir dirlink; ln -s new dangling; ln -s loop loop; "
        "ln -s /etc/passwd etc; ln -s /etc etcdir; mkfifo fifo; ln -s /dev/zero zero",
        cwd=place,
    )
    sbx.files.write(f"{place}/link", "through")
    assert sbx.files.read(f"{place}/target") == "through"
    sbx.files.write(f"{place}/dirlink/f", "inside")
    assert sbx.files.read(f"{place}/dir/f") == "inside"
    sbx.files.write(f"{place}/dangling", "made")
    assert sbx.files.read(f"{place}/new") == "made"
    before = sbx.files.read("/etc/passwd")
    for path in ("etc", "etcdir/pando-test", "loop"):
        with pytest.raises(SandboxException):
            sbx.files.write(f"{place}/{path}", "x")
    assert sbx.files.read("/etc/passwd") == before
    with pytest.raises(SandboxException):
        sbx.files.read(f"{place}/loop")
    # A pipe without a writer, or an endless device, must not hold the agent up.
    for path in ("fifo",):
        with pytest.raises(SandboxException):
            sbx.files.read(f"{place}/{path}", request_timeout=10)
        with pytest.raises(SandboxException):
            sbx.files.write(f"{place}/{path}", "x", request_timeout=10)
    assert sbx.files.get_info(f"{place}/fifo").name == "fifo"
    sbx.files.remove(f"{place}/link")
    assert sbx.files.read(f"{place}/target") == "through"
    sbx.files.remove(f"{place}/dirlink")
    assert sbx.files.read(f"{place}/dir/f") == "inside"
    moved = sbx.files.rename(f"{place}/etcdir", f"{place}/moved")
    assert moved.symlink_target == "/etc" and sbx.files.exists("/etc/passwd")
    sbx.files.remove(f"{place}/moved")
    assert sbx.files.exists("/etc/passwd")
    assert sbx.is_running()


def test_list(sbx, place):
    sbx.commands.run("mkdir -p b/x/deep a .hidden; touch b/x/1 b/2 a/3 c", cwd=place)
    paths = [e.path.removeprefix(place + "/") for e in sbx.files.list(place, depth=3)]
    assert paths == [".hidden", "a", "a/3", "b", "b/2", "b/x", "b/x/1", "b/x/deep", "c"]
    assert [e.name for e in sbx.files.list(place)] == [".hidden", "a", "b", "c"]
    assert [e.type for e in sbx.files.list(place)] == [FileType.DIR] * 3 + [FileType.FILE]
    with pytest.raises(InvalidArgumentException):
        sbx.files.list(place, depth=0)
    with pytest.raises(FileNotFoundException):
        sbx.files.list(f"{place}/none")
    with pytest.raises(InvalidArgumentException):
        sbx.files.list(f"{place}/c")


def test_b52_a_large_directory_is_complete_and_costs_nothing(sbx, place):
    sbx.commands.run("seq 5000 | xargs touch", cwd=place, timeout=60)
    sbx.files.list(place)
    before = resident(sbx)
    for depth in (1, 3, 1):
        names = [e.name for e in sbx.files.list(place, depth=depth)]
        assert len(names) == 5000 and len(set(names)) == 5000
    assert resident(sbx) < before + (24 << 20)


def test_make_dir_exists_rename_remove(sbx, place):
    assert sbx.files.make_dir(f"{place}/a/b/c") is True
    assert sbx.files.make_dir(f"{place}/a/b/c") is False
    assert stat(sbx, f"{place}/a/b", "%U %a") == "user 755"
    sbx.files.write(f"{place}/f", "1")
    with pytest.raises(InvalidArgumentException):
        sbx.files.make_dir(f"{place}/f")
    assert sbx.files.exists(f"{place}/f") and not sbx.files.exists(f"{place}/g")
    info = sbx.files.rename(f"{place}/f", f"{place}/new/parents/g")
    assert info.path == f"{place}/new/parents/g" and info.name == "g"
    assert not sbx.files.exists(f"{place}/f")
    sbx.files.rename(f"{place}/a", f"{place}/z")
    assert sbx.files.exists(f"{place}/z/b/c")
    with pytest.raises(FileNotFoundException):
        sbx.files.rename(f"{place}/none", f"{place}/x")
    sbx.files.remove(f"{place}/z")
    assert not sbx.files.exists(f"{place}/z")
    sbx.files.remove(f"{place}/z")
    sbx.files.remove(f"{place}/new/parents/g")
    assert not sbx.files.exists(f"{place}/new/parents/g")


def test_metadata(sbx, place):
    path = f"{place}/m"
    info = sbx.files.write(path, "1", metadata={"Author": "x", "purpose": "a b=c"})
    assert info.metadata == {"author": "x", "purpose": "a b=c"}
    assert sbx.files.get_info(path).metadata == {"author": "x", "purpose": "a b=c"}
    assert sbx.files.list(place)[0].metadata == {"author": "x", "purpose": "a b=c"}
    moved = sbx.files.rename(path, f"{place}/n")
    assert moved.metadata == {"author": "x", "purpose": "a b=c"}
    sbx.files.write(f"{place}/n", "2", metadata={"other": "y"})
    assert sbx.files.get_info(f"{place}/n").metadata == {"other": "y"}
    sbx.files.write(f"{place}/n", "3")
    assert sbx.files.get_info(f"{place}/n").metadata is None
    sbx.commands.run(f"python3 -c \"import os; os.setxattr('{place}/n', 'user.e2b.set', b'inside')\"")
    assert sbx.files.get_info(f"{place}/n").metadata == {"set": "inside"}
    both = sbx.files.write_files(
        [{"path": f"{place}/p", "data": "1"}, {"path": f"{place}/q", "data": "2"}], metadata={"k": "v"}
    )
    assert [i.metadata for i in both] == [{"k": "v"}, {"k": "v"}]


def test_b47_bad_metadata_is_named(sbx, place, raw):
    for metadata in ({"k": "a\n"}, {"k": "é"}, {"A B": "x"}, {"k": "x" * 8192}):
        with pytest.raises(InvalidArgumentException):
            sbx.files.write(f"{place}/bad", "1", metadata=metadata)
    answer = raw.post(
        "/files",
        params={"path": f"{place}/bad"},
        content=b"1",
        headers=[("Content-Type", "application/octet-stream"), (b"X-Metadata-Colour", "é".encode())],
    )
    assert answer.status_code == 400 and "colour" in answer.text.lower(), answer.text
    assert not sbx.files.exists(f"{place}/bad")
    sbx.files.write(f"{place}/good", "1", metadata={"Author": "x"})
    assert sbx.files.get_info(f"{place}/good").metadata == {"author": "x"}


def test_b46_signatures(sbx, place):
    """Zero and one second do expire; nothing that was signed can be altered."""
    path = f"{place}/signed"
    sbx.files.write(path, "secret")
    zero = sbx.download_url(path, use_signature_expiration=0)
    one = sbx.download_url(path, use_signature_expiration=1)
    one_up = sbx.upload_url(path, use_signature_expiration=1)
    never = sbx.download_url(path)
    up = sbx.upload_url(path)
    time.sleep(2.1)
    # The SDK drops the expiry from the URL when it is zero but signs it: it can match nothing.
    for url in (zero, one):
        assert httpx.get(url).status_code == 401, url
    assert httpx.post(one_up, files={"file": ("f", b"x")}).status_code == 401
    assert httpx.get(never).text == "secret"
    assert httpx.get(never.replace("signed", "other")).status_code == 401
    assert httpx.get(never + "&username=root").status_code == 401
    assert httpx.get(up).status_code == 401
    assert httpx.post(never, files={"file": ("f", b"x")}).status_code == 401
    assert sbx.files.read(path) == "secret"


def test_signed_urls_need_no_header(sbx, place):
    path = f"{place}/dir with space/é.txt"
    answer = httpx.post(sbx.upload_url(path), files={"file": (None, b"uploaded")})
    assert answer.status_code == 200
    assert answer.json() == [{"name": "é.txt", "path": path, "type": "file"}]
    answer = httpx.get(sbx.download_url(path, use_signature_expiration=60))
    assert (answer.status_code, answer.content) == (200, b"uploaded")
    answer = httpx.post(sbx.upload_url("hello.txt", user="root"), files={"file": (None, b"x")})
    assert answer.json() == [{"name": "hello.txt", "path": "/root/hello.txt", "type": "file"}]
    answer = httpx.post(sbx.upload_url("hello.txt"), files={"file": ("hello.txt", b"x")})
    assert answer.json() == [{"name": "hello.txt", "path": "/home/user/hello.txt", "type": "file"}]


def test_an_expired_url_says_so(sbx):
    url = sbx.download_url("/etc/hostname", use_signature_expiration=-10)
    answer = httpx.get(url)
    assert answer.status_code == 401
    assert answer.json() == {"code": 401, "message": "signature is already expired"}


def test_no_space(create):
    """A full disk is an error of its own, and the sandbox lives on."""
    sandbox = create()
    sandbox.commands.run("fallocate -l $(( $(df --output=avail -B1 / | tail -1) - 1048576 )) /filler || true", user="root")
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("/home/user/much", b"x" * (8 << 20))
    sandbox.files.remove("/filler", user="root")
    sandbox.files.write("/home/user/much", b"x" * (8 << 20))
    assert sandbox.files.get_info("/home/user/much").size == 8 << 20


async def test_async_files(asbx, place):
    async def blocks():
        for n in range(10):
            yield b"%d" % n * 1000

    whole = b"".join(b"%d" % n * 1000 for n in range(10))
    await asbx.files.write(f"{place}/a", blocks())
    assert await asbx.files.read(f"{place}/a", format="bytes") == whole
    stream = await asbx.files.read(f"{place}/a", format="stream")
    assert b"".join([piece async for piece in stream]) == whole
    infos = await asbx.files.write_files([{"path": f"{place}/{n}", "data": str(n)} for n in range(3)])
    assert [i.name for i in infos] == ["0", "1", "2"]
    assert [e.name for e in await asbx.files.list(place)] == ["0", "1", "2", "a"]
    assert await asbx.files.exists(f"{place}/a")
    assert await asbx.files.make_dir(f"{place}/d") and not await asbx.files.make_dir(f"{place}/d")
    assert (await asbx.files.rename(f"{place}/a", f"{place}/b")).name == "b"
    assert (await asbx.files.get_info(f"{place}/b")).size == len(whole)
    await asbx.files.remove(f"{place}/b")
    with pytest.raises(FileNotFoundException):
        await asbx.files.read(f"{place}/b")


def test_no_file_descriptors_leak(sbx, place):
    count = "ls /proc/1/fd | wc -l"
    before = int(sbx.commands.run(count, user="root").stdout)
    for n in range(30):
        sbx.files.write(f"{place}/{n}", os.urandom(100))
        sbx.files.read(f"{place}/{n}")
    assert int(sbx.commands.run(count, user="root").stdout) <= before + 6
