/* The helper executable's front: becomes the bundle's own Python, on the helper's modules.
 *
 * That Python is the executable of the system the bundle was built on (packaging/cni-hostport.spec
 * copies it): distributions optimise it by profile, and their libpython not, which costs a quarter
 * more for everything that is done in it. Decides where that Python finds its modules, and nothing
 * else. Must never let the caller's PYTHON* or LD_LIBRARY_PATH reach it; what is set here in their
 * place, host/environment.py takes out again. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ownpath.h"

#define NAME "cni-hostport-helper"

extern char **environ;

static int fail(const char *what, const char *why) {
    dprintf(2, NAME ": %s: %s\n", what, why);
    return 1;
}

static void forget(const char *start) {
    for (char **entry = environ; *entry;)
        if (strncmp(*entry, start, strlen(start))) entry++;
        else for (char **at = entry; (*at = at[1]); at++);
}

int main(int argc, char **argv) {
    char *folder = own_path(), *slash = strrchr(folder, '/');
    char internal[PATH_MAX + 16], python[PATH_MAX + 64], script[PATH_MAX + 64];
    char modules[4 * PATH_MAX], **command = calloc((size_t)argc + 4, sizeof *command);
    if (!slash || !command) return fail("cannot start", "its own place is not known");
    *slash = 0;
    /* Python splits a list of folders at colons, the loader at semicolons too, and expands $ */
    if (strpbrk(folder, ":;$")) return fail(folder, "no bundle runs from a path with : or ; or $");
    snprintf(internal, sizeof internal, "%s/_internal", folder);
    snprintf(python, sizeof python, "%s/" NAME, internal);
    snprintf(script, sizeof script, "%s/cni_hostport/__main__.pyc", internal);
    snprintf(modules, sizeof modules, "%s/base_library.zip:%s/python" VERSION "/lib-dynload:%s",
             internal, internal, internal);
    forget("PYTHON"), forget("LD_LIBRARY_PATH");
    if (setenv("LD_LIBRARY_PATH", internal, 1) || setenv("PYTHONHOME", internal, 1) ||
        setenv("PYTHONPATH", modules, 1) || setenv("PYTHONCOERCECLOCALE", "0", 1) ||
        setenv("PYTHONUTF8", "1", 1)) /* other encodings are not where Python looks so early */
        return fail("cannot start", strerror(errno));
    command[0] = python, command[1] = "-sSPOO", command[2] = script;
    for (int n = 1; n < argc; n++) command[n + 2] = argv[n];
    execv(python, command);
    return fail(python, strerror(errno));
}
