// wo_convert_host (kernels/api/api.h) from the header alone, so that the host path is tested without a build of the
// kernels.
#include <cstring>

#include "cutlass_ext/convert/e4m3_conversion.h"
#include "cutlass_ext/convert/numeric_conversion.h"

namespace {

template <class Element, class Source>
int convert(unsigned const* packed, int words, unsigned short* out) {
  constexpr int kCount = 32 / cutlass::sizeof_bits<Source>::value;
  using Converter = weightonly::FastInterleavedAndBiasedNumericArrayConverter<Element, Source, kCount>;
  for (int i = 0; i < words; ++i) {
    typename Converter::source_type source;
    std::memcpy(source.raw_data(), packed + i, sizeof(source));
    typename Converter::result_type const result = Converter{}(source);
    std::memcpy(out + i * kCount, result.raw_data(), sizeof(result));
  }
  return 0;
}

}  // namespace

extern "C" int wo_convert_host(int bits, int bf16, unsigned const* packed, int words, unsigned short* out) {
  using cutlass::bfloat16_t;
  using cutlass::half_t;
  using cutlass::uint4b_t;
  if (bits == 4)
    return bf16 ? convert<bfloat16_t, uint4b_t>(packed, words, out) : convert<half_t, uint4b_t>(packed, words, out);
  if (bits == 8)
    return bf16 ? convert<bfloat16_t, uint8_t>(packed, words, out) : convert<half_t, uint8_t>(packed, words, out);
  return 1;
}

/// The same of E4M3. factored: without the last multiplication.
extern "C" void wo_convert_e4m3_host(int bf16, int factored, unsigned const* packed, int words, unsigned* out) {
  using namespace weightonly::detail;
  using cutlass::bfloat16_t;
  using cutlass::half_t;
  for (int i = 0; i < words; ++i) {
    if (factored)
      (bf16 ? shift_e4m3<bfloat16_t> : shift_e4m3<half_t>)(packed[i], out + 2 * i);
    else
      (bf16 ? ConvertWord<bfloat16_t, weightonly::Fp8>::apply : ConvertWord<half_t, weightonly::Fp8>::apply)(
          packed[i], out + 2 * i);
  }
}
