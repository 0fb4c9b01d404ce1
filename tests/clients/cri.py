"""A client of the container runtime interface, as kubelet is one: sandboxes and containers."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import uuid
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as cri
from cri_api.v1 import api_pb2_grpc as services

_PORT = re.compile(r"(?:(\[[^]]*\]|[^:\[\]]*):)?(\d+):(\d+)(?:/(\w+))?")


class Refused(Exception):
    """A request that failed; the text is what kubelet would put into the pod's event."""


class Cri:
    """One runtime behind its socket."""

    def __init__(self, address: str, cgroup: str) -> None:
        channel = grpc.insecure_channel(f"unix://{address}")
        grpc.channel_ready_future(channel).result(timeout=20)
        self._runtime = services.RuntimeServiceStub(channel)
        self._channel = channel
        self._cgroup = cgroup

    def close(self) -> None:
        """Leave the runtime."""
        self._channel.close()

    def _do(self, verb: str, request: Any) -> Any:
        try:
            return getattr(self._runtime, verb)(request, timeout=60)
        except grpc.RpcError as error:
            raise Refused(error.details()) from None  # type: ignore[attr-defined]

    def config(self, name: str, ports: tuple[str, ...], annotations: dict[str, str]) -> Any:
        """A pod's configuration; a port is ``[hostIP:]hostPort:containerPort[/protocol]``."""
        mappings = []
        for text in ports:
            found = _PORT.fullmatch(text)
            assert found, text
            protocol = cri.Protocol.Value((found[4] or "tcp").upper())
            mappings.append(
                cri.PortMapping(
                    protocol=protocol,
                    container_port=int(found[3]),
                    host_port=int(found[2]),
                    host_ip=(found[1] or "").strip("[]"),
                )
            )
        metadata = cri.PodSandboxMetadata(name=name, namespace="shop", uid=str(uuid.uuid4()))
        return cri.PodSandboxConfig(
            metadata=metadata,
            hostname=name,
            log_directory=f"/run/cd/logs/{name}",
            port_mappings=mappings,
            annotations=annotations,
            linux=cri.LinuxPodSandboxConfig(cgroup_parent=f"/{self._cgroup}"),
        )

    def run(self, name: str, *ports: str, annotations: dict[str, str] | None = None) -> Sandbox:
        """RunPodSandbox. Raises Refused."""
        config = self.config(name, ports, annotations or {})
        request = cri.RunPodSandboxRequest(config=config)
        return Sandbox(self, self._do("RunPodSandbox", request).pod_sandbox_id, config)

    def stop(self, sandbox_id: str) -> None:
        """StopPodSandbox."""
        self._do("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id))

    def remove(self, sandbox_id: str) -> None:
        """RemovePodSandbox."""
        self._do("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id))

    def pid(self, sandbox_id: str) -> int:
        """Process id of the pause process, as the runtime numbers it."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=True)
        return int(json.loads(self._do("PodSandboxStatus", request).info["info"])["pid"])

    def ready(self, sandbox_id: str) -> bool:
        """Whether the runtime takes the sandbox for a living one."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id)
        state = self._do("PodSandboxStatus", request).status.state
        return bool(state == cri.PodSandboxState.SANDBOX_READY)

    def sandboxes(self) -> list[str]:
        """Every sandbox the runtime knows."""
        items = self._do("ListPodSandbox", cri.ListPodSandboxRequest()).items
        return [item.id for item in items]

    def container(self, sandbox: Sandbox, image: str, *command: str) -> None:
        """Create and start a container in the sandbox."""
        config = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name="main"),
            image=cri.ImageSpec(image=image),
            command=command,
            log_path="main.log",
            linux=cri.LinuxContainerConfig(),
        )
        request = cri.CreateContainerRequest(
            pod_sandbox_id=sandbox.id, config=config, sandbox_config=sandbox.config
        )
        made = self._do("CreateContainer", request).container_id
        self._do("StartContainer", cri.StartContainerRequest(container_id=made))

    def network(self) -> tuple[bool, str]:
        """What kubelet is told every few seconds: network ready or not, and why not."""
        conditions = self._do("Status", cri.StatusRequest()).status.conditions
        found = next(c for c in conditions if c.type == "NetworkReady")
        return bool(found.status), f"{found.reason} {found.message}"


class Sandbox:
    """A pod's sandbox."""

    def __init__(self, runtime: Cri, sandbox_id: str, config: Any) -> None:
        self.runtime, self.id, self.config = runtime, sandbox_id, config

    def end(self) -> None:
        """Stop and remove it."""
        self.runtime.stop(self.id)
        self.runtime.remove(self.id)


def image_archive(root: Path, reference: str) -> bytes:
    """A docker archive with one layer: the files below ``root``."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, ".")
    diff = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "1000000"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]
    members = {
        name: config,
        "layer.tar": layer.getvalue(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()
