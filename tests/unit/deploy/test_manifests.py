"""Manifests obey Kubernetes' own schemas, and the program's command line."""

import importlib
import itertools
import re
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

ROOT = Path(__file__).parents[3]
MANIFESTS = sorted(
    p for p in (ROOT / "deploy").rglob("*.yaml") if "\napiVersion:" in "\n" + p.read_text()
)
OLDEST = (1, 30)
VERSIONS = sorted(
    {".".join(v.split(".")[:2]) for v in all_versions()}, key=lambda v: int(v.split(".")[1])
)
VERSIONS = [v for v in VERSIONS if tuple(map(int, v.split("."))) >= OLDEST]

sys.path.insert(0, str(ROOT / "packaging"))
manual = importlib.import_module("manual")


def documents(path):
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def daemonset(path):
    (found,) = [d for d in documents(path) if d["metadata"]["name"] == "cni-hostport"]
    return found


def ours():
    return [p for p in MANIFESTS if p.stem in {"containerd", "k3s", "crio"}]


def ids(path):
    return path.stem if isinstance(path, Path) else None


def test_there_is_one_for_each_runtime():
    assert len(ours()) == 3
    assert len(VERSIONS) >= 3


@pytest.mark.parametrize(("path", "version"), list(itertools.product(MANIFESTS, VERSIONS)), ids=ids)
def test_a_manifest_obeys_the_schema(path, version):
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_check_refuses_what_is_wrong():
    wrong = daemonset(ours()[0])
    wrong["spec"]["template"]["spec"]["hostNetwork"] = "yes"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)
    wrong = daemonset(ours()[0])
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", ours(), ids=ids)
def test_its_command_lines_are_the_programs(path):
    pod = daemonset(path)["spec"]["template"]["spec"]
    (install,), (helper,) = pod["initContainers"], pod["containers"]
    commands = [install["command"] + install["args"], helper["command"] + helper["args"]]
    commands.append(helper["readinessProbe"]["exec"]["command"])
    for program, command, *argv in commands:
        assert program == "/opt/cni-hostport/cni-hostport-helper"
        manual.parser_of(command).parse_args(argv)
    names = {e["name"] for e in helper["env"]}
    assert names <= set(manual.ENVIRONMENT)


@pytest.mark.parametrize("path", ours(), ids=ids)
def test_an_upgrade_is_a_hand_over(path):
    """New pod first, old helper lingers, ready means that the new one serves."""
    spec = daemonset(path)["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    helper = spec["template"]["spec"]["containers"][0]
    assert {"--replace", "--linger"} <= set(helper["args"])
    assert helper["readinessProbe"]["exec"]["command"][1:] == ["ping", "--mine"]
    assert "ports" not in helper, "a declared host port would keep the new pod from starting"
    mounts = {m["name"]: m for m in helper["volumeMounts"]}
    assert mounts["run"]["mountPath"] == "/run/cni-hostport"
    assert mounts["netns"]["mountPropagation"] == "HostToContainer"


@pytest.mark.parametrize("path", ours(), ids=ids)
def test_every_mount_has_its_volume_and_nothing_more_is_asked_for(path):
    pod = daemonset(path)["spec"]["template"]["spec"]
    mounted = {
        m["name"] for c in pod["initContainers"] + pod["containers"] for m in c["volumeMounts"]
    }
    assert mounted == {v["name"] for v in pod["volumes"]}
    assert pod["automountServiceAccountToken"] is False
    assert pod["hostNetwork"] is True
    assert not any(c["securityContext"].get("privileged") for c in pod["containers"])
    unit = (ROOT / "packaging/cni-hostport.service").read_text()
    allowed = set(re.findall(r"CAP_([A-Z_]+)", unit.split("CapabilityBoundingSet=", 1)[1]))
    assert set(pod["containers"][0]["securityContext"]["capabilities"]["add"]) <= allowed


@pytest.mark.parametrize("path", ours(), ids=ids)
def test_the_variants_differ_only_where_runtimes_do(path):
    def common(document):
        spec = document["spec"]["template"]["spec"]
        install = spec["initContainers"][0]
        install["args"] = [a for a in install["args"] if a != "--replace-portmap"]
        varying = {"conf", "k3s"}
        install["volumeMounts"] = [m for m in install["volumeMounts"] if m["name"] not in varying]
        spec["volumes"] = [v for v in spec["volumes"] if v["name"] not in varying]
        return document

    assert common(daemonset(path)) == common(daemonset(ours()[0]))


def test_the_image_recipe_copies_what_exists():
    text = (ROOT / "deploy/Containerfile").read_text().replace("\\\n", " ")
    lines = [x.split() for x in text.splitlines() if x and not x.startswith("#")]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert {line[0] for line in lines} <= known
    stages = {line[-1] for line in lines if line[0] == "FROM" and line[-2] == "AS"}
    for line in lines:
        if line[0] == "COPY" and line[1].startswith("--from="):
            assert line[1].removeprefix("--from=") in stages
        elif line[0] == "COPY":
            for source in line[1:-1]:
                assert (ROOT / source).exists(), source
    image = daemonset(ours()[0])["spec"]["template"]["spec"]["containers"][0]
    assert f'ENTRYPOINT ["{image["command"][0]}"]' in text
