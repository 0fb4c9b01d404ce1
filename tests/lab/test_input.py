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


# Every value of these fields is wrong in a list of mappings.
MAPPING_VALUES: dict[str, tuple[object, ...]] = {
    "hostPort": (-1, 65536, 70000, 2**40, "80", 80.5, [80], True),
    "containerPort": (0, -1, 65536, 70000, "80", 80.5, [80], {}, True),
    "protocol": ("icmp", "tcp\n", "tcp udp", "6", 6, ["tcp"], {"a": 1}),
    "hostIP": (
        *("nonsense", "300.1.1.1", "10.0.0.0/8", "1.2.3", "fe80::1%eth0", "::g", " "),
        *("01.2.3.4", "127.0.0.1\n", 7, ["127.0.0.1"]),
    ),
}

# And of these in the plugin's entry of the conflist.
OPTION_VALUES: dict[str, tuple[object, ...]] = {
    "snat": ("yes", 1, []),
    "masqAll": ("true", 0),
    "backend": ("ebtables", 1, "NFT"),
    "reservePorts": ("maybe", True, 1),
    "nodeAddresses": ("192.0.2.0/24", ["192.0.2.0/99"], ["nonsense"], [7], {"a": 1}),
    "excludeInterfaces": ("kube-ipvs0", [7], ["a/b"], ["a" * 16], [""], ['quo"te\nnew']),
    "markMasqBit": (32, -1, "13", 1.5),
    "openForward": ("yes", 3),
    "conditionsV4": (
        *("ip saddr 10.0.0.0/8", [7], ["1.1.1.1;", "x"], ["accept"], ["drop"]),
        *(["jump", "x"], ["a\nb"], ["{"], ["#"], ['"'], ["-j", "DROP"], ["ip saddr"]),
    ),
    "conditionsV6": (["}"], ["goto", "x"], ["dnat"], ["'"]),
}

# The static list counts where the runtime passes none.
STATIC = ("8080", [7], [{"hostPort": 70000, "containerPort": 80}])


def result(**fields: object) -> Json:
    return {"prevResult": {"cniVersion": "1.0.0", **fields}}


def mappings(value: object) -> Json:
    return {"runtimeConfig": {"portMappings": value}}


WHOLE: tuple[tuple[Json, str, object], ...] = (
    (mappings("80"), "portMappings", "80"),
    (mappings({"a": 1}), "portMappings", "a"),
    (mappings([GOOD, 80]), "portMappings", 80),
    ({"runtimeConfig": [7]}, "runtimeConfig", [7]),
    ({"prevResult": "x"}, "prevResult", "x"),
    (result(ips="x"), "ips", "x"),
    (result(ips=[{"address": "10.0.0.300/24"}]), "address", "10.0.0.300/24"),
    (result(ips=[{"address": 5}]), "address", 5),
    ({"cniVersion": "9.9.9"}, "CNI version", "9.9.9"),
    ({"portMappings": [{"hostPort": 1}], "runtimeConfig": {}}, "containerPort", "missing"),
    ({"cniVersion": 1.0}, "cniVersion", 1.0),
    ({"name": "a/b"}, "name", "a/b"),
    ({"name": 7}, "name", 7),
)

CASES: list[tuple[Json, str, object]] = [
    *((mappings([GOOD, {**GOOD, k: v}]), k, v) for k, vs in MAPPING_VALUES.items() for v in vs),
    *(({key: value}, key, value) for key, values in OPTION_VALUES.items() for value in values),
    *(({"portMappings": v, "runtimeConfig": {}}, "portMappings", v) for v in STATIC),
    *WHOLE,
]


def untouched(stage: Stage, before: dict[str, object]) -> None:
    assert stage.snapshot() == before
    assert stage.ask(NODE4, 8080).server == "web"
    assert stage.ask(NODE4, 8081).refused_at_once()


def named(value: object, text: str) -> bool:
    """Whether the text shows the value; of a list or object its kind is enough."""
    if isinstance(value, list | dict) and ("list" if isinstance(value, list) else "object") in text:
        return True
    return shown(value).lower() in text.lower()


def shown(value: object) -> str:
    """The part of a value that an error must show, whatever quotes it uses."""
    inner = value
    while isinstance(inner, list | dict):
        inner = next(iter(inner.values() if isinstance(inner, dict) else inner), "")
    text = str(inner)
    return text.strip().split("\n")[0].split('"')[0][:12]


@pytest.mark.parametrize(
    ("change", "field", "value"),
    CASES,
    ids=[f"{field}={value!r}"[:50] for _, field, value in CASES],
)
def test_field_and_value_are_named(
    world: tuple[Stage, Pod, dict[str, object]], change: Json, field: str, value: object
) -> None:
    stage, pod, before = world
    at = stage.attachment("bad", [GOOD])
    config = pod.network.config(pod.network.entry(TYPE), at, pod.at.result)
    reply = stage.call("ADD", {**config, **change}, at)
    if reply.status == 0:
        stage.call("DEL", config, at)
    assert reply.status == 1
    words = reply.json
    assert words["code"] in ((1, 6, 7) if "version" in field.lower() else (6, 7)), words
    assert words["cniVersion"]
    assert field.lower() in reply.text.lower(), words
    assert named(value, reply.text), words
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
