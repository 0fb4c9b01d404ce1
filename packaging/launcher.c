/* The launcher: a plugin call without a start of Python. Optional (./build.sh --launcher).
 *
 * Forwards the CNI_* variables, stdin and two descriptors to the helper and copies the answer
 * back, in the frame that cni_hostport/shim.py owns. Decides nothing: whatever is not the
 * plain case (arguments, VERSION, GC, no helper, another protocol, time over) is the Python
 * plugin's, which is executed in its place with stdin whole. Must never send a request twice:
 * once one was sent, that plugin is told why no answer came, as shim.py's hand_over has it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PROTOCOL = 1, MAX_STDIN = 16 << 20, HEADER = 16, CHUNK = 1 << 16 };
#define PLUGIN "/cni-hostport-python"

extern char **environ;
static char **arguments, *frame;  /* the request; its body is what was read of stdin */
static const char *command;
static size_t length, body;       /* bytes in the frame, and where its body starts */
static long long deadline;        /* milliseconds of the monotonic clock */

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static int ready(int fd, short events) {
    struct pollfd p = {fd, events, 0};
    for (long long left; (left = deadline - now()) > 0;)
        if (poll(&p, 1, (int)left) > 0) return 1;
    return 0;
}

static int write_all(int fd, const char *data, size_t size) {
    for (deadline = now() + 10000; size > 0;) {
        ssize_t n = write(fd, data, size);
        if (n >= 0) data += n, size -= n;
        else if (errno != EINTR && !(errno == EAGAIN && ready(fd, POLLOUT))) return 0;
    }
    return 1;
}

/* Become the Python plugin; without a reason nothing was sent and it starts afresh. */
static void python(char *reason) {
    static const char failed[] = "{\"cniVersion\":\"1.1.0\",\"code\":11,\"msg\":"
                                 "\"cni-hostport cannot run its own program\",\"details\":\"\"}\n";
    char path[PATH_MAX + sizeof PLUGIN] = "", *end, *after[] = {*arguments, "call", reason, NULL};
    int memory = body ? memfd_create("stdin", 0) : -1;  /* stdin was read: there it is again */
    if (memory >= 0 && write_all(memory, frame + body, length - body) && !lseek(memory, 0, SEEK_SET))
        dup2(memory, 0);
    if (readlink("/proc/self/exe", path, PATH_MAX) < 0 &&
        !realpath((const char *)getauxval(AT_EXECFN), path)) *path = 0;
    if ((end = strrchr(path, '/'))) execv((strcpy(end, PLUGIN), path), reason ? after : arguments);
    if (!strcmp(command, "DEL")) _exit(0);  /* a failing DEL keeps bridge and IPAM from theirs */
    write_all(1, failed, sizeof failed - 1);
    _exit(1);
}

static char *room(size_t more) {
    static size_t have;
    if (length + more > have && !(frame = realloc(frame, have = 2 * (length + more)))) _exit(1);
    return frame + length;
}

static void append(const char *data, size_t size) {
    memcpy(room(size), data, size), length += size;
}

static void put(size_t at, size_t value) {
    memcpy(frame + at, &(uint32_t){htonl((uint32_t)value)}, 4);
}

static void receive(int fd, char *data, size_t size) {
    while (size > 0) {
        if (!ready(fd, POLLIN)) python("--after=timeout");
        ssize_t n = recv(fd, data, size, 0);
        if (n == 0 || (n < 0 && errno != EINTR)) python("--after=lost");
        if (n > 0) data += n, size -= n;
    }
}

int main(int argc, char **argv) {
    struct sockaddr_un to = {AF_UNIX, ""};
    struct ucred owner;
    const char *dir = getenv("CNI_HOSTPORT_RUN_DIR"), *pod = getenv("CNI_NETNS");
    if (!dir || !*dir) dir = "/run/cni-hostport";
    if (!(command = getenv("CNI_COMMAND"))) command = "";
    arguments = argv, signal(SIGPIPE, SIG_IGN), signal(SIGXFSZ, SIG_IGN);
    if (argc != 1 || !*command || !strcmp(command, "VERSION") || !strcmp(command, "GC") ||
        strlen(dir) > 90 || fcntl(0, F_GETFD) < 0 || fcntl(1, F_GETFD) < 0 || fcntl(2, F_GETFD) < 0) python(NULL);
    strcat(strcpy(to.sun_path, dir), "/helper.sock");
    int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (sock < 0 || connect(sock, (void *)&to, sizeof to) < 0 ||
        getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &owner, &(socklen_t){sizeof owner}) < 0 ||
        (owner.uid != 0 && owner.uid != geteuid())) python(NULL);

    append((char[HEADER]){'C', 'H', 'P', PROTOCOL, 'C'}, HEADER);
    int last = 0, fds[2], count = 0, mode = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    while (environ[last]) last++;
    while (last-- > 0)  /* backwards: of two of one name the first counts, the helper takes the last */
        if (!strncmp(environ[last], "CNI_", 4)) append(environ[last], strlen(environ[last]) + 1);
    body = --length;    /* no NUL after the last */
    put(8, body - HEADER);
    for (ssize_t n = 1; n != 0 && length - body <= MAX_STDIN; length += n > 0 ? n : 0) {
        size_t left = MAX_STDIN + 1 - (length - body);
        n = read(0, room(CHUNK), left < CHUNK ? left : CHUNK);
        if (n < 0 && errno == EAGAIN) poll(&(struct pollfd){0, POLLIN, 0}, 1, -1);
        else if (n < 0 && errno != EINTR) break;
    }
    put(12, length - body);
    if ((fds[count] = open("/proc/self/ns/net", mode)) >= 0) frame[5] |= 1, count++;
    if (pod && (fds[count] = open(pod, mode)) >= 0) frame[5] |= 2, count++;

    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof fds)]; } control = {
        {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof *fds)}};
    struct iovec part = {frame, length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control};
    memcpy(CMSG_DATA(&control.head), fds, count * sizeof *fds);
    message.msg_controllen = count ? CMSG_SPACE(count * sizeof *fds) : 0;
    deadline = now() + (!strcmp(command, "DEL") ? 4500 : !strcmp(command, "STATUS") ? 350 : 29000);
    while (part.iov_len > 0) {  /* a helper that refuses may answer and close early: read on */
        if (!ready(sock, POLLOUT)) python("--after=timeout");
        ssize_t n = sendmsg(sock, &message, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) break;
        if (n > 0) part.iov_base = (char *)part.iov_base + n, part.iov_len -= n, message.msg_controllen = 0;
    }
    union { unsigned char byte[HEADER]; uint32_t word[4]; } head;
    receive(sock, (char *)head.byte, HEADER);
    if (memcmp(head.byte, "CHP", 3) || abs(head.byte[3] - PROTOCOL) > 1) python("--after=protocol");
    size_t out = ntohl(head.word[2]), err = ntohl(head.word[3]);
    char *answer = malloc(out + err + 1);
    if (!answer) python("--after=lost");
    receive(sock, answer, out + err);
    int unprinted = !write_all(1, answer, out);
    write_all(2, answer + out, err);
    _exit(head.byte[4] ? head.byte[4] : unprinted);
}
