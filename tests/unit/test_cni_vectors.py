"""The recorded answers of the CNI project's own library, record by record.

Records of VERSION and of a call without CNI_COMMAND are answered by the shim
and tested with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cni_hostport import cni
from cni_hostport.errors import HostPortError

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "cni_calls.json").read_text())
OWN = [r for r in RECORDS if r["env"].get("CNI_COMMAND") not in (None, "", "VERSION")]
BAD_RESULT = (6, 7)
"""The reference answers 999 to a prevResult it cannot take; 6 and 7 say more."""


def test_no_record_is_lost() -> None:
    assert len(RECORDS) == 124
    assert len(OWN) == 121
    assert len({record["name"] for record in RECORDS}) == 124


def answer(record: dict[str, Any]) -> tuple[int, Any]:
    """Exit status and document, None where nothing is printed."""
    env = record["env"]
    stdin = record["stdin"].encode(record["stdin_encoding"])
    same_netns = env.get("CNI_NETNS") == "/proc/self/ns/net"
    try:
        call = cni.parse_call(env, stdin, same_netns)
        if call.command == "GC":
            cni.gc_of(call)
        if call.command != "ADD":
            return 0, None
        cni.attachment_of(call)
        return 0, json.loads(cni.result_bytes(call))
    except HostPortError as error:
        return 1, json.loads(cni.error_bytes(error, cni.cni_version_of(stdin)))


@pytest.mark.parametrize("record", OWN, ids=lambda record: record["name"])
def test_record(record: dict[str, Any]) -> None:
    status, document = answer(record)
    assert status == record["rc"]
    wanted = record["stdout_docs"][-1] if record["stdout_docs"] else None
    if status:
        codes = BAD_RESULT if wanted["code"] == 999 else (wanted["code"],)
        assert document["code"] in codes
        assert document["msg"]
        assert document["cniVersion"] in cni.SUPPORTED_VERSIONS
    elif wanted is None:
        assert document is None
    else:
        assert normal(document, wanted) == normal(wanted, wanted)


def normal(document: Any, like: Any) -> Any:
    """Without what the reference adds or drops: unknown keys, an empty dns, spelling of IPv6."""
    if isinstance(document, dict):
        kept = {k: v for k, v in document.items() if k in like}
        return {k: normal(v, like[k]) for k, v in kept.items() if (k, v) != ("dns", {})}
    if isinstance(document, list):
        return [normal(a, b) for a, b in zip(document, like, strict=True)]
    return document.lower().replace(":0::", "::") if isinstance(document, str) else document


def test_the_reference_drops_nothing_else() -> None:
    """What ``normal`` ignores in our results are the keys that we keep on purpose, and no other."""
    extra = set()
    for record in OWN:
        status, document = answer(record)
        if status == 0 and document is not None:
            wanted = record["stdout_docs"][-1]
            extra |= {key for key in document if key not in wanted}
    assert extra == {"foo", "dns"}
