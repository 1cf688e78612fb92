#!/usr/bin/env python3
"""An agent's day in one sandbox, through the official `e2b` SDK, unmodified; each step with its result and its time.

Needs E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL, as `pando env` prints them. Exit code 0 only if every result is right.
"""

import csv
import io
import json
import os
import random
import socket
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections import Counter

from e2b import Sandbox

ORDERS = 5000
WEB_PORT = 8000
WEB_DEADLINE = 30

CRUNCH = """\
import csv, json, statistics
from collections import defaultdict

amounts = defaultdict(list)
with open("orders.csv", newline="") as file:
    for row in csv.DictReader(file):
        amounts[row["city"]].append(int(row["cents"]))
summary = {
    city: {"orders": len(cents), "total": sum(cents), "median": statistics.median(cents)}
    for city, cents in sorted(amounts.items())
}
with open("summary.json", "w") as file:
    json.dump(summary, file)
best = max(summary, key=lambda city: summary[city]["total"])
print(best, summary[best]["total"])
"""

# Says of each address in turn whether a TCP connection to it can be made.
REACH = """\
import socket, sys

for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print("reached", address)
    except OSError as error:
        print("closed", address)
"""


class Wrong(Exception):
    """A step came to another result than it should."""


class Table:
    """Prints a line for each step as it ends, and counts those that failed."""

    def __init__(self):
        self.failed = 0
        self.begun = time.monotonic()
        print(f"{'step':<34}  {'result':<46}  {'ms':>7}")
        print(f"{'-' * 34}  {'-' * 46}  {'-' * 7}")

    def step(self, name, work):
        """Runs `work`, which returns (words for the table, value) or raises, and returns the value; None if it failed."""
        begun = time.monotonic()
        try:
            words, value = work()
        except Exception as error:  # every way to fail is a failed step
            self.failed += 1
            words, value = f"FAILED: {type(error).__name__}: {error}", None
        print(f"{name:<34}  {words:<46}  {(time.monotonic() - begun) * 1000:>7.0f}", flush=True)
        return value

    def end(self):
        total = (time.monotonic() - self.begun) * 1000
        words = "all results are right" if self.failed == 0 else f"{self.failed} failed"
        print(f"{'-' * 34}  {'-' * 46}  {'-' * 7}")
        print(f"{'in all':<34}  {words:<46}  {total:>7.0f}")


def expect(actual, wanted):
    if actual != wanted:
        raise Wrong(f"{actual!r} instead of {wanted!r}")


def orders():
    """Orders of some cities as CSV, the same in every run, and what the program in the sandbox must make of them."""
    dice = random.Random(2)
    rows = [(dice.choice(["Delta", "Fillmore", "Manti", "Richfield"]), dice.randint(100, 99_999)) for _ in range(ORDERS)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["city", "cents"])
    writer.writerows(rows)
    summary = {}
    for city in sorted({city for city, _ in rows}):
        cents = [amount for place, amount in rows if place == city]
        summary[city] = {"orders": len(cents), "total": sum(cents), "median": statistics.median(cents)}
    return text.getvalue(), summary


def main():
    missing = [name for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL") if not os.environ.get(name)]
    if missing:
        print(f"{', '.join(missing)} not set; start a server and type: eval \"$(pando env)\"", file=sys.stderr)
        return 2
    table = Table()

    def create():
        sandbox = Sandbox.create(timeout=300)
        return sandbox.sandbox_id, sandbox

    sandbox = table.step("create a sandbox", create)
    if sandbox is None:
        return 1
    try:
        work_in(sandbox, table)
    finally:
        table.step("kill it", lambda: kill(sandbox))
    table.end()
    return 0 if table.failed == 0 else 1


def work_in(sandbox, table):
    table.step("first command", lambda: first_command(sandbox))
    table.step("the machine it runs on", lambda: machine(sandbox))
    text, summary = orders()
    table.step("write data and a program", lambda: write(sandbox, text))
    table.step("run the program", lambda: crunch(sandbox, summary))
    table.step("read the file it wrote", lambda: read_summary(sandbox, summary))
    table.step("shell: sort, count, first line", lambda: shell(sandbox, text))
    table.step("start a web server in it", lambda: start_web(sandbox))
    table.step("fetch a page from it", lambda: fetch(sandbox, summary))
    table.step("host's loopback from the sandbox", lambda: host_loopback(sandbox))
    table.step("169.254.169.254 from the sandbox", lambda: metadata(sandbox))


def first_command(sandbox):
    result = sandbox.commands.run("echo $E2B_SANDBOX_ID")
    expect(result.stdout.strip(), sandbox.sandbox_id)
    return "it knows who it is", None


def machine(sandbox):
    result = sandbox.commands.run("uname -r; . /etc/os-release; echo $PRETTY_NAME; id -un; sudo id -un")
    kernel, system, user, root = result.stdout.split("\n")[:4]
    expect((user, root), ("user", "root"))
    return f"{system}, Linux {kernel}"[:46], None


def write(sandbox, text):
    sandbox.files.write("orders.csv", text)
    sandbox.files.write("crunch.py", CRUNCH)
    expect(sandbox.files.read("orders.csv"), text)
    return f"{len(text) + len(CRUNCH)} bytes in 2 files, read back equal", None


def crunch(sandbox, summary):
    result = sandbox.commands.run("python3 crunch.py")
    best = max(summary, key=lambda city: summary[city]["total"])
    expect((result.exit_code, result.stdout.strip()), (0, f"{best} {summary[best]['total']}"))
    return f"{ORDERS} orders; best: {result.stdout.strip()} cents", None


def read_summary(sandbox, summary):
    expect(json.loads(sandbox.files.read("summary.json")), summary)
    names = sorted(entry.name for entry in sandbox.files.list(".") if not entry.name.startswith("."))
    expect(names, ["crunch.py", "orders.csv", "summary.json"])
    return f"{len(summary)} cities, as computed here", None


def shell(sandbox, text):
    result = sandbox.commands.run("tail -n +2 orders.csv | cut -d, -f1 | sort | uniq -c | sort -rn | head -1")
    counts = Counter(line.split(",")[0] for line in text.splitlines()[1:])
    city, count = counts.most_common(1)[0]
    expect(result.stdout.split(), [str(count), city])
    return f"most orders: {city}, {count}", None


def start_web(sandbox):
    handle = sandbox.commands.run(f"python3 -m http.server {WEB_PORT}", background=True)
    return f"python3 -m http.server, pid {handle.pid}", None


def fetch(sandbox, summary):
    url = f"{os.environ['E2B_SANDBOX_URL'].rstrip('/')}/sandbox/{sandbox.sandbox_id}/{WEB_PORT}/summary.json"
    deadline = time.monotonic() + WEB_DEADLINE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                expect(json.load(answer), summary)
                return f"HTTP {answer.status}, the summary, through the ingress", None
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def reached(sandbox, addresses):
    sandbox.files.write("/tmp/reach.py", REACH)
    result = sandbox.commands.run(f"python3 /tmp/reach.py {' '.join(addresses)}")
    lines = result.stdout.splitlines()
    expect(len(lines), len(addresses))
    return [line for line in lines if not line.startswith("closed ")]


def host_loopback(sandbox):
    # A service such as developers have on 127.0.0.1; 10.0.2.2 is what QEMU's own network would call it.
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        expect(reached(sandbox, [f"10.0.2.2:{port}", f"127.0.0.1:{port}"]), [])
        service.setblocking(False)
        try:
            service.accept()
        except BlockingIOError:
            return "out of reach", None
    raise Wrong("a service on 127.0.0.1 had a visitor")


def metadata(sandbox):
    expect(reached(sandbox, ["169.254.169.254:80"]), [])
    return "out of reach", None


def kill(sandbox):
    sandbox.kill()
    expect(sandbox.is_running(), False)
    return "gone", None


if __name__ == "__main__":
    sys.exit(main())
