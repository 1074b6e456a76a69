// Prints the text of the core's kernels.
#include <cstdio>

#include "gpu/device/kernel_text.h"

int main() { std::fputs(sirtaki::kernel_text().c_str(), stdout); }
