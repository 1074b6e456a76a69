#include "check.h"

int main(int count, char** arguments) { return check::main(count, arguments); }
