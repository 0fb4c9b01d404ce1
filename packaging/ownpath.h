/* Where this executable is, for the C fronts that find the bundle by it. */
#include <limits.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Our own file, links resolved; where /proc is hidden, as exec() was told. Empty: not known. */
static char *own_path(void) {
    static char path[PATH_MAX];
    ssize_t size = readlink("/proc/self/exe", path, sizeof path - 1);
    if (size > 0) path[size] = 0;
    else if (!realpath((const char *)getauxval(AT_EXECFN), path)) *path = 0;
    return path;
}
