"""The DaemonSet: valid for Kubernetes, flags and Corefile that the agent takes."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cni_hostport.nodecache import corefile, coreparse, flags
from cni_hostport.nodecache.kubedns import KubeDNSConfig

MANIFEST = Path(__file__).parents[3] / "deploy" / "node-cache.yaml"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))


def one(kind: str, name: str = "node-local-dns") -> dict[str, Any]:
    (found,) = [d for d in DOCUMENTS if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d["kind"])
def test_valid_for_kubernetes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_the_agent_takes_the_arguments() -> None:
    (container,) = one("DaemonSet")["spec"]["template"]["spec"]["containers"]
    params = flags.parse(container["args"]).params
    assert params is not None and params.conf == "/etc/Corefile"
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert {str(Path(params.base_corefile).parent), "/etc/kube-dns", "/run/xtables.lock"} <= mounts


def test_the_corefile_renders_and_is_understood() -> None:
    template = one("ConfigMap")["data"]["Corefile"]
    settings = corefile.Settings(("169.254.20.10",), 53, "10.96.1.1", "kube-dns-upstream", ":9253")
    found = corefile.render(template, KubeDNSConfig((), ("1.1.1.1",)), settings)
    assert "PILLAR" not in found.text
    blocks = coreparse.parse(found.text, {})
    assert [b.keys[0] for b in blocks] == [
        "cluster.local:53",
        "in-addr.arpa:53",
        "ip6.arpa:53",
        ".:53",
    ]


def test_deployment_contract() -> None:
    spec = one("DaemonSet")["spec"]["template"]["spec"]
    assert spec["hostNetwork"] and spec["dnsPolicy"] == "Default"
    assert spec["priorityClassName"] == "system-node-critical"
    assert "NET_ADMIN" in spec["containers"][0]["securityContext"]["capabilities"]["add"]
    assert one("Service", "kube-dns-upstream")["spec"]["selector"] == {"k8s-app": "kube-dns"}
