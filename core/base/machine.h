// What this process may use of the machine.
#pragma once

namespace sirtaki {

// Cores by affinity and by the control group's quota, at least 1.
int usable_cores();

}  // namespace sirtaki
