"""The plugin call: CNI environment and stdin in, the helper's answer out, gone in milliseconds.

Decides nothing about ports. It owns the frame that a call travels in, says how
long each verb may take, and where no helper answers it leaves the call, stdin
included, to the slow path (``cni_hostport.cli.call``). It must never import more
than ``sys``, ``posix``, ``time`` and ``_socket``: the bundle's plugin executable carries
no other module and no standard streams, and a call that starts more of Python costs a
multiple. It must never send one request twice while a helper may still be at it.

Request: 16 bytes (``CHP``, protocol, kind, flags, two zero bytes, length of the environment,
length of the body; both 32 bits, network order), the environment as NUL-separated
``KEY=VALUE``, the body; descriptors come with the first bytes. Answer: 16 bytes (``CHP``,
protocol, exit status, three zero bytes, length for stdout, for stderr), the two texts.
"""

import posix
import sys
import time

TYPE_CHECKING = False  # what type checkers take for true; typing itself is too heavy
if TYPE_CHECKING:
    import _socket
    from collections.abc import Iterable, Mapping
    from typing import NoReturn

MAGIC = b"CHP"
PROTOCOL = 1
HEADER_SIZE = 16
KIND_CALL = b"C"
KIND_OPERATOR = b"O"
FLAG_OWN_NETNS = 1
FLAG_POD_NETNS = 2
MAX_STDIN = 16 << 20  # bytes a call may carry; one more is sent on, to be refused

BEGAN = b"CNI_HOSTPORT_BEGAN"
"""Variable of a request: when the call began, seconds of the monotonic clock."""

RUN_DIR = b"/run/cni-hostport"
SOCKET_NAME = b"helper.sock"
HELPER = "cni-hostport-helper"
"""The bundle's other executable, for everything but a plugin call."""

SUN_PATH_MAX = 107
"""Bytes of a unix socket's path (unix(7): sun_path holds 108 with the closing NUL)."""
LONG = 8 if sys.maxsize > 1 << 32 else 4

DEFAULT_LIMIT = 29.0
LIMITS = {b"DEL": 4.5, b"STATUS": 0.4}
"""Seconds until a verb gives up waiting; a little under what users are promised
(30, 5 and 0.5), so that what is printed then arrives in time as well."""

SUPPORTED = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
VERSION_ANSWER = b'{"cniVersion":"1.1.0","supportedVersions":[%s]}\n' % (
    ",".join([f'"{version}"' for version in SUPPORTED]).encode()
)
ABOUT = (
    "cni-hostport: gives pods their host ports; a CNI plugin, called by a container runtime\n"
    f"CNI protocol versions supported: {', '.join(SUPPORTED)}\n"
).encode()


class ForeignProtocol(Exception):
    """What came is no frame, or one of a protocol that is too far from ours."""


def pack_request(kind: bytes, flags: int, env: "Mapping[bytes, bytes]", body: bytes) -> bytes:
    """One whole request; ``env`` is sent as it is, choose before."""
    block = b"\0".join([key + b"=" + value for key, value in env.items()])
    return _frame(bytes((PROTOCOL, kind[0], flags, 0, 0)), block, body)


def parse_request_header(header: bytes) -> tuple[int, bytes, int, int, int]:
    """(protocol, kind, flags, bytes of environment, bytes of body). Raises ForeignProtocol."""
    protocol = _protocol_of(header)
    if header[4:5] not in {KIND_CALL, KIND_OPERATOR}:
        raise ForeignProtocol(f"no request that we know: {header!r}")
    return protocol, header[4:5], header[5], *_lengths(header)


def parse_env(block: bytes) -> dict[bytes, bytes]:
    """The environment block of a request; an entry without ``=`` is left out."""
    pairs = [entry.partition(b"=") for entry in block.split(b"\0")]
    return {key: value for key, equals, value in pairs if equals}


def pack_response(status: int, out: bytes, err: bytes, protocol: int = PROTOCOL) -> bytes:
    """One whole answer, in the protocol of the request."""
    return _frame(bytes((protocol, status & 0xFF, 0, 0, 0)), out, err)


def parse_response_header(header: bytes) -> tuple[int, int, int, int]:
    """(protocol, exit status, bytes for stdout, bytes for stderr). Raises ForeignProtocol."""
    return _protocol_of(header), header[4], *_lengths(header)


def _frame(head: bytes, first: bytes, second: bytes) -> bytes:
    lengths = len(first).to_bytes(4, "big") + len(second).to_bytes(4, "big")
    return MAGIC + head + lengths + first + second


def _lengths(header: bytes) -> tuple[int, int]:
    return int.from_bytes(header[8:12], "big"), int.from_bytes(header[12:16], "big")


def _protocol_of(header: bytes) -> int:
    """Protocol of a frame; neighbours of ours are understood, for the time of an upgrade."""
    if len(header) != HEADER_SIZE or header[:3] != MAGIC or abs(header[3] - PROTOCOL) > 1:
        raise ForeignProtocol(f"no frame that we know: {header!r}")
    return header[3]


def run_dir() -> bytes:
    """The folder of the helper's socket, as the environment says."""
    return posix.environ.get(b"CNI_HOSTPORT_RUN_DIR") or RUN_DIR


def socket_address(folder: bytes) -> tuple[bytes, int]:
    """Address of the helper's socket, and a descriptor to keep open until it was used (or -1).

    A path too long for sun_path goes through the folder's descriptor. Raises OSError.
    """
    path = folder + b"/" + SOCKET_NAME
    if len(path) <= SUN_PATH_MAX:
        return path, -1
    descriptor = posix.open(folder, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
    return b"/proc/self/fd/%d/%s" % (descriptor, SOCKET_NAME), descriptor


def connect(folder: bytes, limit: float) -> "_socket.socket":
    """Connect to the helper within ``limit`` seconds.

    Raises BlockingIOError when the queue of a helper that does not accept stays
    full for that long, another OSError when nobody listens.
    """
    import _socket  # VERSION needs none

    address, descriptor = socket_address(folder)
    try:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        # A non-blocking connect to a full queue fails at once; with this it waits in the kernel.
        wait = (int(limit), int(limit % 1 * 1000000) + 1)
        timeval = b"".join([part.to_bytes(LONG, sys.byteorder) for part in wait])
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, timeval)
        sock.connect(address)
    finally:
        if descriptor >= 0:
            posix.close(descriptor)
    # struct ucred: pid, uid, gid. Whoever else listens there must not get our descriptors.
    owner = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8]
    if int.from_bytes(owner, sys.byteorder) not in {0, posix.geteuid()}:
        sock.close()
        raise PermissionError(13, "the helper's socket belongs to somebody else")
    return sock


def exchange(
    sock: "_socket.socket", frame: bytes, descriptors: "Iterable[int]", deadline: float
) -> tuple[int, bytes, bytes]:
    """Send one request and return (exit status, stdout, stderr).

    ``deadline`` is a time of the monotonic clock. Raises TimeoutError after it,
    ForeignProtocol, and OSError (ConnectionResetError) where no whole answer came.
    """
    import _socket

    rights = b"".join([fd.to_bytes(4, sys.byteorder) for fd in descriptors])
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if rights else []
    try:
        _until(sock, deadline)
        sent = sock.sendmsg([frame], ancillary, _socket.MSG_NOSIGNAL)
        _until(sock, deadline)
        sock.sendall(memoryview(frame)[sent:], _socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        pass  # a helper that refuses may answer and close early: its answer is still there
    _, status, out, err = parse_response_header(_receive(sock, HEADER_SIZE, deadline))
    texts = _receive(sock, out + err, deadline)
    return status, texts[:out], texts[out:]


def _until(sock: "_socket.socket", deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 0.001))


def _receive(sock: "_socket.socket", size: int, deadline: float) -> bytes:
    parts = []
    while size > 0:
        _until(sock, deadline)
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionResetError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_stdin() -> bytes:
    """Stdin to its end, or one byte more than a call may carry; empty where it cannot be read."""
    parts = []
    room = MAX_STDIN + 1
    while room > 0:
        try:
            part = posix.read(0, min(room, 1 << 16))
        except BlockingIOError:  # a pipe that its owner made non-blocking
            time.sleep(0.005)
            continue
        except OSError:
            break
        if not part:
            break
        parts.append(part)
        room -= len(part)
    return b"".join(parts)


def call_request(body: bytes, began: float) -> tuple[bytes, list[int]]:
    """The frame of this process' own call, and the descriptors that go with it.

    ``began`` is a time of the monotonic clock, in seconds. A GC carries it: it must spare what
    was added since its caller made the list.
    """
    env = {key: value for key, value in posix.environ.items() if key.startswith(b"CNI_")}
    if env.get(b"CNI_COMMAND") == b"GC":
        env[BEGAN] = b"%.6f" % began
    # O_NONBLOCK: the path may turn out to be a FIFO that nobody writes to
    mode = posix.O_RDONLY | posix.O_NONBLOCK | posix.O_NOCTTY | posix.O_CLOEXEC
    flags, descriptors, own = 0, [], b"/proc/self/ns/net"
    for flag, path in ((FLAG_OWN_NETNS, own), (FLAG_POD_NETNS, env.get(b"CNI_NETNS", b""))):
        try:
            descriptors.append(posix.open(path, mode))
            flags |= flag
        except OSError:
            pass
    return pack_request(KIND_CALL, flags, env, body), descriptors


def write_all(descriptor: int, data: bytes) -> bool:
    """Write everything; False when the other end is gone or does not read for 10 s."""
    view = memoryview(data)
    end = time.monotonic() + 10
    while view and time.monotonic() < end:
        try:
            view = view[posix.write(descriptor, view) :]
        except BlockingIOError:  # a pipe that its owner made non-blocking
            time.sleep(0.005)
        except OSError:
            break
    return not view


def finish(status: int, out: bytes, err: bytes = b"") -> "NoReturn":
    """Print and leave at once; a result that could not be handed over is no success."""
    printed = write_all(1, out)
    write_all(2, err)
    posix._exit(status if printed else status or 1)


def open_standard_descriptors() -> None:
    """Put something that is empty where 0, 1 or 2 is closed, before a socket takes the number."""
    while (number := _nowhere()) <= 2:
        posix.set_inheritable(number, True)
    posix.close(number)


def _nowhere() -> int:
    try:
        return posix.open(b"/dev/null", posix.O_RDWR)
    except OSError:  # a root without /dev
        return posix.memfd_create("null")


def program() -> list[str]:
    """The command that runs everything but the plugin call."""
    if folder := bundle():
        return [folder + "/" + HELPER]
    return [sys.executable, "-I", "-m", "cni_hostport"]


def bundle() -> str:
    """The bundle's folder, as its executables say; empty where Python runs from elsewhere."""
    internal: str = getattr(sys, "_MEIPASS", "")  # by PyInstaller's boot loader
    return getattr(sys, "bundle", "") or internal.rpartition("/")[0]


def run_program(arguments: list[str]) -> "NoReturn":
    """Become that command; the boot loader's own variables stay behind. Raises OSError."""
    ours = (b"_PYI_", b"LD_LIBRARY_PATH") if bundle() else (b"_PYI_",)
    command = program() + arguments
    env = {key: value for key, value in posix.environ.items() if not key.startswith(ours)}
    posix.execve(command[0], command, env)


def hand_over(command: bytes, reason: str, body: bytes | None) -> "NoReturn":
    """Leave the call to the slow path; ``body`` is what was read of stdin, None = nothing yet."""
    if command == b"STATUS" and reason == "timeout":  # no time left for another program
        refuse(command, b"the cni-hostport helper does not answer")
    try:
        if body is not None:
            memory = posix.memfd_create("stdin", 0)
            write_all(memory, body)
            posix.lseek(memory, 0, 0)
            posix.dup2(memory, 0)
        run_program(["call", "--after=" + reason])
    except Exception as error:
        why = type(error).__name__.encode()
        refuse(command, b"cni-hostport has no helper and cannot run its own program: " + why)


def refuse(command: bytes, text: bytes) -> "NoReturn":
    """Answer with nobody's help; ``text`` must hold nothing that JSON escapes."""
    if command == b"DEL":  # a failing DEL keeps bridge and IPAM from cleaning up
        finish(0, b"", text + b"\n")
    answer = b'{"cniVersion":"1.1.0","code":%d,"msg":"%s","details":""}\n'
    finish(1, answer % (50 if command == b"STATUS" else 11, text))


def call(command: bytes) -> "NoReturn":
    """Serve one CNI call through the helper."""
    limit = LIMITS.get(command, DEFAULT_LIMIT)
    end = time.monotonic() + limit
    try:  # before stdin is read: where there is no helper the slow path needs it whole
        sock = connect(run_dir(), limit)
    except BlockingIOError:
        hand_over(command, "timeout", None)
    except Exception:
        hand_over(command, "refused", None)
    left = end - time.monotonic()  # how long the caller takes to write stdin is its own affair
    body = read_stdin()
    try:
        frame, descriptors = call_request(body, end - limit)
        status, out, err = exchange(sock, frame, descriptors, time.monotonic() + left)
    except TimeoutError:
        hand_over(command, "timeout", body)
    except ForeignProtocol:
        hand_over(command, "protocol", body)
    except Exception:
        hand_over(command, "lost", body)
    finish(status, out, err)


def main() -> "NoReturn":
    """Entry point of the plugin executable."""
    open_standard_descriptors()
    if len(sys.argv) > 1:
        try:
            run_program(sys.argv[1:])
        except Exception as error:
            text = f"cni-hostport: {program()[0]}: {getattr(error, 'strerror', '') or error}\n"
            finish(1, b"", text.encode("utf-8", "surrogateescape"))
    command = posix.environ.get(b"CNI_COMMAND", b"")
    if command == b"VERSION":
        finish(0, VERSION_ANSWER)
    if not command:
        finish(0, b"", ABOUT)
    try:
        call(command)
    except Exception as error:  # no memory, for one; what was sent has its own answers
        refuse(command, b"cni-hostport failed: " + type(error).__name__.encode())


if __name__ == "__main__":
    main()
