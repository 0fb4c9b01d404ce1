"""Frames, environments, calls, records and queue entries that nobody meant.

Bounded in the usual run; FUZZ_EXAMPLES=100000 makes it a longer one. A failure is
kept as an ``@example`` of the test it broke.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from unit.hostport.world import Helper, World, pod

from cni_hostport import shim
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.asked import CallRequest
from cni_hostport.helper.connection import Connection, Request, close_descriptors
from cni_hostport.helper.core import Core
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.parts import _parse
from cni_hostport.host import queue
from cni_hostport.host.records import RecordStore

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

FRAME = shim.pack_request(b"C", 3, {b"CNI_COMMAND": b"DEL", b"CNI_ARGS": b"a=b"}, b"{}")


def served(core: Core, request: CallRequest) -> Answer:
    """The answer, counted and logged as well."""
    outcome = core.handle(request)
    outcome.note()
    return outcome.answer


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """The data with pieces cut out, put in, doubled or changed."""

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        out = data
        for at, size, new in edits:
            start = at % (len(out) + 1)
            out = out[:start] + new + out[start + size :]
        return out

    edit = st.tuples(st.integers(0, 1 << 16), st.integers(0, 20), st.binary(max_size=20))
    return st.lists(edit, min_size=1, max_size=5).map(apply)


# -- frames


async def feed(chunks: list[bytes]) -> list[Request]:
    loop = asyncio.get_running_loop()
    faults: list[object] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    client, served = socket.socketpair()
    requests: list[Request] = []

    def ready(connection: Connection, request: Request) -> None:
        requests.append(request)
        connection.answer(Answer(0, b"out"))

    connection = Connection(served, loop, ready, lambda _: None)
    connection.watch()
    for chunk in chunks:
        try:
            client.send(chunk)
        except OSError:
            break
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    client.close()
    for _ in range(5):
        await asyncio.sleep(0)
    connection.close()
    assert faults == []
    return requests


@fuzz
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=64), mutated(FRAME)), max_size=5))
@example([FRAME, FRAME])
@example([FRAME[:16], b""])
def test_frames(chunks: list[bytes]) -> None:
    for request in asyncio.run(feed([c for c in chunks if c])):
        assert request.kind in (b"C", b"O")
        close_descriptors(request)


@fuzz
@given(st.binary(max_size=200))
@example(b"=\0\0=x\0A=B=C")
def test_environment_blocks(block: bytes) -> None:
    env = shim.parse_env(block)
    packed = shim.pack_request(b"C", 0, env, b"")[shim.HEADER_SIZE :]
    assert shim.parse_env(packed) == env


@fuzz
@given(st.binary(max_size=40))
def test_headers(header: bytes) -> None:
    for parse in (shim.parse_request_header, shim.parse_response_header):
        try:
            parse(header)
        except shim.ForeignProtocol:
            continue


# -- calls

TEXT = st.one_of(st.text(max_size=20), st.sampled_from(("", "net", "eth0", "a", "web", "\udcff")))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 70000), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
MAPPING = st.fixed_dictionaries(
    {},
    optional={
        "hostPort": st.one_of(st.integers(-1, 70000), JSON),
        "containerPort": st.one_of(st.integers(1, 100), JSON),
        "protocol": st.one_of(st.sampled_from(("tcp", "UDP", "sctp", "")), JSON),
        "hostIP": st.one_of(st.sampled_from(("", "192.0.2.1", "::", "::ffff:1.2.3.4")), JSON),
    },
)
RESULT = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/run/netns/a"}],
    "ips": [{"address": "10.1.0.2/16", "interface": 1}, {"address": "fd00::2/64", "interface": 1}],
}
CONFIG = st.fixed_dictionaries(
    {"cniVersion": st.sampled_from(("1.1.0", "1.0.0", "0.4.0")), "name": st.just("net"),
     "type": st.just("cni-hostport"), "prevResult": st.just(RESULT)},
    optional={
        "runtimeConfig": st.one_of(
            st.fixed_dictionaries({"portMappings": st.lists(MAPPING, max_size=4)}), JSON),
        "portMappings": st.lists(MAPPING, max_size=2),
        "snat": st.one_of(st.booleans(), JSON), "masqAll": st.booleans(),
        "reservePorts": st.one_of(st.sampled_from(("require", "try", "no")), JSON),
        "nodeAddresses": st.one_of(st.just(["192.0.2.0/24"]), JSON),
        "excludeInterfaces": st.one_of(st.just(["eth0"]), JSON),
        "conditionsV4": st.one_of(st.lists(TEXT, max_size=3), JSON),
        "backend": st.one_of(st.sampled_from(("auto", "nftables", "iptables")), JSON),
        "cni.dev/valid-attachments": st.one_of(
            st.lists(st.fixed_dictionaries({"containerID": TEXT, "ifname": TEXT})), JSON),
    },
)  # fmt: skip
ENV = st.fixed_dictionaries(
    {"CNI_COMMAND": st.sampled_from(("ADD", "ADD", "DEL", "CHECK", "GC", "STATUS", "X", "")),
     "CNI_PATH": st.just("/opt"), "CNI_IFNAME": st.one_of(st.just("eth0"), TEXT),
     "CNI_CONTAINERID": st.one_of(st.sampled_from(("a", "b", "c")), TEXT),
     "CNI_NETNS": st.one_of(st.just("/run/netns/a"), TEXT)},
    optional={"CNI_ARGS": TEXT},
)  # fmt: skip


@fuzz
@given(st.lists(st.tuples(ENV, st.one_of(CONFIG, JSON)), min_size=1, max_size=6))
def test_calls(calls: list[tuple[dict[str, str], Any]]) -> None:
    """Any sequence of calls: an answer that a runtime can read, and books that are right."""
    with tempfile.TemporaryDirectory() as folder:
        helper = Helper(World())
        core = Core(helper.manager, Path(folder), Metrics())
        for env, config in calls:
            raw = json.dumps(config).encode()
            answer = served(core, CallRequest(env=env, stdin=raw))
            assert answer.status in (0, 1)
            if answer.status:
                error = json.loads(answer.out)
                assert error["code"] not in (0, 999), error
                assert error["msg"].isprintable()
            assert helper.consistent() == []
        again = helper.again()
        assert again.consistent() == []
        os.close(core.adds.home)


@fuzz
@given(st.binary(max_size=300), ENV)
def test_stdin_of_any_bytes(raw: bytes, env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        helper = Helper(World())
        core = Core(helper.manager, Path(folder), Metrics())
        answer = served(core, CallRequest(env=env, stdin=raw))
        assert answer.status in (0, 1)
        assert answer.status == 0 or json.loads(answer.out)["code"] != 999
        os.close(core.adds.home)


# -- records


def a_record() -> tuple[str, bytes]:
    world = World()
    Helper(world).manager.attach(pod("web", "80:80/tcp", "192.0.2.1:53:53/udp", masq_all=True))
    ((key, content),) = world.records.items()
    return key, content


KEY, CONTENT = a_record()


@fuzz
@given(st.one_of(st.binary(max_size=100), mutated(CONTENT)))
@example(CONTENT)
@example(b"[" * 100_000)
@example(CONTENT.replace(b'"version":1', b'"version":2'))
@example(CONTENT.replace(b'"index":7', b'"index":99999999999999999999'))
def test_records(content: bytes) -> None:
    """A record is read whole or not at all, and whatever is read can be worked with."""
    record = _parse(KEY, content)
    if record is None:
        return
    world = World(records={KEY: record.model_dump_json().encode()})
    try:
        helper = Helper(world)
    except OverflowError as error:
        raise AssertionError(content) from error
    if record.backend == "nftables":
        assert helper.manager.detach(KEY)
        assert world.records == {}


@fuzz
@given(st.dictionaries(
    st.one_of(st.text(max_size=12), st.from_regex(r"[a-z2-7]{16}\.(json|adding|tmp)", fullmatch=True)),
    st.binary(max_size=20), max_size=5))  # fmt: skip
def test_folders_of_records(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if name not in ("", ".", "..") and "/" not in name and "\0" not in name:
                try:
                    (Path(folder) / name).write_bytes(content)
                except (OSError, UnicodeEncodeError):
                    continue
        store = RecordStore(Path(folder))
        for key, content in store.load():
            assert files[f"{key}.json"] == content
        for key, _ in list(store.unanswered()):
            store.discard(key)


# -- the queue


@fuzz
@given(
    st.dictionaries(st.binary(min_size=1, max_size=20).filter(lambda k: b"=" not in k),
                    st.binary(max_size=20), max_size=4), st.binary(max_size=100))  # fmt: skip
def test_queued_calls_come_back_as_they_were(env: dict[bytes, bytes], stdin: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        queue.put(Path(folder), env, stdin)
        (entry,) = queue.entries(Path(folder))
        assert (dict(entry.env), entry.stdin) == (env, stdin)
        queue.remove(entry)
        queue.remove(entry)
        assert queue.names(Path(folder)) == []


ENTRY = json.dumps({"env": {"CNI_COMMAND": "DEL"}, "stdin": "e30="}).encode()


@fuzz
@given(
    st.one_of(st.binary(max_size=60), mutated(ENTRY), JSON.map(lambda j: json.dumps(j).encode()))
)
@example(ENTRY)
@example(b'{"env": {"a": 1}, "stdin": ""}')
@example(b'{"env": {"a": "\\ud800"}, "stdin": ""}')
def test_queue_entries_of_any_bytes(content: bytes) -> None:
    """Read or set aside, and a helper that comes up over them serves."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "queue").mkdir()
        (run_dir / "queue" / f"{1:020d}-1-aaaaaaaaaaaaaaaa.json").write_bytes(content)
        helper = Helper(World())
        core = Core(helper.manager, run_dir, Metrics())
        core.drain_queue()
        assert queue.names(run_dir) == []
        os.close(core.adds.home)
