#pragma once

// Checks of the test programs in this folder.

#include <cstdio>
#include <cstdlib>

// Prints one line; ends the program with status 1 when the check fails.
static inline void check(bool passed, const char * what) {
    printf("%s: %s\n", passed ? "ok" : "FAILED", what);
    if (!passed) {
        exit(1);
    }
}
