"""Keeps the Corefile up to date: template, ConfigMap, and the files it names.

Decides when to look again and what to do about an error: the last good
configuration stays, the error is told once for each content, and the same
content is tried again after a while. Reads files through ``host``; never talks
to the DNS server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from cni_hostport.host import nodecache_files as files
from cni_hostport.nodecache import corefile, goflags, kubedns
from cni_hostport.nodecache.flags import Params
from cni_hostport.nodecache.kubedns import KubeDNSConfig

log = logging.getLogger(__name__)
DEFAULT_KUBEDNS_DIR = "/etc/kube-dns"
# Seconds after which a configuration that failed is tried again.
RETRY = 10.0


class Configuration:
    """The rendered Corefile and what it depends on.

    ``on_error`` is called once for each failed attempt.
    """

    def __init__(
        self, params: Params, environment: Mapping[str, str], on_error: Callable[[], None]
    ) -> None:
        variable = corefile.service_variable(params.upstream_service)
        cluster_ip = goflags.address(environment.get(variable, ""))
        self.template = params.base_corefile
        self.settings = corefile.Settings(
            local_ips=tuple(ip.text for ip in params.local_ips),
            port=params.dns_port,
            cluster_ip=None if cluster_ip is None else str(cluster_ip),
            service=params.upstream_service,
            prometheus=params.prometheus_address or ":9253",
        )
        self._folder = params.kubedns_dir
        self._on_error = on_error
        self._kubedns = KubeDNSConfig()
        self._seen: tuple[object, ...] = ()
        self._retry_at: float | None = None
        self._told = ""
        self.named_files: tuple[str, ...] = ()
        self.text: str | None = None

    def poll(self, now: float, *, force: bool = False) -> bool:
        """Look whether anything changed; True where ``text`` must be handed on again.

        ``now`` in seconds. Raises corefile.ServiceUnknown while there is no
        configuration yet: nothing will mend that but another environment.
        """
        folder = self._kubedns_folder()
        seen = tuple(files.signature(p) for p in (self.template, folder, *self.named_files) if p)
        due = self._retry_at is not None and now >= self._retry_at
        if seen == self._seen and not due and not force:
            return False
        self._retry_at = None
        named_changed = len(seen) == len(self._seen) and seen != self._seen
        self._seen = seen
        if folder:
            self._load_kubedns(folder, now)
        before = self.text
        self._render(now)
        return self.text is not None and (self.text != before or force or named_changed)

    def failed(self, why: str, now: float) -> None:
        """Something about the present content is no good: tell, count, try again later."""
        self._retry_at = now + RETRY
        self._on_error()
        if why != self._told:
            log.error("%s", why)
            self._told = why

    def _kubedns_folder(self) -> str:
        if self._folder:
            return self._folder
        return DEFAULT_KUBEDNS_DIR if Path(DEFAULT_KUBEDNS_DIR).exists() else ""

    def _load_kubedns(self, folder: str, now: float) -> None:
        try:
            content = files.read_folder(folder)
            found = kubedns.parse(content)
            kubedns.validate(found)
            kubedns.validate_forwardable(found, lambda path: Path(path).is_file())
        except (OSError, UnicodeDecodeError, kubedns.ConfigError) as error:
            self.failed(f"kube-dns configuration in {folder} is not used: {error}", now)
            return
        if found != self._kubedns:
            log.info(
                "kube-dns configuration: %d stub domains, upstreams: %s",
                len(found.stub_domains),
                " ".join(found.upstreams) or "none",
            )
            for key in kubedns.unknown_keys(content):
                log.warning("kube-dns configuration: nothing reads the key %r", key)
        self._kubedns = found

    def _render(self, now: float) -> None:
        try:
            template = Path(self.template).read_text(encoding="utf-8")
            rendered = corefile.render(template, self._kubedns, self.settings)
        except corefile.ServiceUnknown as error:
            if self.text is None:
                raise
            self.failed(str(error), now)
        except (OSError, UnicodeDecodeError) as error:
            self.failed(f"template {self.template} cannot be read: {error}", now)
        else:
            if rendered.text != self.text:
                for note in rendered.notes:
                    log.warning("%s", note)
            self.text = rendered.text
            if self._retry_at is None:
                self._told = ""
