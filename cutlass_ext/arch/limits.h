// Limits of the hardware that kernels are shaped by.
#pragma once

namespace weightonly {

/// Dynamic shared memory of one CTA without a request for more: every architecture.
inline constexpr int kDefaultSmemBytes = 48 * 1024;

/// The most shared memory that one CTA can have: sm90.
inline constexpr int kMaxSmemBytesSm90 = 227 * 1024;

}  // namespace weightonly
