"""Bad input: one JSON error that names field and value, and nothing on the node touched."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from lab.chain import Json
from lab.node import NODE4
from lab.stage import TYPE, Backend, Pod, Stage, mapping

GOOD = mapping(8081, 80)


@pytest.fixture(scope="module")
def world(backend: Backend) -> Iterator[tuple[Stage, Pod, dict[str, object]]]:
    """A node with one healthy pod; every case must leave it as it is."""
    stage = Stage(backend)
    pod = stage.pod("web", [mapping(8080, 80)])
    yield stage, pod, stage.snapshot()
    stage.close()


def bad_mapping(field: str, value: object) -> tuple[str, Json, str, object]:
    entry = {**GOOD, field: value}
    return f"{field}={value!r}", {"runtimeConfig": {"portMappings": [GOOD, entry]}}, field, value


def bad_option(field: str, value: object, shown: object = None) -> tuple[str, Json, str, object]:
    return f"{field}={value!r}", {field: value}, field, value if shown is None else shown


CASES = [
    *(bad_mapping("hostPort", v) for v in (-1, 65536, 70000, 2**40, "80", 80.5, None, [80], True)),
    *(bad_mapping("containerPort", v) for v in (0, -1, 65536, 70000, "80", 80.5, [80], {}, True)),
    *(bad_mapping("protocol", v) for v in ("icmp", "tcp\n", "tcp udp", "6", 6, ["tcp"], {"a": 1})),
    *(
        bad_mapping("hostIP", v)
        for v in (
            "nonsense",
            "300.1.1.1",
            "10.0.0.0/8",
            "1.2.3",
            "fe80::1%eth0",
            "::g",
            " ",
            "01.2.3.4",
            "127.0.0.1\n",
            7,
            ["127.0.0.1"],
        )
    ),
    *(bad_option("snat", v) for v in ("yes", 1, [])),
    *(bad_option("masqAll", v) for v in ("true", 0)),
    *(bad_option("backend", v) for v in ("ebtables", 1, "NFT")),
    *(bad_option("reservePorts", v) for v in ("maybe", True, 1)),
    *(
        bad_option("nodeAddresses", v)
        for v in ("192.0.2.0/24", ["192.0.2.0/99"], ["nonsense"], [7], {"a": 1})
    ),
    *(
        bad_option("excludeInterfaces", v)
        for v in ("kube-ipvs0", [7], ["a/b"], ["a" * 16], [""], ['quo"te\nnew'])
    ),
    *(bad_option("markMasqBit", v) for v in (32, -1, "13", 1.5)),
    *(bad_option("openForward", v) for v in ("yes", 3)),
    *(
        bad_option("conditionsV4", v)
        for v in (
            "ip saddr 10.0.0.0/8",
            [7],
            ["ip", "saddr", "1.1.1.1;", "x"],
            ["accept"],
            ["drop"],
            ["jump", "x"],
            ["a\nb"],
            ["{"],
            ["#"],
            ['"'],
            ["-j", "DROP"],
            ["ip saddr"],
        )
    ),
    *(bad_option("conditionsV6", v) for v in (["}"], ["goto", "x"], ["dnat"], ["'"])),
    *(
        bad_option("portMappings", v)
        for v in ("8080", [{"hostPort": 1}], [7], [{"hostPort": 70000, "containerPort": 80}])
    ),
    ("portMappings no list", {"runtimeConfig": {"portMappings": "80"}}, "portMappings", "80"),
    ("portMappings object", {"runtimeConfig": {"portMappings": {"a": 1}}}, "portMappings", "a"),
    ("mapping no object", {"runtimeConfig": {"portMappings": [GOOD, 80]}}, "portMappings", 80),
    ("runtimeConfig no object", {"runtimeConfig": [7]}, "runtimeConfig", 7),
    ("prevResult no object", {"prevResult": "x"}, "prevResult", "x"),
    ("ips no list", {"prevResult": {"cniVersion": "1.0.0", "ips": "x"}}, "ips", "x"),
    (
        "address bad",
        {"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.300/24"}]}},
        "address",
        "10.0.0.300/24",
    ),
    (
        "address no text",
        {"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": 5}]}},
        "address",
        5,
    ),
    ("cniVersion unknown", {"cniVersion": "9.9.9"}, "cniVersion", "9.9.9"),
    ("cniVersion no text", {"cniVersion": 1.0}, "cniVersion", 1.0),
    ("name bad", {"name": "a/b"}, "name", "a/b"),
    ("name no text", {"name": 7}, "name", 7),
]


def untouched(stage: Stage, before: dict[str, object]) -> None:
    assert stage.snapshot() == before
    assert stage.ask(NODE4, 8080).server == "web"
    assert stage.ask(NODE4, 8081).refused_at_once()


def shown(value: object) -> str:
    """The part of a value that an error must show, whatever quotes it uses."""
    inner = value
    while isinstance(inner, list | dict):
        inner = next(iter(inner.values() if isinstance(inner, dict) else inner), "")
    text = str(inner)
    return text.strip().split("\n")[0].split('"')[0][:12]


@pytest.mark.parametrize(
    ("change", "field", "value"), [c[1:] for c in CASES], ids=[str(c[0])[:60] for c in CASES]
)
def test_field_and_value_are_named(
    world: tuple[Stage, Pod, dict[str, object]], change: Json, field: str, value: object
) -> None:
    stage, pod, before = world
    at = stage.attachment("bad", [GOOD])
    config = pod.network.config(pod.network.entry(TYPE), at, pod.at.result)
    reply = stage.call("ADD", {**config, **change}, at)
    assert reply.status == 1
    words = reply.json
    assert words["code"] in ((1, 6, 7) if field == "cniVersion" else (6, 7)), words
    assert words["cniVersion"]
    assert field.lower() in reply.text.lower(), words
    assert shown(value).lower() in reply.text.lower(), words
    untouched(stage, before)


ENVIRONMENT: list[tuple[str, str | None]] = [
    ("CNI_CONTAINERID", None),
    ("CNI_CONTAINERID", "a/b"),
    ("CNI_CONTAINERID", "-a"),
    ("CNI_CONTAINERID", "abc\n"),
    ("CNI_IFNAME", None),
    ("CNI_IFNAME", "a" * 16),
    ("CNI_IFNAME", "a/b"),
    ("CNI_IFNAME", ".."),
    ("CNI_IFNAME", "a b"),
    ("CNI_NETNS", None),
    ("CNI_PATH", None),
    ("CNI_COMMAND", "NOPE"),
    ("CNI_COMMAND", "add"),
]


@pytest.mark.parametrize(("name", "value"), ENVIRONMENT)
def test_bad_environment_is_code_4(
    world: tuple[Stage, Pod, dict[str, object]], name: str, value: str | None
) -> None:
    stage, pod, before = world
    at = stage.attachment("bad", [GOOD])
    config = pod.network.config(pod.network.entry(TYPE), at, pod.at.result)
    reply = stage.call("ADD", config, at, **{name: value})
    assert (reply.status, reply.code) == (1, 4), reply
    assert name in reply.text or (value or "").strip() in reply.text
    untouched(stage, before)


def garbage() -> dict[str, bytes]:
    noise = random.Random(4)
    return {
        "empty": b"",
        "space": b" \n",
        "truncated": b'{"name": "podnet"',
        "array": b"[]",
        "text": b'"x"',
        "number": b"5",
        "trailing": b'{"name":"a","cniVersion":"1.0.0"} x',
        "byte order mark": b'\xef\xbb\xbf{"name":"a","cniVersion":"1.0.0"}',
        "NaN": b'{"name":"a","cniVersion":"1.0.0","x":NaN}',
        "1 MiB of noise": noise.randbytes(1 << 20),
        "1 MiB of letters": b"a" * (1 << 20),
        "1 MiB of brackets": b"[" * (1 << 20),
        "1 MiB of objects": b'{"a":' * (1 << 18),
        "1 MiB of zeros": bytes(1 << 20),
    }


@pytest.mark.parametrize("kind", garbage())
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "DEL"])
def test_text_that_is_no_configuration_is_code_6(
    world: tuple[Stage, Pod, dict[str, object]], kind: str, verb: str
) -> None:
    stage, pod, before = world
    reply = stage.call(verb, garbage()[kind], pod.at)
    assert (reply.status, reply.code) == (1, 6), reply.stdout[:300]
    assert len(reply.stdout) < 4096
    untouched(stage, before)


def test_bad_mapping_after_a_good_one_maps_neither(
    world: tuple[Stage, Pod, dict[str, object]],
) -> None:
    stage, pod, before = world
    at = stage.attachment("bad", [mapping(8081, 80), mapping(70000, 80)])
    reply = stage.call("ADD", pod.network.config(pod.network.entry(TYPE), at, pod.at.result), at)
    assert reply.code == 7
    assert "hostPort" in reply.text
    assert "70000" in reply.text
    untouched(stage, before)


def test_mappings_without_a_usable_address_name_the_interface(
    world: tuple[Stage, Pod, dict[str, object]],
) -> None:
    stage, pod, before = world
    at = stage.attachment("bad", [GOOD])
    empty: dict[str, Any] = {"cniVersion": "1.0.0", "interfaces": [], "ips": []}
    config = pod.network.config(pod.network.entry(TYPE), at, empty)
    reply = stage.call("ADD", config, at)
    assert reply.code == 7
    assert "eth0" in reply.text
    without = {key: value for key, value in config.items() if key != "prevResult"}
    assert stage.call("ADD", without, at).code in (6, 7)
    untouched(stage, before)


def test_unknown_keys_and_every_version_are_accepted(backend: Backend) -> None:
    stage = Stage(backend)
    try:
        pod = stage.pod("web", [mapping(8080, 80)])
        for version in ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"):
            text = json.dumps(stage.config(pod))
            config = json.loads(text.replace('"1.0.0"', json.dumps(version)))
            config["somebodys.key"] = {"a": [1]}
            reply = stage.call("ADD", config, pod.at)
            assert reply.status == 0, reply
            assert reply.json["cniVersion"] == version
    finally:
        stage.close()
