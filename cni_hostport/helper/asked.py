"""A CNI call as it came, and what its bytes say: all of it that is no effect.

Read as soon as it is there, before the calls in front of it are served: of calls that come
at one moment each is read right after another, while all that takes is still warm. Decides
nothing; an error is kept for whoever serves the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cni_hostport import cni
from cni_hostport.errors import HostPortError
from cni_hostport.host import netns
from cni_hostport.hostport.adding import Wish
from cni_hostport.model import Attachment


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A CNI call as it came: environment, stdin, and descriptors (-1: not passed).

    ``alive`` tells whether the caller still waits; ``arrived`` is monotonic seconds.
    """

    env: Mapping[str, str]
    stdin: bytes
    own_netns: int = -1
    pod_netns: int = -1
    alive: Callable[[], bool] = lambda: True
    arrived: float = 0.0


@dataclass(slots=True)
class Asked:
    """A call that was read. ``seconds``: how long that took.

    ``call`` None: it is no call, ``error`` says why. An ADD has an attachment and its result,
    or the error in them, which counts only once it is known that we are the ones to serve it.
    ``wish`` is what an ADD asks of the manager, once the node was asked what that needs;
    ``alone``: it was tried together with others, which did not work.
    """

    request: CallRequest
    call: cni.Call | None = None
    attachment: Attachment | None = None
    result: bytes = b""
    error: Exception | None = None
    seconds: float = 0.0
    wish: Wish | None = None
    alone: bool = False


def read(request: CallRequest) -> Asked:
    """What the request says. Never raises."""
    started = time.monotonic()
    asked = Asked(request)
    try:
        asked.call = call = cni.parse_call(request.env, request.stdin, _same_netns(request))
        if call.command == "ADD":
            asked.attachment = cni.attachment_of(call)
            asked.result = cni.result_bytes(call)
    except Exception as error:  # whoever serves it raises it again
        asked.error = error
    asked.seconds = time.monotonic() - started
    return asked


def attachment_in(asked: Asked) -> Attachment:
    """The attachment of an ADD. Raises what was wrong with it."""
    if asked.attachment is None or asked.error is not None:
        raise asked.error or HostPortError("internal error", "no ADD")
    return asked.attachment


def _same_netns(request: CallRequest) -> bool:
    if request.own_netns < 0 or request.pod_netns < 0:
        return False
    return netns.same_namespace(request.own_netns, request.pod_netns)
