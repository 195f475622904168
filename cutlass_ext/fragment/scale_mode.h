// How a kernel applies scales and zero points. A compile-time choice: it decides what the inner loop does.
#pragma once

namespace weightonly {

enum class ScaleMode : int {
  kChannel,     // one scale per column: multiplied into the fp32 sum, exactly, after the loop
  kGroup,       // w = s * q in the loop
  kGroupZeros,  // w = s * (q - z) in the loop; also one group of all K with a zero point
};

}  // namespace weightonly
